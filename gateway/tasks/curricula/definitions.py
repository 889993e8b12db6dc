"""Reads and checks definitions of curricula, from ``curricula/<name>.toml`` or as JSON objects from the API.

An invalid file stops the start with file, line and reason. An invalid request gets the same reasons. A parameter that
the kind of sampler does not use is an error, because an operator would believe in the effect of an ignored ``target``.

One pass reports all problems of a definition together. Pydantic checks each key. Two more checks find keys that
contradict each other, and components or stages without tasks. These two read the raw document and skip malformed parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gateway.catalog.toml import line_of, parse_toml, read_source
from gateway.core.curriculum import RECENT
from gateway.core.errors import ConfigError, InvalidRequest, UnknownEnvironment
from gateway.core.ids import EnvironmentName
from gateway.core.ports.curricula import MAX_DEFINITION_BYTES, MAX_DEFINITIONS
from gateway.core.validation import NO_SUCH_KEY, reason_of
from gateway.tasks.curricula.model import (
    ENVIRONMENT_PATTERN,
    MAX_COMPONENTS,
    MAX_STAGE_WINDOW,
    MAX_STAGES,
    SPLIT_PATTERN,
    TAG_PATTERN,
    Curriculum,
    Sampler,
    SamplerKind,
    Stage,
)
from gateway.tasks.curricula.stages import is_in
from gateway.tasks.curricula.tables import TaskRow, has_any

NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
"""Pattern of a curriculum's name, which becomes part of a split's name and of keys."""
MAX_PROBLEMS = 100
"""Maximum number of problems that the gateway reports for one definition."""

Location = tuple[int | str, ...]
"""The path of keys and list positions to a part of a document."""
Problem = tuple[Location, str]
Look = Callable[[EnvironmentName, str], Sequence[TaskRow] | None]
"""A function that returns a split's tasks, or None if only workers know them. May raise ``UnknownEnvironment``."""
_PATTERNS = {
    ENVIRONMENT_PATTERN: "must be the name of an environment: [a-z][a-z0-9_-]*, 63 characters at most",
    SPLIT_PATTERN: "must be the name of a split: without white space and ':', 100 characters at most",
    TAG_PATTERN: "must be a text without white space at its ends, in one line",
}
_USES = {
    SamplerKind.UNIFORM: (),
    SamplerKind.SEQUENTIAL: (),
    SamplerKind.TARGET_SUCCESS: ("target", "width", "explore", "prior", "window"),
    SamplerKind.LEARNING_PROGRESS: ("explore", "prior", "window"),
    SamplerKind.STAGED: ("window", "stages", "promote_at", "demote_at", "min_attempts", "review", "per_component"),
}
"""The parameters that each kind of sampler uses."""

_SHORT_KEYS = ("environment", "split", "tags")
"""Keys of the single component that are at the top level of a document in the short form."""
_CURRICULUM = TypeAdapter(Curriculum)


def from_document(name: str, document: object, look: Look | None = None) -> Curriculum:
    """Check *document* (plain data) and return the curriculum *name* that it defines.

    Args:
        name: The curriculum's name.
        document: The definition in the long or the short form.
        look: Returns the tasks of a split. None: skip the check of tasks, because the document passed it before.

    Raises:
        InvalidRequest: The definition is invalid. The message has the path of each problem.
    """
    if not isinstance(document, Mapping):
        raise InvalidRequest(f"a curriculum is an object, not {type(document).__name__}")
    curriculum, problems = _checked(name, document, look)
    if not NAME.fullmatch(name):
        problems.insert(0, ((), _misnamed(name)))
    if curriculum is None or problems:
        raise InvalidRequest("; ".join(f"{_path(at)}: {reason}" if at else reason for at, reason in problems))
    return curriculum


def splits_named(document: Mapping[str, Any]) -> list[tuple[EnvironmentName, str]]:
    """Return the environments and splits that *document* names, without malformed components."""
    return [named for _, table in _components(_long(document)) if (named := _split_of(table)) is not None]


def to_document(curriculum: Curriculum) -> dict[str, Any]:
    """Return the definition as plain data in the long form, without the name. `from_document` restores it."""
    document: dict[str, Any] = _CURRICULUM.dump_python(curriculum, mode="json", exclude={"name"}, exclude_none=True)
    used = ("kind", *_USES[curriculum.sampler.kind])
    return {**document, "sampler": {key: document["sampler"][key] for key in used}}


def read_curricula(directory: Path, look: Look | None = None) -> dict[str, Curriculum]:
    """Read the curricula in *directory* (``<name>.toml``), by name. Return no curricula if the folder does not exist.

    *look* is as in `from_document`.

    Raises:
        ConfigError: Files are invalid. The message has the file, line and key of each problem.
    """
    if not directory.exists():
        return {}
    if not directory.is_dir():
        raise ConfigError(f"{directory}: not a folder")
    files = sorted(directory.glob("*.toml"))
    if len(files) > MAX_DEFINITIONS:
        raise ConfigError(f"{directory}: more than {MAX_DEFINITIONS} curricula")
    found: dict[str, Curriculum] = {}
    complaints: list[str] = []
    for path in files:
        try:
            found[path.stem] = _read_file(path, look)
        except ConfigError as error:
            complaints.append(error.detail)
    if complaints:
        raise ConfigError("\n".join(complaints))
    return found


def _read_file(path: Path, look: Look | None) -> Curriculum:
    source = read_source(path)
    document = parse_toml(source, path)
    if len(source.encode()) > MAX_DEFINITION_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_DEFINITION_BYTES} bytes")
    curriculum, problems = _checked(path.stem, document, look)
    lines = sorted((line_of(source, at), f"{_path(at)}: {reason}" if at else reason) for at, reason in problems)
    told = [f"{path}:{line}: {text}" for line, text in lines]
    if not NAME.fullmatch(path.stem):
        told.insert(0, f"{path}: {_misnamed(path.stem)}")
    if curriculum is None or told:
        raise ConfigError("\n".join(told))
    return curriculum


def _checked(name: str, given: Mapping[str, Any], look: Look | None) -> tuple[Curriculum | None, list[Problem]]:
    """Check a document. Return the curriculum, or None if a key is malformed, and the problems."""
    document = _long(given)
    curriculum: Curriculum | None = None
    problems: list[Problem] = [(("name",), NO_SUCH_KEY)] if "name" in document else []
    try:
        curriculum = _CURRICULUM.validate_python({**document, "name": name})
    except ValidationError as error:
        problems += _schema_problems(error)
    problems += _contradictions(document)
    if look is not None:
        problems += _task_problems(document, look)
    if document is not given:
        problems = [(_short(at), reason) for at, reason in problems]
    return curriculum, problems[:MAX_PROBLEMS]


def _long(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return *document* in the long form."""
    if "components" in document or "environment" not in document:
        return document
    component = {key: document[key] for key in _SHORT_KEYS if key in document}
    return {**{key: value for key, value in document.items() if key not in _SHORT_KEYS}, "components": [component]}


def _short(location: Location) -> Location:
    """Translate the *location* in the long form into the location in the short form."""
    if location[:2] != ("components", 0):
        return location
    return location[2:] or ("sampler", "stages")  # no table to point at; only stages can contradict the whole component


# -- problems ---------------------------------------------------------------------------------------------------------


def _schema_problems(error: ValidationError) -> Iterator[Problem]:
    for entry in error.errors(include_url=False)[:MAX_PROBLEMS]:
        reason = reason_of(entry, Curriculum)
        if entry["type"] == "string_pattern_mismatch":
            reason = _PATTERNS[entry["ctx"]["pattern"]]
        elif (
            entry["type"] == "unexpected_keyword_argument" and entry["loc"][0] in _SHORT_KEYS and len(entry["loc"]) == 1
        ):
            reason = "with components, this key belongs into each component"
        yield entry["loc"], reason


def _contradictions(document: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems of keys that contradict each other."""
    if document.get("components") == []:  # pydantic counts only the well-formed components
        yield ("components",), "it must have at least 1 item"
    before: dict[tuple[str, str, tuple[str, ...]], int] = {}
    for at, table in _components(document):
        if (named := _split_of(table)) is not None:
            one = (*named, tuple(sorted(set(_texts(table.get("tags"))))))
            if (first := before.setdefault(one, int(at[1]))) != at[1]:
                yield at, f"environment, split and tags are those of components[{first}]"
    sampler = document.get("sampler", {})
    kind = sampler.get("kind", SamplerKind.UNIFORM) if isinstance(sampler, Mapping) else ""
    if kind not in list(SamplerKind):
        return
    for key in sampler:
        if key in Sampler.__dataclass_fields__ and key not in ("kind", *_USES[SamplerKind(kind)]):
            yield ("sampler", key), f"the sampler {kind} does not use it"
    if kind == SamplerKind.STAGED:
        yield from _stage_contradictions(sampler)
    elif "window" in _USES[SamplerKind(kind)] and RECENT < (_number(sampler.get("window")) or 0) <= MAX_STAGE_WINDOW:
        yield ("sampler", "window"), f"it is more than {RECENT}, the rewards of a task that are kept"


def _stage_contradictions(sampler: Mapping[str, Any]) -> Iterator[Problem]:
    if sampler.get("stages", []) == []:
        yield ("sampler",), "staged needs at least one of stages"
    low, high = (_number(sampler.get(key, getattr(Sampler(), key))) for key in ("demote_at", "promote_at"))
    if low is not None and high is not None and low >= high:
        key = "demote_at" if "demote_at" in sampler else "promote_at"
        yield ("sampler", key), f"demote_at ({low:g}) is not below promote_at ({high:g})"
    names: set[str] = set()
    for at, table in _stages(sampler):
        name, stage = table.get("name"), _stage(table)
        if isinstance(name, str) and name in names:
            yield (*at, "name"), f"two stages are named {name[:80]!r}"
        elif isinstance(name, str):
            names.add(name)
        least, most = stage.min_difficulty, stage.max_difficulty
        if least is not None and most is not None and least > most:
            yield at, f"min_difficulty ({least:g}) is more than max_difficulty ({most:g})"


def _task_problems(document: Mapping[str, Any], look: Look) -> Iterator[Problem]:
    """Yield environments that are not available, and splits, tags and stages without a task."""
    components = list(_components(document))
    chosen: list[tuple[Location, Sequence[TaskRow]]] = []
    for at, table in components:
        named, found = _split_of(table), None
        if named is not None:
            try:
                found = look(*named)
            except UnknownEnvironment as error:
                yield (*at, "environment"), error.detail
        if named is None or found is None:
            continue
        tags = _texts(table.get("tags"))
        rows = [row for row in found if has_any(row, tags)]
        if not found:
            yield (*at, "split"), f"{named[0]} has no task in split {named[1]!r}"
        elif not rows:
            yield (*at, "tags"), f"no task of {named[0]}/{named[1]} is tagged {' or '.join(tags)}"
        else:
            chosen.append((at, rows))
    sampler = document.get("sampler")
    if not isinstance(sampler, Mapping) or sampler.get("kind") != SamplerKind.STAGED:
        return
    stages = [(at, _stage(table)) for at, table in _stages(sampler)]
    if len(chosen) == len(components):  # otherwise a task that is not known yet may be in the stage
        for at, stage in stages:
            if not any(is_in(stage, row) for _, rows in chosen for row in rows):
                yield at, f"no task is in the stage {stage.name[:80]!r}"
    for at, known in chosen:
        if stages and not any(is_in(stage, row) for row in known for _, stage in stages):
            yield at, "none of the component's tasks is in any stage"


# -- a document that may be malformed ---------------------------------------------------------------------------------


def _components(document: Mapping[str, Any]) -> list[tuple[Location, Mapping[str, Any]]]:
    """List the components' tables, with their locations, of a document in the long form."""
    return _tables(document.get("components"), "components")[:MAX_COMPONENTS]


def _stages(sampler: Mapping[str, Any]) -> list[tuple[Location, Mapping[str, Any]]]:
    return _tables(sampler.get("stages"), "sampler", "stages")[:MAX_STAGES]


def _tables(value: object, *where: str) -> list[tuple[Location, Mapping[str, Any]]]:
    listed = value if isinstance(value, list) else ()
    return [((*where, at), one) for at, one in enumerate(listed) if isinstance(one, Mapping)]


def _split_of(table: Mapping[str, Any]) -> tuple[EnvironmentName, str] | None:
    environment, split = table.get("environment"), table.get("split", "train")
    if not isinstance(environment, str) or not isinstance(split, str):
        return None
    return EnvironmentName(environment), split


def _stage(table: Mapping[str, Any]) -> Stage:
    return Stage(
        name=str(table.get("name")),
        tags=_texts(table.get("tags")),
        min_difficulty=_number(table.get("min_difficulty")),
        max_difficulty=_number(table.get("max_difficulty")),
    )


def _texts(value: object) -> tuple[str, ...]:
    return tuple(one for one in value if isinstance(one, str)) if isinstance(value, list) else ()


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number with hundreds of digits
        return None


def _misnamed(name: str) -> str:
    return f"{name[:80]!r} is not a name for a curriculum: [a-z][a-z0-9_-]*, 63 characters at most"


def _path(location: Sequence[int | str]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step[:80]}" if path else step[:80]
    return path

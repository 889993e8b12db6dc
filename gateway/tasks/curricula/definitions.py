"""Definitions of curricula: ``curricula/<name>.toml``, and the same as JSON objects by the API.

A file that is wrong stops the start with file, line and reason; a request is refused with the same ones. What a kind of
sampler has no use for is refused too: a ``target`` that nobody looks at would be believed in.

A definition is checked in one pass, so that all of its problems are told together: the keys by themselves (pydantic),
keys that contradict each other, and the tasks that it asks for. The last two read the document as it is, and pass over
parts that are malformed.
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
"""Of a curriculum: it becomes part of a split's name and of keys."""
NO_SUCH_KEY = "there is no such key"
MAX_PROBLEMS = 100
"""Of one definition; what comes after them is not told."""

Location = tuple[int | str, ...]
"""The keys and places that lead to a part of a document."""
Problem = tuple[Location, str]
Look = Callable[[EnvironmentName, str], Sequence[TaskRow] | None]
"""Looks up the tasks of a split; None: only workers know them. Raises ``UnknownEnvironment``: it is not on offer."""
_PATTERNS = {
    ENVIRONMENT_PATTERN: "the name of an environment is wanted: [a-z][a-z0-9_-]*, 63 characters at most",
    SPLIT_PATTERN: "the name of a split is wanted: without white space and ':', 100 characters at most",
    TAG_PATTERN: "a text without white space at its ends, in one line, is wanted",
}
_USES = {
    SamplerKind.UNIFORM: (),
    SamplerKind.SEQUENTIAL: (),
    SamplerKind.TARGET_SUCCESS: ("target", "width", "explore", "prior", "window"),
    SamplerKind.LEARNING_PROGRESS: ("explore", "prior", "window"),
    SamplerKind.STAGED: ("window", "stages", "promote_at", "demote_at", "min_attempts", "review", "per_component"),
}
"""What each kind of sampler looks at."""

_SHORT_KEYS = ("environment", "split", "tags")
"""Keys of the one component of a document in the short form, which stand at its top."""
_CURRICULUM = TypeAdapter(Curriculum)


def from_document(name: str, document: object, look: Look | None = None) -> Curriculum:
    """Check *document* (plain data) and return the curriculum of *name* that it defines.

    Args:
        look: looks up the tasks that it asks for; None: it was checked before.

    Raises:
        InvalidRequest: with every problem and its path.
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
    """The environments and splits whose tasks *document* asks for, as far as they can be read."""
    return [named for _, table in _components(_long(document)) if (named := _split_of(table)) is not None]


def to_document(curriculum: Curriculum) -> dict[str, Any]:
    """The definition as plain data in the long form, without the name; `from_document` reads it as the same."""
    document: dict[str, Any] = _CURRICULUM.dump_python(curriculum, mode="json", exclude={"name"}, exclude_none=True)
    used = ("kind", *_USES[curriculum.sampler.kind])
    return {**document, "sampler": {key: document["sampler"][key] for key in used}}


def read_curricula(directory: Path, look: Look | None = None) -> dict[str, Curriculum]:
    """The curricula that *directory* has files of (``<name>.toml``), by name; none, if there is no such folder.

    *look* as in `from_document`.

    Raises:
        ConfigError: files are wrong; with every problem, its file, line and key.
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
    """Parse a document; return the curriculum, unless a key is malformed, and every problem."""
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
    """Return where the short form has what the long form has at *location*."""
    if location[:2] != ("components", 0):
        return location
    return location[2:] or ("sampler", "stages")  # the component has no table; only stages can contradict all of it


# -- what is wrong ----------------------------------------------------------------------------------------------------


def _schema_problems(error: ValidationError) -> Iterator[Problem]:
    for entry in error.errors(include_url=False)[:MAX_PROBLEMS]:
        reason = entry["msg"].replace("valid tuple", "valid list").replace("Tuple should", "List should")
        if entry["type"] == "dataclass_type":
            reason = "a table (an object) is wanted"
        elif entry["type"] == "unexpected_keyword_argument":
            reason = NO_SUCH_KEY
            if len(entry["loc"]) == 1 and entry["loc"][0] in _SHORT_KEYS:
                reason = "it stands in each of components, where there are any"
        elif entry["type"] == "string_pattern_mismatch":
            reason = _PATTERNS[entry["ctx"]["pattern"]]
        yield entry["loc"], reason


def _contradictions(document: Mapping[str, Any]) -> Iterator[Problem]:
    """Keys that do not go together."""
    if document.get("components") == []:  # pydantic counts the well-formed ones only
        yield ("components",), "List should have at least 1 item after validation, not 0"
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
    """Environments that are not on offer, and splits, tags and stages without a task."""
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
    if len(chosen) == len(components):  # else some task may be in it that nobody knows yet
        for at, stage in stages:
            if not any(is_in(stage, row) for _, rows in chosen for row in rows):
                yield at, f"no task is in the stage {stage.name[:80]!r}"
    for at, known in chosen:
        if stages and not any(is_in(stage, row) for row in known for _, stage in stages):
            yield at, "none of the component's tasks is in any stage"


# -- a document that may be malformed ---------------------------------------------------------------------------------


def _components(document: Mapping[str, Any]) -> list[tuple[Location, Mapping[str, Any]]]:
    """List the tables of components and where they stand, of a document in the long form."""
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
    return f"{name[:80]!r} is no name for a curriculum: [a-z][a-z0-9_-]*, 63 characters at most"


def _path(location: Sequence[int | str]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step[:80]}" if path else step[:80]
    return path

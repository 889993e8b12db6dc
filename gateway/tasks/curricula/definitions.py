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
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.catalog.toml import line_of
from gateway.core.curriculum import RECENT, Component, Curriculum, Sampler, SamplerKind, Stage
from gateway.core.errors import ConfigError, InvalidRequest, UnknownEnvironment
from gateway.core.ids import EnvironmentName
from gateway.core.ports.curricula import MAX_DEFINITION_BYTES, MAX_DEFINITIONS, MAX_HANDLES
from gateway.tasks.curricula.sampling import LEAST_WIDTH
from gateway.tasks.curricula.stages import is_in
from gateway.tasks.curricula.tables import TaskRow, TaskTable, has_any

NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
"""Of a curriculum: it becomes part of a split's name and of keys."""
USUAL_SPLIT = "train"
MAX_GROUP = 4096
MAX_GROUP_S = 7 * 86_400.0
MAX_COMPONENTS = 256
MAX_STAGES = 64
MAX_TAGS = 64
MAX_STAGE_WINDOW = 4096
"""Outcomes of a stage, which has more than one task; of one task no more than `RECENT` are known."""
MAX_MIN_ATTEMPTS = 1_000_000
MAX_PRIOR = 1_000.0
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6
MAX_PROBLEMS = 100
"""Of one definition; what comes after them is not told."""

Location = tuple[int | str, ...]
"""The keys and places that lead to a part of a document."""
Problem = tuple[Location, str]
Look = Callable[[EnvironmentName, str], TaskTable | None]
"""Looks up the tasks of a split; None: only workers know them. Raises ``UnknownEnvironment``: it is not on offer."""
_ENVIRONMENT = r"^[a-z][a-z0-9_-]{0,62}$"
_SPLIT = r"^[^\s:\x00-\x1f\x7f]{1,100}$"
_TAG = r"^\S(?:.*\S)?$"
_PATTERNS = {
    _ENVIRONMENT: "the name of an environment is wanted: [a-z][a-z0-9_-]*, 63 characters at most",
    _SPLIT: "the name of a split is wanted: without white space and ':', 100 characters at most",
    _TAG: "a text without white space at its ends, in one line, is wanted",
}
_USES = {
    SamplerKind.UNIFORM: (),
    SamplerKind.SEQUENTIAL: (),
    SamplerKind.TARGET_SUCCESS: ("target", "width", "explore", "prior", "window"),
    SamplerKind.LEARNING_PROGRESS: ("explore", "prior", "window"),
    SamplerKind.STAGED: ("window", "stages", "promote_at", "demote_at", "min_attempts", "review", "per_component"),
}
"""What each kind of sampler looks at."""

_Environment = Annotated[str, Field(pattern=_ENVIRONMENT)]
_Split = Annotated[str, Field(pattern=_SPLIT)]
_Tags = Annotated[list[Annotated[str, Field(pattern=_TAG, max_length=100)]], Field(max_length=MAX_TAGS)]
_Share = Annotated[float, Field(ge=0, le=1)]


class _Table(BaseModel):
    """One table; a key that is not named here is refused, and so is a number that is written as a text."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _StageTable(_Table):
    name: str = Field(pattern=_TAG, max_length=100)
    tags: _Tags = []
    min_difficulty: float | None = None
    max_difficulty: float | None = None


class _SamplerTable(_Table):
    kind: SamplerKind = Field(default=SamplerKind.UNIFORM, strict=False)
    target: float = Field(default=Sampler().target, gt=0, lt=1)
    width: float = Field(default=Sampler().width, ge=LEAST_WIDTH, le=10)
    explore: _Share = Sampler().explore
    prior: float = Field(default=Sampler().prior, ge=0, le=MAX_PRIOR)
    window: int = Field(default=Sampler().window, ge=1, le=MAX_STAGE_WINDOW)
    stages: list[_StageTable] = Field(default=[], max_length=MAX_STAGES)
    promote_at: float = Field(default=Sampler().promote_at, gt=0, le=1)
    demote_at: _Share = Sampler().demote_at
    min_attempts: int = Field(default=Sampler().min_attempts, ge=1, le=MAX_MIN_ATTEMPTS)
    review: float = Field(default=Sampler().review, ge=0, lt=1)
    per_component: bool = Sampler().per_component


class _ComponentTable(_Table):
    environment: _Environment
    split: _Split = USUAL_SPLIT
    weight: float = Field(default=1.0, ge=LEAST_WEIGHT, le=MOST_WEIGHT)
    tags: _Tags = []


class _Definition(_Table):
    """The whole document, in the long form."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    group_size: int = Field(default=1, ge=1, le=MAX_GROUP)
    handles: int = Field(default=0, ge=0, le=MAX_HANDLES)
    success_at: float = 1.0
    group_s: float = Field(default=3600.0, gt=0, le=MAX_GROUP_S)
    sampler: _SamplerTable = _SamplerTable()
    components: list[_ComponentTable] = Field(min_length=1, max_length=MAX_COMPONENTS)


class _ShortDefinition(_Definition):
    """The short form: one component, whose keys stand at the top."""

    components: list[_ComponentTable] = []
    environment: _Environment
    split: _Split = USUAL_SPLIT
    tags: _Tags = []


def from_document(name: str, document: object, look: Look | None = None) -> Curriculum:
    """Check *document* (plain data) and return the curriculum of *name* that it defines.

    Args:
        look: looks up the tasks that it asks for; None: it was checked before.

    Raises:
        InvalidRequest: with every problem and its path.
    """
    if not isinstance(document, Mapping):
        raise InvalidRequest(f"a curriculum is an object, not {type(document).__name__}")
    parsed, problems = _checked(document, look)
    if not NAME.fullmatch(name):
        problems.insert(0, ((), _misnamed(name)))
    if parsed is None or problems:
        raise InvalidRequest("; ".join(f"{_path(at)}: {reason}" if at else reason for at, reason in problems))
    return _curriculum(name, parsed)


def splits_named(document: Mapping[str, Any]) -> list[tuple[EnvironmentName, str]]:
    """The environments and splits whose tasks *document* asks for, as far as they can be read."""
    return [named for _, table in _components(document) if (named := _split_of(table)) is not None]


def to_document(curriculum: Curriculum) -> dict[str, Any]:
    """The definition as plain data in the long form, without the name; `from_document` reads it as the same."""
    sampler: dict[str, Any] = {"kind": curriculum.sampler.kind.value}
    for key in _USES[curriculum.sampler.kind]:
        sampler[key] = getattr(curriculum.sampler, key)
    if "stages" in sampler:
        sampler["stages"] = [_stage_document(stage) for stage in curriculum.sampler.stages]
    return {
        "seed": curriculum.seed,
        "group_size": curriculum.group_size,
        "handles": curriculum.handles,
        "success_at": curriculum.success_at,
        "group_s": curriculum.group_s,
        "sampler": sampler,
        "components": [
            {"environment": str(one.environment), "split": one.split, "weight": one.weight, "tags": list(one.tags)}
            for one in curriculum.components
        ],
    }


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
    try:
        data = path.read_bytes()
        source = data.decode()
        document = tomllib.loads(source)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error.reason}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    if len(data) > MAX_DEFINITION_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_DEFINITION_BYTES} bytes")
    parsed, problems = _checked(document, look)
    lines = sorted((line_of(source, at), f"{_path(at)}: {reason}" if at else reason) for at, reason in problems)
    told = [f"{path}:{line}: {text}" for line, text in lines]
    if not NAME.fullmatch(path.stem):
        told.insert(0, f"{path}: {_misnamed(path.stem)}")
    if parsed is None or told:
        raise ConfigError("\n".join(told))
    return _curriculum(path.stem, parsed)


def _checked(document: Mapping[str, Any], look: Look | None) -> tuple[_Definition | None, list[Problem]]:
    """The document parsed, and every problem of it."""
    model = _ShortDefinition if "environment" in document and "components" not in document else _Definition
    parsed: _Definition | None = None
    problems: list[Problem] = []
    try:
        parsed = model.model_validate(document)
    except ValidationError as error:
        problems += _schema_problems(error)
    problems += _contradictions(document)
    if look is not None:
        problems += _task_problems(document, look)
    return parsed, problems[:MAX_PROBLEMS]


def _curriculum(name: str, parsed: _Definition) -> Curriculum:
    tables = parsed.components
    if isinstance(parsed, _ShortDefinition):
        tables = [_ComponentTable(environment=parsed.environment, split=parsed.split, tags=parsed.tags)]
    given = parsed.sampler.model_dump(exclude={"stages"})
    return Curriculum(
        name=name,
        components=tuple(
            Component(
                environment=EnvironmentName(one.environment), split=one.split, weight=one.weight, tags=tuple(one.tags)
            )
            for one in tables
        ),
        sampler=Sampler(**given, stages=tuple(_stage(one.model_dump()) for one in parsed.sampler.stages)),
        seed=parsed.seed,
        group_size=parsed.group_size,
        handles=parsed.handles,
        success_at=parsed.success_at,
        group_s=parsed.group_s,
    )


# -- what is wrong ----------------------------------------------------------------------------------------------------


def _schema_problems(error: ValidationError) -> Iterator[Problem]:
    for entry in error.errors(include_url=False)[:MAX_PROBLEMS]:
        reason = entry["msg"]
        if entry["type"] in ("model_type", "model_attributes_type"):
            reason = "a table (an object) is wanted"
        elif entry["type"] == "extra_forbidden":
            reason = "there is no such key"
            if entry["loc"] in (("environment",), ("split",), ("tags",)):
                reason = "it stands in each of components, where there are any"
        elif entry["type"] == "string_pattern_mismatch":
            reason = _PATTERNS[entry["ctx"]["pattern"]]
        yield entry["loc"], reason


def _contradictions(document: Mapping[str, Any]) -> Iterator[Problem]:
    """Keys that do not go together."""
    before: dict[tuple[str, str, tuple[str, ...]], int] = {}
    for at, table in _components(document):
        if at and (named := _split_of(table)) is not None:
            one = (*named, tuple(sorted(set(_texts(table.get("tags"))))))
            if (first := before.setdefault(one, int(at[1]))) != at[1]:
                yield at, f"environment, split and tags are those of components[{first}]"
    sampler = document.get("sampler", {})
    kind = sampler.get("kind", SamplerKind.UNIFORM) if isinstance(sampler, Mapping) else ""
    if kind not in list(SamplerKind):
        return
    for key in sampler:
        if key in _SamplerTable.model_fields and key not in ("kind", *_USES[SamplerKind(kind)]):
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
        rows = [row for row in found.rows if has_any(row, tags)]
        if not found.rows:
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
            yield at or ("sampler", "stages"), "none of the component's tasks is in any stage"


# -- a document that may be malformed ---------------------------------------------------------------------------------


def _components(document: Mapping[str, Any]) -> list[tuple[Location, Mapping[str, Any]]]:
    """Tables of components and where they stand; in the short form the document itself, at ()."""
    if "components" in document:
        return _tables(document["components"], "components")[:MAX_COMPONENTS]
    return [((), document)] if "environment" in document else []


def _stages(sampler: Mapping[str, Any]) -> list[tuple[Location, Mapping[str, Any]]]:
    return _tables(sampler.get("stages"), "sampler", "stages")[:MAX_STAGES]


def _tables(value: object, *where: str) -> list[tuple[Location, Mapping[str, Any]]]:
    listed = value if isinstance(value, list) else ()
    return [((*where, at), one) for at, one in enumerate(listed) if isinstance(one, Mapping)]


def _split_of(table: Mapping[str, Any]) -> tuple[EnvironmentName, str] | None:
    environment, split = table.get("environment"), table.get("split", USUAL_SPLIT)
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


def _stage_document(stage: Stage) -> dict[str, Any]:
    said = {"name": stage.name, "tags": list(stage.tags)}
    bounds = {"min_difficulty": stage.min_difficulty, "max_difficulty": stage.max_difficulty}
    return said | {key: bound for key, bound in bounds.items() if bound is not None}


def _misnamed(name: str) -> str:
    return f"{name[:80]!r} is no name for a curriculum: [a-z][a-z0-9_-]*, 63 characters at most"


def _path(location: Sequence[int | str]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step[:80]}" if path else step[:80]
    return path

"""Definitions of curricula: ``curricula/<name>.toml``, and the same as JSON objects by the API.

A file that is wrong stops the start with file, line and reason. What a kind of sampler has no use for is refused too: a
``target`` that nobody looks at would be believed in.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gateway.core.curricula import RECENT, Component, Curriculum, Sampler, SamplerKind, Stage
from gateway.core.curriculum_ports import MAX_DEFINITION_BYTES, MAX_DEFINITIONS, MAX_HANDLES
from gateway.core.errors import ConfigError, InvalidRequest
from gateway.core.model import EnvironmentName
from gateway.core.sampling_weights import LEAST_WIDTH
from gateway.environment_files import line_of

NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
"""Of a curriculum: it becomes part of a split's name and of keys."""
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
    SamplerKind.LEARNING_PROGRESS: ("explore", "window"),
    SamplerKind.STAGED: ("window", "stages", "promote_at", "demote_at", "min_attempts", "review"),
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

    @model_validator(mode="after")
    def _has_a_range(self) -> Self:
        least, most = self.min_difficulty, self.max_difficulty
        if least is not None and most is not None and least > most:
            raise ValueError("min_difficulty is more than max_difficulty")
        return self


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

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        problems = [f"{key} is nothing that {self.kind} has a use for" for key in sorted(self._unused())]
        if self.kind is SamplerKind.STAGED:
            if not self.stages:
                problems.append("staged needs at least one of stages")
            if self.demote_at >= self.promote_at:
                problems.append("demote_at is not below promote_at")
            names = [stage.name for stage in self.stages]
            problems += [f"two stages are named {name!r}" for name in _doubles(names)]
        elif self.window > RECENT:
            problems.append(f"window is more than {RECENT}, the rewards of a task that are kept")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _unused(self) -> set[str]:
        return self.model_fields_set - {"kind", *_USES[self.kind]}


class _ComponentTable(_Table):
    environment: _Environment
    split: _Split = "train"
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

    @field_validator("components")
    @classmethod
    def _are_different(cls, components: list[_ComponentTable]) -> list[_ComponentTable]:
        if doubles := _doubles([f"{one.environment}/{one.split}" for one in components]):
            raise ValueError(f"{' and '.join(doubles)} stand{'s' * (len(doubles) == 1)} twice")
        return components


class _ShortDefinition(_Definition):
    """The short form: one component, whose keys stand at the top."""

    components: list[_ComponentTable] = []
    environment: _Environment
    split: _Split = "train"
    tags: _Tags = []

    @model_validator(mode="before")
    @classmethod
    def _has_no_components(cls, document: Any) -> Any:
        if "components" in document:
            raise ValueError("either environment, split and tags at the top, or components")
        return document


def from_document(name: str, document: object, *, where: str = "") -> Curriculum:
    """Check *document* (plain data) and return the curriculum of *name* that it defines.

    Args:
        where: the place that the error names: a file, a field of a request.

    Raises:
        InvalidRequest: with every problem and its path.
    """
    before = f"{where}: " if where else ""
    if not NAME.fullmatch(name):
        raise InvalidRequest(f"{before}{_misnamed(name)}")
    if not isinstance(document, Mapping):
        raise InvalidRequest(f"{before}a curriculum is an object, not {type(document).__name__}")
    try:
        return _read(name, document)
    except ValidationError as error:
        told = "; ".join(f"{_path(at)}: {reason}" if at else reason for at, reason in _problems(error))
        raise InvalidRequest(f"{before}{told}") from None


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


def read_curricula(directory: Path) -> dict[str, Curriculum]:
    """The curricula that *directory* has files of (``<name>.toml``), by name; none, if there is no such folder.

    Raises:
        ConfigError: a file is wrong; with its lines, keys and reasons.
    """
    if not directory.exists():
        return {}
    if not directory.is_dir():
        raise ConfigError(f"{directory}: not a folder")
    files = sorted(directory.glob("*.toml"))
    if len(files) > MAX_DEFINITIONS:
        raise ConfigError(f"{directory}: more than {MAX_DEFINITIONS} curricula")
    return {path.stem: read_curriculum(path) for path in files}


def read_curriculum(path: Path) -> Curriculum:
    """Read one ``<name>.toml``.

    Raises:
        ConfigError: with file, line, key and reason.
    """
    if not NAME.fullmatch(path.stem):
        raise ConfigError(f"{path}: {_misnamed(path.stem)}")
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
    try:
        return _read(path.stem, document)
    except ValidationError as error:
        told = [
            f"{path}:{line_of(source, at)}: {f'{_path(at)}: ' if at else ''}{reason}" for at, reason in _problems(error)
        ]
        raise ConfigError("\n".join(told)) from None


def _read(name: str, document: Mapping[str, Any]) -> Curriculum:
    if "environment" in document:
        short = _ShortDefinition.model_validate(document)
        parsed: _Definition = short
        tables = [_ComponentTable(environment=short.environment, split=short.split, tags=short.tags)]
    else:
        parsed = _Definition.model_validate(document)
        tables = parsed.components
    given = parsed.sampler.model_dump(exclude={"stages"})
    stages = tuple(
        Stage(name=one.name, tags=tuple(one.tags), min_difficulty=one.min_difficulty, max_difficulty=one.max_difficulty)
        for one in parsed.sampler.stages
    )
    return Curriculum(
        name=name,
        components=tuple(
            Component(
                environment=EnvironmentName(one.environment), split=one.split, weight=one.weight, tags=tuple(one.tags)
            )
            for one in tables
        ),
        sampler=Sampler(**given, stages=stages),
        seed=parsed.seed,
        group_size=parsed.group_size,
        handles=parsed.handles,
        success_at=parsed.success_at,
        group_s=parsed.group_s,
    )


def _stage_document(stage: Stage) -> dict[str, Any]:
    said = {"name": stage.name, "tags": list(stage.tags)}
    bounds = {"min_difficulty": stage.min_difficulty, "max_difficulty": stage.max_difficulty}
    return said | {key: bound for key, bound in bounds.items() if bound is not None}


def _doubles(names: Sequence[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def _misnamed(name: str) -> str:
    return f"{name[:80]!r} is no name for a curriculum: [a-z][a-z0-9_-]*, 63 characters at most"


def _problems(error: ValidationError) -> Iterator[tuple[tuple[int | str, ...], str]]:
    for entry in error.errors(include_url=False)[:MAX_PROBLEMS]:
        reason = entry["msg"].removeprefix("Value error, ")
        if entry["type"] in ("model_type", "model_attributes_type"):
            reason = "a table (an object) is wanted"
        elif entry["type"] == "extra_forbidden":
            reason = "there is no such key"
        elif entry["type"] == "string_pattern_mismatch":
            reason = _PATTERNS[entry["ctx"]["pattern"]]
        yield entry["loc"], reason


def _path(location: Sequence[int | str]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step[:80]}" if path else step[:80]
    return path

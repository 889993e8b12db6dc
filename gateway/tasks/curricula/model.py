"""Curricula: what to train on next, as files and the API define it.

The dataclasses carry the bounds of each key for pydantic, which `definitions` checks documents with. Keys that
contradict each other are checked there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, Strict

from gateway.core.ids import EnvironmentName
from gateway.core.ports.curricula import MAX_HANDLES

MAX_GROUP = 4096
MAX_GROUP_S = 7 * 86_400.0
MAX_COMPONENTS = 256
MAX_STAGES = 64
MAX_TAGS = 64
MAX_STAGE_WINDOW = 4096
"""Outcomes of a stage, which has more than one task; of one task no more than `RECENT` are known."""
MAX_MIN_ATTEMPTS = 1_000_000
MAX_PRIOR = 1_000.0
LEAST_WIDTH = 0.001
"""Of ``target_success``; narrower ones are taken for this one."""
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6

ENVIRONMENT_PATTERN = r"^[a-z][a-z0-9_-]{0,62}$"
SPLIT_PATTERN = r"^[^\s:\x00-\x1f\x7f]{1,100}$"
TAG_PATTERN = r"^\S(?:.*\S)?$"

_Text = Annotated[str, Field(pattern=TAG_PATTERN, max_length=100)]
_Tags = Annotated[tuple[_Text, ...], Field(max_length=MAX_TAGS)]
_Whole = Annotated[int, Strict()]
_Real = Annotated[float, Strict()]
_Share = Annotated[_Real, Field(ge=0, le=1)]
_CLOSED = ConfigDict(extra="forbid", allow_inf_nan=False)
"""A key that is not named here is refused, and so is a number without an end."""


class SamplerKind(StrEnum):
    """How the next task is chosen."""

    UNIFORM = "uniform"  #: each task as likely as every other
    SEQUENTIAL = "sequential"  #: in the order of the splits, again and again
    TARGET_SUCCESS = "target_success"  #: tasks whose success rate is near a target: where groups carry signal
    LEARNING_PROGRESS = "learning_progress"  #: tasks whose rewards change
    STAGED = "staged"  #: level by level


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One level of a staged sampler: the tasks that all of these hold for."""

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    name: _Text
    tags: _Tags = ()
    """Any of them; empty: whatever the task's tags are."""
    min_difficulty: _Real | None = None
    max_difficulty: _Real | None = None
    """Inclusive; a task without a difficulty is in no stage that bounds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A way to choose, with all that it can be told; what a kind has no use for is left as it is."""

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    kind: SamplerKind = SamplerKind.UNIFORM
    target: Annotated[_Real, Field(gt=0, lt=1)] = 0.5
    """``target_success``: the success rate that is sought."""
    width: Annotated[_Real, Field(ge=LEAST_WIDTH, le=10)] = 0.15
    """``target_success``: how fast the weight falls with the distance from the target (a Gaussian's deviation)."""
    explore: _Share = 0.1
    """``target_success``, ``learning_progress``: the share of draws that look at nothing."""
    prior: Annotated[_Real, Field(ge=0, le=MAX_PRIOR)] = 2.0
    """``target_success``, ``learning_progress``: how many attempts the estimate of tasks that are alike counts for, in
    that of a task (`tasks.curricula.sampling`)."""
    window: Annotated[_Whole, Field(ge=1, le=MAX_STAGE_WINDOW)] = 16
    """Newest rewards of a task that count, at most `RECENT`; ``staged``: newest outcomes of a stage."""
    stages: Annotated[tuple[Stage, ...], Field(max_length=MAX_STAGES)] = ()
    """``staged``: from the first to the last; at least one."""
    promote_at: Annotated[_Real, Field(gt=0, le=1)] = 0.8
    """``staged``: the success rate of the present stage from which on the next one is drawn from."""
    demote_at: _Share = 0.2
    """``staged``: the rate below which the one before is drawn from again; below `promote_at`."""
    min_attempts: Annotated[_Whole, Field(ge=1, le=MAX_MIN_ATTEMPTS)] = 32
    """``staged``: outcomes in a stage before it is left, counted anew each time that it is entered."""
    review: Annotated[_Real, Field(ge=0, lt=1)] = 0.1
    """``staged``: the share of draws from stages that were passed already."""
    per_component: Annotated[bool, Strict()] = False
    """``staged``: each component moves through the stages by its own outcomes; else all move together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A part of a mixture: a split of an environment, or what of it has certain tags."""

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    environment: Annotated[EnvironmentName, Field(pattern=ENVIRONMENT_PATTERN)]
    split: Annotated[str, Field(pattern=SPLIT_PATTERN)] = "train"
    weight: Annotated[_Real, Field(ge=LEAST_WEIGHT, le=MOST_WEIGHT)] = 1.0
    """Its share of draws is this over the sum of all."""
    tags: _Tags = ()
    """Any of them; empty: all tasks of the split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """What to train on next. Trainers see it as the split ``train:<name>`` of each of its environments."""

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    name: str
    """Letters, digits, ``_`` and ``-``; of a scope (`scope_of`) also ``@``."""
    seed: Annotated[_Whole, Field(ge=0, lt=2**63)] = 0
    group_size: Annotated[_Whole, Field(ge=1, le=MAX_GROUP)] = 1
    """Openings of one handle that get the same task, before it stands for a new draw."""
    handles: Annotated[_Whole, Field(ge=0, le=MAX_HANDLES)] = 0
    """How many indices the split has; 0: as many as its components have tasks."""
    success_at: _Real = 1.0
    """The reward from which on an attempt is a success."""
    group_s: Annotated[_Real, Field(gt=0, le=MAX_GROUP_S)] = 3600.0
    """A handle whose first opening was longer ago stands for a new draw though its group is not full."""
    sampler: Sampler = Sampler()
    """Chooses within a component; which one is drawn by the weights."""
    components: Annotated[tuple[Component, ...], Field(max_length=MAX_COMPONENTS)]
    """At least one; no two have the same environment, split and tags."""

    @property
    def environments(self) -> Sequence[EnvironmentName]:
        """The environments of its components, each once, in their order."""
        return tuple(dict.fromkeys(one.environment for one in self.components))


def scopes(curriculum: Curriculum) -> list[Curriculum]:
    """Return the curriculum and, where it has several environments, what of it is drawn within each of them."""
    names = curriculum.environments
    return [curriculum] if len(names) == 1 else [curriculum, *(scope_of(curriculum, name) for name in names)]


def scope_of(curriculum: Curriculum, environment: EnvironmentName) -> Curriculum:
    """Return what of *curriculum* is drawn within *environment*, one of its own."""
    own = tuple(one for one in curriculum.components if one.environment == environment)
    if len(own) == len(curriculum.components):
        return curriculum
    return replace(curriculum, name=f"{curriculum.name}@{environment}", components=own)

"""Defines curricula as files and the API describe them. A curriculum chooses the next training task.

The dataclasses hold the bounds of each key for pydantic, with which `definitions` checks documents. That module also
finds keys that contradict each other.
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
"""Maximum ``window`` of a staged sampler. A stage has several tasks, each with at most `RECENT` known rewards."""
MAX_MIN_ATTEMPTS = 1_000_000
MAX_PRIOR = 1_000.0
LEAST_WIDTH = 0.001
"""Least ``width`` of ``target_success``. Definitions cannot have less, and the sampler raises a smaller width to it."""
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6
MAX_DIGITS = 18
"""Maximum number of digits of an index. Python refuses to convert thousands of digits."""
ENVIRONMENT_PATTERN = r"^[a-z][a-z0-9_-]{0,62}$"
SPLIT_PATTERN = r"^[^\s:\x00-\x1f\x7f]{1,100}$"
TAG_PATTERN = r"^\S(?:.*\S)?$"

_Text = Annotated[str, Field(pattern=TAG_PATTERN, max_length=100)]
_Tags = Annotated[tuple[_Text, ...], Field(max_length=MAX_TAGS)]
_Whole = Annotated[int, Strict()]
_Real = Annotated[float, Strict()]
_Share = Annotated[_Real, Field(ge=0, le=1)]
_CLOSED = ConfigDict(extra="forbid", allow_inf_nan=False)
"""Pydantic's settings for definitions, which refuse unknown keys, infinity and NaN."""


class SamplerKind(StrEnum):
    """The method by which a curriculum chooses the next task."""

    UNIFORM = "uniform"  #: all tasks are equally likely
    SEQUENTIAL = "sequential"  #: in the order of the splits, repeatedly
    TARGET_SUCCESS = "target_success"  #: tasks with a success rate near a target, where groups carry signal
    LEARNING_PROGRESS = "learning_progress"  #: tasks whose rewards change
    STAGED = "staged"  #: level by level


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One level of a staged sampler: the tasks that meet all conditions below."""

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    name: _Text
    tags: _Tags = ()
    """Tags of which a task needs at least one. Empty: tags do not matter."""
    min_difficulty: _Real | None = None
    max_difficulty: _Real | None = None
    """Inclusive upper bound. A task without a difficulty is in no stage with a bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A kind of sampler with its parameters. Parameters that the kind does not use keep their defaults."""

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    kind: SamplerKind = SamplerKind.UNIFORM
    target: Annotated[_Real, Field(gt=0, lt=1)] = 0.5
    """``target_success``: the preferred success rate."""
    width: Annotated[_Real, Field(ge=LEAST_WIDTH, le=10)] = 0.15
    """``target_success``: the standard deviation of the Gaussian weight around the target."""
    explore: _Share = 0.1
    """``target_success``, ``learning_progress``: the share of draws that ignore the records."""
    prior: Annotated[_Real, Field(ge=0, le=MAX_PRIOR)] = 2.0
    """``target_success``, ``learning_progress``: the weight, in attempts, of the estimate of similar tasks in a task's
    own estimate (`tasks.curricula.sampling`)."""
    window: Annotated[_Whole, Field(ge=1, le=MAX_STAGE_WINDOW)] = 16
    """Number of a task's newest rewards to use, at most `RECENT`. ``staged``: number of newest outcomes of a stage."""
    stages: Annotated[tuple[Stage, ...], Field(max_length=MAX_STAGES)] = ()
    """``staged``: at least one stage, from the first to the last."""
    promote_at: Annotated[_Real, Field(gt=0, le=1)] = 0.8
    """``staged``: the least success rate at which the curriculum moves to the next stage."""
    demote_at: _Share = 0.2
    """``staged``: the success rate, less than `promote_at`, below which it moves to the previous stage."""
    min_attempts: Annotated[_Whole, Field(ge=1, le=MAX_MIN_ATTEMPTS)] = 32
    """``staged``: the least number of outcomes in a stage before a move. Each entry into a stage restarts the count."""
    review: Annotated[_Real, Field(ge=0, lt=1)] = 0.1
    """``staged``: the share of draws from stages before the present stage."""
    per_component: Annotated[bool, Strict()] = False
    """``staged``: True if each component moves by its own outcomes, False if all components move together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A part of a mixture: the tasks of an environment's split, or the tasks in it with certain tags."""

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    environment: Annotated[EnvironmentName, Field(pattern=ENVIRONMENT_PATTERN)]
    split: Annotated[str, Field(pattern=SPLIT_PATTERN)] = "train"
    weight: Annotated[_Real, Field(ge=LEAST_WEIGHT, le=MOST_WEIGHT)] = 1.0
    """Weight of the component. Its share of draws is this weight divided by the sum of all weights."""
    tags: _Tags = ()
    """Tags of which a task needs at least one. Empty: all tasks of the split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """A mixture of tasks to draw from. Trainers see it as the split ``train:<name>`` of each of its environments."""

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    name: str
    """Name of letters, digits, ``_`` and ``-``. A scope's name (`scope_of`) may also have ``@``."""
    seed: Annotated[_Whole, Field(ge=0, lt=2**63)] = 0
    group_size: Annotated[_Whole, Field(ge=1, le=MAX_GROUP)] = 1
    """Number of openings of one handle that get the same task. The next opening makes a new draw."""
    handles: Annotated[_Whole, Field(ge=0, le=MAX_HANDLES)] = 0
    """Number of indices of the split. 0: the number of the components' tasks."""
    success_at: _Real = 1.0
    """Least reward of a successful attempt."""
    group_s: Annotated[_Real, Field(gt=0, le=MAX_GROUP_S)] = 3600.0
    """Seconds after a handle's draw until its next opening makes a new draw, even if the group is not full."""
    sampler: Sampler = Sampler()
    """The choice within a component. The weights choose the component."""
    components: Annotated[tuple[Component, ...], Field(max_length=MAX_COMPONENTS)]
    """At least one component. Each has a different combination of environment, split and tags."""

    @property
    def environments(self) -> Sequence[EnvironmentName]:
        """The distinct environments of the components, in the components' order."""
        return tuple(dict.fromkeys(one.environment for one in self.components))


def scopes(curriculum: Curriculum) -> list[Curriculum]:
    """Return the curriculum. If it has several environments, also return its scope in each of them."""
    names = curriculum.environments
    return [curriculum] if len(names) == 1 else [curriculum, *(scope_of(curriculum, name) for name in names)]


def scope_of(curriculum: Curriculum, environment: EnvironmentName) -> Curriculum:
    """Return the scope of *curriculum* in *environment*: a curriculum of only that environment's components."""
    own = tuple(one for one in curriculum.components if one.environment == environment)
    if len(own) == len(curriculum.components):
        return curriculum
    return replace(curriculum, name=f"{curriculum.name}@{environment}", components=own)


def is_index(text: str) -> bool:
    """Return True if *text* is a number of at most `MAX_DIGITS` digits."""
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS

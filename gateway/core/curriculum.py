"""The nouns of curricula: what is known of each task from the sessions on it, and what a curriculum is."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from gateway.core.ids import EnvironmentName

PREFIX = "train:"
"""What the split of a curriculum begins with; its name follows."""
RECENT = 32
"""Rewards of one task that are kept, the newest ones: what success rates and learning progress are told from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one session on a task went: it ended with a summary of its worker's, after at least one step."""

    environment: EnvironmentName
    """The one that trainers know: of a split with resources of its own, its base."""
    task: str
    """The task's id; ``split/index`` where it has none; ``sha256:…`` of one that was given inline without an id."""
    reward: float
    """The sum of its rewards; finite."""
    finished: bool
    steps: int
    seconds: float
    policy: str = ""
    """The trainer's tag of the policy that played it; empty: none was given."""
    lease: str = ""
    """The session's: the same outcome told twice counts once, within what the store remembers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """What is known of one task. `after` is all there is to how a record comes about."""

    environment: EnvironmentName
    task: str
    attempts: int = 0
    finished: int = 0
    """Of the attempts, those that came to an end by themselves."""
    mean: float = 0.0
    """Of all rewards."""
    spread: float = 0.0
    """Sum of squared differences from the mean (Welford): the variance times `attempts`."""
    steps: float = 0.0
    """Mean of an attempt."""
    seconds: float = 0.0
    """Mean of an attempt."""
    seen_at: float = 0.0
    """Unix time, by the store's clock, of the last attempt's end."""
    policy: str = ""
    """Of the last attempt."""
    recent: tuple[float, ...] = ()
    """The newest rewards, oldest first, at most `RECENT`."""

    @property
    def deviation(self) -> float:
        """Standard deviation of all rewards (of the population); 0 of one attempt."""
        return math.sqrt(self.spread / self.attempts) if self.attempts else 0.0

    def after(self, outcome: Outcome, at: float) -> TaskRecord:
        """The record once *outcome* is in it, which came at *at*."""
        attempts = self.attempts + 1
        delta = outcome.reward - self.mean
        mean = self.mean + delta / attempts
        return replace(
            self,
            attempts=attempts,
            finished=self.finished + outcome.finished,
            mean=mean,
            spread=self.spread + delta * (outcome.reward - mean),
            steps=self.steps + (outcome.steps - self.steps) / attempts,
            seconds=self.seconds + (outcome.seconds - self.seconds) / attempts,
            seen_at=at,
            policy=outcome.policy,
            recent=(*self.recent, outcome.reward)[-RECENT:],
        )


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

    name: str
    tags: tuple[str, ...] = ()
    """Any of them; empty: whatever the task's tags are."""
    min_difficulty: float | None = None
    max_difficulty: float | None = None
    """Inclusive; a task without a difficulty is in no stage that bounds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A way to choose, with all that it can be told; what a kind has no use for is left as it is."""

    kind: SamplerKind = SamplerKind.UNIFORM
    target: float = 0.5
    """``target_success``: the success rate that is sought, in (0, 1)."""
    width: float = 0.15
    """``target_success``: how fast the weight falls with the distance from the target (a Gaussian's deviation)."""
    explore: float = 0.1
    """``target_success``, ``learning_progress``: the share of draws that look at nothing, in [0, 1]."""
    prior: float = 2.0
    """``target_success``, ``learning_progress``: how many attempts the estimate of tasks that are alike counts for, in
    that of a task (`tasks.curricula.sampling`)."""
    window: int = 16
    """Newest rewards of a task that count, at most `RECENT`; ``staged``: newest outcomes of a stage."""
    stages: tuple[Stage, ...] = ()
    """``staged``: from the first to the last; at least one."""
    promote_at: float = 0.8
    """``staged``: the success rate of the present stage from which on the next one is drawn from."""
    demote_at: float = 0.2
    """``staged``: the rate below which the one before is drawn from again; below `promote_at`."""
    min_attempts: int = 32
    """``staged``: outcomes in a stage before it is left, counted anew each time that it is entered."""
    review: float = 0.1
    """``staged``: the share of draws from stages that were passed already."""
    per_component: bool = False
    """``staged``: each component moves through the stages by its own outcomes; else all move together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A part of a mixture: a split of an environment, or what of it has certain tags."""

    environment: EnvironmentName
    split: str = "train"
    weight: float = 1.0
    """Its share of draws is this over the sum of all; positive."""
    tags: tuple[str, ...] = ()
    """Any of them; empty: all tasks of the split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """What to train on next. Trainers see it as the split ``train:<name>`` of each of its environments."""

    name: str
    """Letters, digits, ``_`` and ``-``."""
    components: tuple[Component, ...]
    """At least one; no two have the same environment, split and tags."""
    sampler: Sampler = Sampler()
    """Chooses within a component; which one is drawn by the weights."""
    seed: int = 0
    group_size: int = 1
    """Openings of one handle that get the same task, before it stands for a new draw."""
    handles: int = 0
    """How many indices the split has; 0: as many as its components have tasks."""
    success_at: float = 1.0
    """The reward from which on an attempt is a success."""
    group_s: float = 3600.0
    """A handle whose first opening was longer ago stands for a new draw though its group is not full."""

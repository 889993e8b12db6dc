"""Task records: statistics of each task from the sessions on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gateway.core.ids import EnvironmentName

PREFIX = "train:"
"""Prefix of a split that represents a curriculum; the curriculum's name follows."""
RECENT = 32
"""Number of the newest rewards of a task that are kept. Success rates and learning progress are computed from them."""


def book_of(environment: EnvironmentName, scorer: str) -> EnvironmentName:
    """Return the name under which the store keeps the records of *environment* by one version of its scorer.

    So the rewards of two versions are never in one record. Without a version it is the environment's own name, as in
    stores of older gateways.
    """
    return EnvironmentName(f"{environment}#{scorer}") if scorer else environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a session that ended with its worker's summary after at least one step."""

    environment: EnvironmentName
    """The environment as trainers know it: for a split with its own resources, the base environment. With a known
    scorer, the scorer's version follows, see `book_of`."""
    task: str
    """Key of the task's name, see `TaskName`. So a task that a trainer sends whole has no part in a listed one's."""
    reward: float
    """Sum of the session's rewards; finite."""
    finished: bool
    steps: int
    seconds: float
    policy: str = ""
    """The trainer's tag of the policy that played the session; empty: no tag was given."""
    lease: str = ""
    """The session's lease. A repeated outcome counts once, as long as the store remembers the lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """Statistics of one task by one version of the scorer, which `after` alone computes."""

    environment: EnvironmentName
    task: str
    """Key of the task's name, see `TaskName`."""
    scorer: str = ""
    """Version of the scorer, see ``Session.scorer``; empty: not known."""
    attempts: int = 0
    finished: int = 0
    """Number of attempts that the environment ended."""
    mean: float = 0.0
    """Mean of all rewards."""
    spread: float = 0.0
    """Sum of squared differences from the mean (Welford's algorithm): the variance times `attempts`."""
    steps: float = 0.0
    """Mean number of steps of an attempt."""
    seconds: float = 0.0
    """Mean duration of an attempt."""
    seen_at: float = 0.0
    """Unix time of the end of the last attempt, by the store's clock."""
    policy: str = ""
    """Policy tag of the last attempt."""
    recent: tuple[float, ...] = ()
    """The newest rewards, oldest first, at most `RECENT`."""

    @property
    def deviation(self) -> float:
        """Standard deviation of all rewards (of the population); 0 for a single attempt."""
        return math.sqrt(self.spread / self.attempts) if self.attempts else 0.0

    def after(self, outcome: Outcome, at: float) -> TaskRecord:
        """Return the record with *outcome* added, which arrived at the Unix time *at*."""
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

"""Records of tasks: what is known of each task from the sessions on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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

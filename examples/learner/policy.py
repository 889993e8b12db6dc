"""A policy over features, and how it learns from groups: softmax, log-linear, GRPO's advantages.

Nothing here knows an environment. A decision is a choice among options, each a set of binary features; their weights
are all that is learnt. Tasks that share features share what is learnt on either.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean, pstdev
from typing import Final

LEAST_DEVIATION: Final = 0.1
"""Added to the deviation of a group's rewards, so that differences in crumbs of partial credit are no strong signal."""

Features = tuple[str, ...]
"""Names of the features that an option has."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice that was made."""

    options: tuple[Features, ...]
    taken: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """One member of a group: all that was decided in an episode, and what it was worth."""

    decisions: tuple[Decision, ...]
    reward: float


@dataclass(slots=True)
class Policy:
    """Chooses an option with probability proportional to ``exp`` of the sum of its features' weights."""

    weights: dict[str, float] = field(default_factory=dict)
    """A feature that is missing weighs 0: at the beginning all options are alike."""

    def probabilities(self, options: Sequence[Features]) -> list[float]:
        """How likely each option is taken; *options* is not empty."""
        known = self.weights
        scores = [sum([known.get(name, 0.0) for name in option]) for option in options]
        most = max(scores)
        shares = [math.exp(score - most) for score in scores]
        whole = sum(shares)
        return [share / whole for share in shares]

    def decide(self, options: Sequence[Features], chance: random.Random) -> Decision:
        """Draw one of *options*."""
        sums = list(accumulate(self.probabilities(options)))
        point = chance.random() * sums[-1]
        taken = next((at for at, until in enumerate(sums) if point < until), len(sums) - 1)
        return Decision(tuple(options), taken)

    def log_probability(self, decisions: Sequence[Decision]) -> float:
        """Of all *decisions* together."""
        return sum(math.log(self.probabilities(one.options)[one.taken]) for one in decisions)

    def gradient(self, decisions: Sequence[Decision]) -> dict[str, float]:
        """How `log_probability` changes with each weight: the features taken less those expected."""
        slopes: dict[str, float] = {}
        for decision in decisions:
            chances = self.probabilities(decision.options)
            for at, option in enumerate(decision.options):
                slope = (at == decision.taken) - chances[at]
                for name in option:
                    slopes[name] = slopes.get(name, 0.0) + slope
        return slopes

    def learn(self, group: Sequence[Attempt], *, rate: float) -> bool:
        """Take one step of ascent on a group's rewards, *rate* far; whether there was anything to learn from."""
        wanted = advantages([attempt.reward for attempt in group])
        if not any(wanted):
            return False
        change: dict[str, float] = {}
        for attempt, advantage in zip(group, wanted, strict=True):
            for name, slope in self.gradient(attempt.decisions).items():
                change[name] = change.get(name, 0.0) + advantage * slope
        for name, slope in change.items():
            self.weights[name] = self.weights.get(name, 0.0) + rate * slope / len(group)
        return True


def advantages(rewards: Sequence[float]) -> list[float]:
    """Centre *rewards* of one group on their mean, and divide by their deviation; all 0 if they are all the same."""
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean, scale = fmean(rewards), pstdev(rewards) + LEAST_DEVIATION
    return [(reward - mean) / scale for reward in rewards]


def largest(weights: Mapping[str, float], count: int) -> list[tuple[str, float]]:
    """The *count* weights that are farthest from 0, for a look at what was learnt."""
    return sorted(weights.items(), key=lambda item: (-abs(item[1]), item[0]))[:count]

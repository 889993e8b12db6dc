"""A policy over features that learns from groups: softmax, log-linear, GRPO's advantages.

This module is independent of the environment. A decision is a choice among options, each a set of binary features.
Only the features' weights are learnt. Tasks with common features share what is learnt.
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
"""Added to the deviation of a group's rewards, so that small differences of partial credit give no strong signal."""

Features = tuple[str, ...]
"""Names of an option's features."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice among options."""

    options: tuple[Features, ...]
    taken: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """One member of a group: all decisions of an episode, and its reward."""

    decisions: tuple[Decision, ...]
    reward: float


@dataclass(slots=True)
class Policy:
    """Chooses an option with probability proportional to ``exp`` of the sum of its features' weights."""

    weights: dict[str, float] = field(default_factory=dict)
    """Weights by feature. A missing feature has the weight 0, so at first all options are equal."""

    def probabilities(self, options: Sequence[Features]) -> list[float]:
        """Return the probability of each option. *options* is not empty."""
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
        """Return the log probability of all *decisions* together."""
        return sum(math.log(self.probabilities(one.options)[one.taken]) for one in decisions)

    def gradient(self, decisions: Sequence[Decision]) -> dict[str, float]:
        """Return the derivatives of `log_probability` by weight: the features taken minus the expected features."""
        slopes: dict[str, float] = {}
        for decision in decisions:
            chances = self.probabilities(decision.options)
            for at, option in enumerate(decision.options):
                slope = (at == decision.taken) - chances[at]
                for name in option:
                    slopes[name] = slopes.get(name, 0.0) + slope
        return slopes

    def learn(self, group: Sequence[Attempt], *, rate: float) -> bool:
        """Take one ascent step on a group's rewards with learning rate *rate*. Return False if there is no signal."""
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
    """Centre *rewards* of one group on their mean, and divide by their deviation. Return zeros if all are equal."""
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean, scale = fmean(rewards), pstdev(rewards) + LEAST_DEVIATION
    return [(reward - mean) / scale for reward in rewards]


def largest(weights: Mapping[str, float], count: int) -> list[tuple[str, float]]:
    """Return the *count* weights that are farthest from 0, to inspect what was learnt."""
    return sorted(weights.items(), key=lambda item: (-abs(item[1]), item[0]))[:count]

"""How likely the tasks of one component are drawn, from their records.

Only the proportions of weights mean anything, and only within a component: which component a draw falls to is told by
the mixture, so environments whose rewards are of another size do not push each other aside.

Weights end as whole numbers. Sums of those are exact in any order and in any Python, where sums of floats are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from gateway.core.curriculum import Sampler, SamplerKind, TaskRecord
from gateway.tasks.curricula.tables import TaskRow

LEAST_WIDTH = 0.001
"""Of ``target_success``; narrower ones are taken for this one."""
DUST = 1e-9
"""Of the largest reward: a smaller change is one of rounding, and would be the largest where nothing changes."""
GRAINS = 2**52
"""The sum of a component's weights as whole numbers, but for what rounding down takes."""


@dataclass(slots=True)
class _Kind:
    """Tasks that are alike."""

    size: int = 0
    rewards: list[float] = field(default_factory=list)
    """Its newest ones, the newest first."""
    counts: list[float] = field(default_factory=list)
    """How much each of them still counts, up to 1."""
    told: float | None = None
    """Its estimate, once somebody has asked for it."""


class _Evidence:
    """What is known of each task, and of the tasks that are alike.

    Kinds are all tasks of a difficulty, and within these all that have the same tags too. A task that was tried seldom
    says little by itself, and in a run with few groups of episodes for each task that is most of them. So the estimate
    of a task leans on that of the tasks with its difficulty and tags, and theirs on that of all with its difficulty:
    each counts for ``prior`` attempts in the next one (a hierarchical prior). A task with neither tags nor a difficulty
    is of no kind, and neither is one that is alone in its kind.

    A kind is told from its newest ``window`` rewards. Records keep no order among tasks but that of their last
    attempts, so these are the rewards of the task tried last, then those of the one tried before it, and so on.

    The policy changes: what a reward says of a task, or of its kind, is worth half as much once half a window of
    rewards for each kind came after it. So what nobody looks at becomes open again, and is tried again.
    """

    def __init__(self, rows: Sequence[TaskRow], records: Sequence[TaskRecord | None], sampler: Sampler) -> None:
        self._prior = sampler.prior
        known: dict[tuple[float | None, tuple[str, ...] | None], _Kind] = {}
        kinds: list[list[_Kind]] = []
        for row in rows:
            found = []
            if row.difficulty is not None:
                found.append(known.setdefault((row.difficulty, None), _Kind()))
            if row.tags:
                found.append(known.setdefault((row.difficulty, tuple(sorted(set(row.tags)))), _Kind()))
            for kind in found:
                kind.size += 1
            kinds.append(found)
        self.all = [kind for kind in known.values() if kind.size > 1]
        self.kinds = [[kind for kind in found if kind.size > 1] for found in kinds]
        """Of each task, the widest first."""
        self.rewards: list[Sequence[float]] = [record.recent[-sampler.window :] if record else () for record in records]
        """Of each task, the newest ones, oldest first."""
        self.counts = [1.0] * len(rows)
        """How much each of a task's rewards still counts, up to 1."""
        alone = sum(not found for found in self.kinds)
        half_life = sampler.window / 2 * (alone + len({id(found[-1]) for found in self.kinds if found}))
        tried = [(-record.seen_at, record.task, at) for at, record in enumerate(records) if record and record.recent]
        age = 0
        for _, _, at in sorted(tried):
            rewards, count = self.rewards[at], 0.5 ** (age / half_life)
            self.counts[at] = count
            age += len(rewards)
            for kind in self.kinds[at]:
                newest = rewards[: -1 - (sampler.window - len(kind.rewards)) : -1]
                kind.rewards += newest
                kind.counts += [count] * len(newest)

    def estimates(
        self, told_of: Callable[[Sequence[float], Sequence[float]], float | None], first: float
    ) -> list[float]:
        """The estimate of each task.

        Args:
            told_of: what rewards, the newest first, with how much each counts, say by themselves; None: nothing.
            first: what the widest kinds lean on.
        """
        found = []
        for kinds, rewards, count in zip(self.kinds, self.rewards, self.counts, strict=True):
            estimate = first
            for kind in kinds:
                if kind.told is None:
                    kind.told = self._leaning(told_of(kind.rewards, kind.counts), sum(kind.counts), estimate)
                estimate = kind.told
            if rewards:
                own = told_of(rewards[::-1], [count] * len(rewards))
                estimate = self._leaning(own, count * len(rewards), estimate)
            found.append(estimate)
        return found

    def _leaning(self, told: float | None, attempts: float, on: float) -> float:
        if told is None or not attempts:
            return on
        share = attempts / (attempts + self._prior)
        return share * told + (1 - share) * on


def target_success(
    rows: Sequence[TaskRow], records: Sequence[TaskRecord | None], sampler: Sampler, success_at: float
) -> list[float]:
    """Prefer tasks whose success rate is near ``sampler.target``; the nearest task weighs 1.

    A trainer that centres rewards on the mean of their group (GRPO and its like) learns nothing from a group in which
    all succeed or all fail. With a success rate p the rewards of a group vary by p(1 - p), which is largest at 1/2 and
    falls to nothing at both ends: so what is sought is a rate, not a difficulty.

    The rate of a task is told from its newest ``window`` rewards and from those of the tasks that are alike, and where
    there are none it is the target (`_Evidence`). So a kind of task that was never tried counts as at the target and is
    tried soon, and one failure does not yet banish a task. The weight is a Gaussian of the rate's distance from the
    target, relative to that of the nearest task: however narrow it is, something weighs more than nothing.
    """
    width = max(sampler.width, LEAST_WIDTH)

    def rate_of(rewards: Sequence[float], counts: Sequence[float]) -> float | None:
        whole = sum(counts)
        won = sum(count for reward, count in zip(rewards, counts, strict=True) if reward >= success_at)
        return won / whole if whole else None

    rates = _Evidence(rows, records, sampler).estimates(rate_of, sampler.target)
    exponents = [((rate - sampler.target) / width) ** 2 / 2 for rate in rates]
    least = min(exponents)
    return [math.exp(least - exponent) for exponent in exponents]


def learning_progress(rows: Sequence[TaskRow], records: Sequence[TaskRecord | None], sampler: Sampler) -> list[float]:
    """Prefer tasks whose rewards change, for better or worse; the one that changes most weighs 1.

    As in Oudeyer's curiosity and in the teacher of Matiisen and others (Teacher-Student Curriculum Learning): what is
    mastered and what is out of reach both stay as they are, and cost time; what rises is being learnt, and what falls
    is being forgotten, so its sign does not matter. The progress of a task is the distance between the means of the
    older and of the newer half of its newest ``window`` rewards; of an odd number the newer half has one more. It
    leans on that of the tasks that are alike (`_Evidence`).

    Fewer than two rewards say nothing. A kind of task of which nothing is known weighs as much as the one that changes
    most, so that it is tried. Where nothing changes and all were tried, all weigh the same.
    """
    evidence = _Evidence(rows, records, sampler)

    def change_of(rewards: Sequence[float], counts: Sequence[float] = ()) -> float | None:
        return _change(rewards[::-1])

    changes = [change_of(kind.rewards) for kind in evidence.all]
    pairs = list(zip(evidence.kinds, evidence.rewards, strict=True))
    changes += [_change(rewards) for kinds, rewards in pairs if not kinds]
    estimates = evidence.estimates(change_of, max(change or 0.0 for change in changes))
    if most := max(estimates):
        return [estimate / most for estimate in estimates]
    are_open = [len(rewards) < 2 and len(kinds[-1].rewards if kinds else ()) < 2 for kinds, rewards in pairs]
    return [float(is_open) for is_open in are_open] if any(are_open) else [1.0] * len(rows)


def _change(newest: Sequence[float]) -> float | None:
    """A quarter of the distance between the two halves' means; None: there are no halves."""
    middle = len(newest) // 2
    if not middle:
        return None
    change = abs(_quarter(newest[middle:]) - _quarter(newest[:middle]))
    return change if change > DUST * max(map(abs, newest)) else 0.0


def _quarter(rewards: Sequence[float]) -> float:
    """A quarter of the mean: the distance of two of them is finite, whatever the rewards are."""
    try:
        return math.fsum(rewards) / (4 * len(rewards))
    except OverflowError:
        return math.fsum(reward / (4 * len(rewards)) for reward in rewards)


def sums_of(
    rows: Sequence[TaskRow], records: Sequence[TaskRecord | None], sampler: Sampler, success_at: float
) -> Sequence[int] | None:
    """Running sums of the weights of *rows*, as whole numbers; None: all tasks weigh the same."""
    if sampler.kind is SamplerKind.TARGET_SUCCESS:
        weights = target_success(rows, records, sampler, success_at)
    elif sampler.kind is SamplerKind.LEARNING_PROGRESS:
        weights = learning_progress(rows, records, sampler)
    else:
        return None
    return _explored(weights, sampler.explore)


def _explored(weights: Sequence[float], explore: float) -> Sequence[int] | None:
    """Let a share *explore* of draws look at nothing."""
    whole, each = math.fsum(weights), explore / len(weights)
    if explore >= 1 or not whole or min(weights) == max(weights):
        return None
    kept = (1 - explore) / whole
    return list(accumulate(int((kept * weight + each) * GRAINS) for weight in weights))

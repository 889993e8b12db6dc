"""How likely the tasks of one component are drawn, from their records.

Only the proportions of weights mean anything, and only within a component: which component a draw falls to is told by
the mixture, so environments whose rewards are of another size do not push each other aside.

Weights end as whole numbers. Sums of those are exact in any order and in any Python, where sums of floats are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

from gateway.core.curricula import Sampler, SamplerKind, TaskRecord

LEAST_WIDTH = 0.001
"""Of ``target_success``; narrower ones are taken for this one."""
DUST = 1e-9
"""Of the largest reward: a smaller change is one of rounding, and would be the largest where nothing changes."""
GRAINS = 2**52
"""The sum of a component's weights as whole numbers, but for what rounding down takes."""


def target_success(records: Iterable[TaskRecord | None], sampler: Sampler, success_at: float) -> list[float]:
    """Prefer tasks whose success rate is near ``sampler.target``; the nearest task weighs 1.

    A trainer that centres rewards on the mean of their group (GRPO and its like) learns nothing from a group in which
    all succeed or all fail. With a success rate p the rewards of a group vary by p(1 - p), which is largest at 1/2 and
    falls to nothing at both ends: so what is sought is a rate, not a difficulty.

    The rate of a task is told from its newest ``window`` rewards, with ``prior`` attempts at the target before them
    (the mean of a beta distribution). So one that was never tried counts as at the target and is tried soon, and one
    failure does not yet banish a task. The weight is a Gaussian of the rate's distance from the target, relative to
    that of the nearest task: however narrow it is, something weighs more than nothing.
    """
    width = max(sampler.width, LEAST_WIDTH)
    exponents: dict[tuple[int, int], float] = {}  # tasks by the hundred thousand share a few of them
    is_success = float(success_at).__le__
    told = []
    for record in records:
        newest = record.recent[-sampler.window :] if record else ()
        seen = (sum(map(is_success, newest)), len(newest))
        if seen not in exponents:
            tries = seen[1] + sampler.prior
            rate = (seen[0] + sampler.prior * sampler.target) / tries if tries else sampler.target
            exponents[seen] = ((rate - sampler.target) / width) ** 2 / 2
        told.append(seen)
    least = min(exponents.values())
    weights = {seen: math.exp(least - exponent) for seen, exponent in exponents.items()}
    return [weights[seen] for seen in told]


def learning_progress(records: Iterable[TaskRecord | None], sampler: Sampler) -> list[float]:
    """Prefer tasks whose rewards change, for better or worse; the one that changes most weighs 1.

    As in Oudeyer's curiosity and in the teacher of Matiisen and others (Teacher-Student Curriculum Learning): what is
    mastered and what is out of reach both stay as they are, and cost time; what rises is being learnt, and what falls
    is being forgotten, so its sign does not matter. The progress of a task is the distance between the means of the
    older and of the newer half of its newest ``window`` rewards; of an odd number the newer half has one more.

    A task with fewer than two rewards has no progress yet: it weighs as much as the one that changes most, so that it
    is tried. Where nothing changes and all were tried, all weigh the same.
    """
    changes = [_change(record.recent[-sampler.window :] if record else ()) for record in records]
    most = max((change for change in changes if change is not None), default=0.0)
    if not most:
        return [float(change is None) for change in changes] if None in changes else [1.0] * len(changes)
    return [1.0 if change is None else change / most for change in changes]


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


def sums_of(records: Sequence[TaskRecord | None], sampler: Sampler, success_at: float) -> Sequence[int] | None:
    """Running sums of the weights, as whole numbers; None: all tasks weigh the same."""
    if sampler.kind is SamplerKind.TARGET_SUCCESS:
        weights = target_success(records, sampler, success_at)
    elif sampler.kind is SamplerKind.LEARNING_PROGRESS:
        weights = learning_progress(records, sampler)
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

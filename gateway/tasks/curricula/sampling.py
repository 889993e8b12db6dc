"""Draws tasks from a curriculum, with the same result in every process.

A draw depends only on the curriculum's definition and tasks, the draw's number, the records and the sampler's state. It
does not depend on earlier draws, so any replica can make it. Random choices use SHA-256 of name, seed and number. A
generator of Python is not an alternative, because its numbers may differ between versions.

`prepare` walks every task once. Each draw from its result is a bisection.

The records determine the weights of the tasks of one component. Only proportions matter, and only within a component.
The mixture chooses the component, so environments with rewards of different sizes do not displace each other.

The final weights are whole numbers. Their sums are exact in any order and any version of Python, unlike sums of floats.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from gateway.core.curriculum import TaskRecord
from gateway.core.ids import EnvironmentName
from gateway.tasks.curricula.model import LEAST_WIDTH, Component, Curriculum, Sampler, SamplerKind
from gateway.tasks.curricula.stages import is_in, tracks_of
from gateway.tasks.curricula.tables import Part, Records, Tables, TaskRow, count_rows, parts_of

CHANCES = 64
"""Number of bits of each random number."""


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """The place and the record key of a drawn task."""

    environment: EnvironmentName
    split: str
    index: int
    task: str
    """The task's key, as in `TaskRecord.task`."""


@dataclass(frozen=True, slots=True)
class _Heap:
    """The tasks of one component from which draws choose."""

    component: Component
    rows: Sequence[TaskRow]
    sums: Sequence[int] | None
    """Running sums of the tasks' weights. None: all weights are equal."""

    def pick(self, chance: int) -> TaskRow:
        """Return the task for the random number *chance* of `CHANCES` bits."""
        if self.sums is None:
            return self.rows[chance * len(self.rows) >> CHANCES]
        return self.rows[bisect_right(self.sums, chance * self.sums[-1] >> CHANCES)]

    def share(self, position: int) -> float:
        """Return the share of this heap's draws for the task at *position*."""
        if self.sums is None:
            return 1 / len(self.rows)
        before = self.sums[position - 1] if position else 0
        return (self.sums[position] - before) / self.sums[-1]

    def place(self, row: TaskRow) -> TaskPlace:
        return TaskPlace(self.component.environment, self.component.split, row.index, row.task)


@dataclass(frozen=True, slots=True)
class _Urn:
    """The source of a share of all draws, with a heap for each component that has tasks in it."""

    share: float
    heaps: tuple[_Heap, ...]
    quotas: tuple[int, ...]
    """The weights of the heaps' components as whole numbers."""

    def part(self, position: int) -> float:
        """Return the share of all draws for the heap at *position*."""
        return self.share * (self.quotas[position] / sum(self.quotas))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A curriculum with weighed tasks. All of its draws use the same records."""

    curriculum: Curriculum
    stage: str
    """The present stage, or the components' stages, joined by commas. Empty: the sampler has no stages."""
    tasks: int
    """Number of the components' distinct tasks in all stages."""
    _urns: tuple[_Urn, ...]
    """The urn of the present stage, and the urn of earlier stages for review, if any."""

    def draw(self, number: int) -> TaskPlace:
        """Return the task of draw *number*, which counts from 0."""
        which, chance = chances(self.curriculum, number)
        urn = self._urns[-1] if which < int(self._urns[-1].share * 2**CHANCES) else self._urns[0]
        position, before = turn(number, urn.quotas)
        heap = urn.heaps[position]
        if self.curriculum.sampler.kind is SamplerKind.SEQUENTIAL:
            return heap.place(heap.rows[before % len(heap.rows)])
        return heap.place(heap.pick(chance))

    def split_shares(self) -> Mapping[tuple[EnvironmentName, str], float]:
        """Return the share of draws of each environment's split. The sum is 1."""
        shares = {(one.environment, one.split): 0.0 for one in self.curriculum.components}
        for urn in self._urns:
            for position, heap in enumerate(urn.heaps):
                shares[heap.component.environment, heap.component.split] += urn.part(position)
        return shares

    def shares(self) -> Mapping[EnvironmentName, float]:
        """Return the share of draws of each environment. The sum is 1."""
        shares: dict[EnvironmentName, float] = {}
        for (environment, _), share in self.split_shares().items():
            shares[environment] = shares.get(environment, 0.0) + share
        return shares

    def heaviest(self, count: int) -> list[tuple[TaskPlace, float]]:
        """Return the *count* most likely tasks with their shares of draws, in O(n). Equal tasks keep their order."""
        weights: dict[TaskPlace, float] = {}
        for urn in self._urns:
            for position, heap in enumerate(urn.heaps):
                part = urn.part(position)
                for at, row in enumerate(heap.rows):
                    place = heap.place(row)
                    weights[place] = weights.get(place, 0.0) + part * heap.share(at)
        return heapq.nlargest(count, weights.items(), key=lambda item: item[1])


def prepare(curriculum: Curriculum, tables: Tables, records: Records, state: bytes = b"") -> Prepared:
    """Weigh all tasks of *curriculum* in O(n log n).

    Args:
        curriculum: The curriculum or scope.
        tables: The tables of at least its components.
        records: The records of tasks, which may include other tasks.
        state: The last result of `stages.advance`. Empty: the start.

    Raises:
        InvalidRequest: A component has no task, or no task in a stage. The message names the component.
    """
    parts = parts_of(curriculum, tables)
    sampler = curriculum.sampler
    count = count_rows(parts)
    if sampler.kind is not SamplerKind.STAGED:
        urn = _urn(1.0, [(part, part.rows, _sums(curriculum, part, records)) for part in parts])
        return Prepared(curriculum, "", count, (urn,))
    positions = [track.position for track in tracks_of(curriculum, parts, state) for _ in track.parts]
    names = [sampler.stages[position].name for position in positions]
    now = [
        tuple(row for row in part.rows if is_in(sampler.stages[position], row))
        for position, part in zip(positions, parts, strict=True)
    ]
    # Each task occurs once, even if it was in several of the passed stages.
    passed = [
        tuple(row for row in part.rows if any(is_in(one, row) for one in sampler.stages[:position]))
        for position, part in zip(positions, parts, strict=True)
    ]
    share = sampler.review if any(passed) else 0.0
    urns = [_urn(1.0 - share, [(part, rows, None) for part, rows in zip(parts, now, strict=True)])]
    if share:
        if sampler.per_component:  # a component that has passed no stage keeps its share of draws
            passed = [rows or instead for rows, instead in zip(passed, now, strict=True)]
        urns.append(_urn(share, [(part, rows, None) for part, rows in zip(parts, passed, strict=True)]))
    return Prepared(curriculum, ",".join(names if sampler.per_component else names[:1]), count, tuple(urns))


def turn(number: int, quotas: Sequence[int]) -> tuple[int, int]:
    """Return the component for draw *number*, and the number of earlier draws of that component.

    This is a weighted round-robin without memory. The first component gets each draw at which its due, the number times
    its share, passes a whole number. The remaining draws are renumbered and dealt among the other components likewise.
    In any sequence of draws a component misses its share by less than one draw per step of the dealing.
    """
    left = sum(quotas)
    for position, quota in enumerate(quotas):
        before = -(-number * quota // left)
        if -(-(number + 1) * quota // left) > before:
            return position, before
        number -= before
        left -= quota
    raise ValueError("quotas are positive, and there is at least one")


def chances(curriculum: Curriculum, number: int) -> tuple[int, int]:
    """Return two random numbers of `CHANCES` bits, to choose an urn and a task."""
    said = f"{curriculum.name}\n{curriculum.seed}\n{number}"
    digest = hashlib.sha256(said.encode()).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")


def _sums(curriculum: Curriculum, part: Part, records: Records) -> Sequence[int] | None:
    known = records.get(part.component.environment, {})
    return sums_of(part.rows, [known.get(row.task) for row in part.rows], curriculum.sampler, curriculum.success_at)


def _urn(share: float, heaps: Sequence[tuple[Part, Sequence[TaskRow], Sequence[int] | None]]) -> _Urn:
    filled = [_Heap(part.component, rows, sums) for part, rows, sums in heaps if rows]
    ratios = [float(heap.component.weight).as_integer_ratio() for heap in filled]
    whole = math.lcm(*(below for _, below in ratios))
    return _Urn(share, tuple(filled), tuple(above * (whole // below) for above, below in ratios))


DUST = 1e-9
"""Fraction of the largest reward below which a change is a rounding error. Otherwise such errors could rank tasks."""
GRAINS = 2**52
"""Sum of a component's weights as whole numbers, except for rounding down."""


@dataclass(slots=True)
class _Kind:
    """A set of similar tasks."""

    size: int = 0
    rewards: list[float] = field(default_factory=list)
    """The newest rewards, newest first."""
    counts: list[float] = field(default_factory=list)
    """The remaining weight of each reward, up to 1."""
    told: float | None = None
    """The cached estimate. None: not yet computed."""


class _Evidence:
    """Estimates a value of each task from its rewards and from the rewards of similar tasks.

    A kind is a set of similar tasks: all tasks of a difficulty, or all tasks of a difficulty with the same tags. A task
    with few attempts says little by itself. A run with few groups of episodes per task has mostly such tasks. So a
    task's estimate leans on the estimate of the tasks with its difficulty and tags. That estimate leans on the estimate
    of all tasks with the difficulty. The broader estimate counts as ``prior`` attempts in the narrower (a hierarchical
    prior). A task without tags and difficulty has no kind. A kind of one task is ignored.

    A kind's estimate uses its newest ``window`` rewards. Records only have the order of the tasks' last attempts. So
    these are the rewards of the task tried last, then the rewards of the task tried before it, and so on.

    The policy changes, so rewards age. A reward counts half after half a window of newer rewards per kind. So a
    neglected task becomes uncertain again, and the sampler tries it again.
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
        """The kinds of each task, the widest first."""
        self.rewards: list[Sequence[float]] = [record.recent[-sampler.window :] if record else () for record in records]
        """The newest rewards of each task, oldest first."""
        self.counts = [1.0] * len(rows)
        """The remaining weight of each task's rewards, up to 1."""
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
        """Return the estimate of each task.

        Args:
            told_of: Returns an estimate from rewards (newest first) and their weights, or None if they show nothing.
            first: The estimate on which the widest kinds lean.
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
    """Return weights that prefer tasks with a success rate near ``sampler.target``. The nearest task has weight 1.

    A trainer that centres rewards on their group's mean (as GRPO does) learns nothing from a group in which all
    episodes succeed or all fail. With a success rate p the variance in a group is p(1 - p), which is largest at 1/2 and
    zero at both ends. So the sampler seeks a rate, not a difficulty.

    The estimate of a task's rate uses its newest ``window`` rewards and the rewards of similar tasks (`_Evidence`).
    Without any rewards it is the target. So the sampler soon tries a new kind of task, and one failure does not exclude
    a task. The weight is a Gaussian of the rate's distance from the target, relative to the nearest task's weight. So
    even a narrow Gaussian leaves a positive weight.
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
    """Return weights that prefer tasks whose rewards rise or fall. The largest estimated change has weight 1.

    The method follows Oudeyer's curiosity and the teacher of Matiisen et al. (Teacher-Student Curriculum Learning). The
    rewards of mastered and of unreachable tasks stay constant, and such tasks cost time. Rising rewards show learning,
    falling rewards show forgetting, so the sign does not matter. A task's progress is the distance between the means of
    the older and the newer half of its newest ``window`` rewards. The newer half of an odd number has one more. The
    progress leans on the progress of similar tasks (`_Evidence`).

    Fewer than two rewards show no change. A kind of task without known changes weighs as much as the largest change, so
    that the sampler tries it. If no reward changes and all tasks were tried, all weights are equal.
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
    """Return a quarter of the distance between the two halves' means, or None for fewer than two rewards."""
    middle = len(newest) // 2
    if not middle:
        return None
    change = abs(_quarter(newest[middle:]) - _quarter(newest[:middle]))
    return change if change > DUST * max(map(abs, newest)) else 0.0


def _quarter(rewards: Sequence[float]) -> float:
    """Return a quarter of the mean. The distance of two such quarters is finite for all rewards."""
    try:
        return math.fsum(rewards) / (4 * len(rewards))
    except OverflowError:
        return math.fsum(reward / (4 * len(rewards)) for reward in rewards)


def sums_of(
    rows: Sequence[TaskRow], records: Sequence[TaskRecord | None], sampler: Sampler, success_at: float
) -> Sequence[int] | None:
    """Return running sums of the weights of *rows* as whole numbers, or None if all weights are equal."""
    if sampler.kind is SamplerKind.TARGET_SUCCESS:
        weights = target_success(rows, records, sampler, success_at)
    elif sampler.kind is SamplerKind.LEARNING_PROGRESS:
        weights = learning_progress(rows, records, sampler)
    else:
        return None
    return _explored(weights, sampler.explore)


def _explored(weights: Sequence[float], explore: float) -> Sequence[int] | None:
    """Distribute a share *explore* of draws evenly. Return running sums, or None if all weights are equal."""
    whole, each = math.fsum(weights), explore / len(weights)
    if explore >= 1 or not whole or min(weights) == max(weights):
        return None
    kept = (1 - explore) / whole
    return list(accumulate(int((kept * weight + each) * GRAINS) for weight in weights))

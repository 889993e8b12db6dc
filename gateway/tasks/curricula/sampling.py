"""What to train on next: draws from a curriculum, the same ones in every process.

A draw follows from the curriculum's name and seed, the draw's number, the records and the sampler's state, and from
nothing else: not from the draws before it, so that any replica can make it. Where chance decides it is SHA-256 of name,
seed and number; no generator of Python's is asked, whose numbers another version may give otherwise.

`prepare` walks every task once; each draw from what it makes is a bisection.

How likely the tasks of one component are drawn, from their records.

Only the proportions of weights mean anything, and only within a component: which component a draw falls to is told by
the mixture, so environments whose rewards are of another size do not push each other aside.

Weights end as whole numbers. Sums of those are exact in any order and in any Python, where sums of floats are not.
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
"""Bits of each number that chance decides by."""


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """Where the task of a draw stands."""

    environment: EnvironmentName
    split: str
    index: int
    task: str
    """As in `TaskRecord.task`."""


@dataclass(frozen=True, slots=True)
class _Heap:
    """Tasks of one component, to be drawn from."""

    component: Component
    rows: Sequence[TaskRow]
    sums: Sequence[int] | None
    """Running sums of their weights; None: all weigh the same."""

    def pick(self, chance: int) -> TaskRow:
        """The task at *chance*, of `CHANCES` bits."""
        if self.sums is None:
            return self.rows[chance * len(self.rows) >> CHANCES]
        return self.rows[bisect_right(self.sums, chance * self.sums[-1] >> CHANCES)]

    def share(self, position: int) -> float:
        """The share of this heap's draws that fall to the task at *position*."""
        if self.sums is None:
            return 1 / len(self.rows)
        before = self.sums[position - 1] if position else 0
        return (self.sums[position] - before) / self.sums[-1]

    def place(self, row: TaskRow) -> TaskPlace:
        return TaskPlace(self.component.environment, self.component.split, row.index, row.task)


@dataclass(frozen=True, slots=True)
class _Urn:
    """What a share of draws is made from: a heap of each component that has tasks in it."""

    share: float
    heaps: tuple[_Heap, ...]
    quotas: tuple[int, ...]
    """The components' weights as whole numbers."""

    def part(self, position: int) -> float:
        """The share of all draws that fall to the heap at *position*."""
        return self.share * (self.quotas[position] / sum(self.quotas))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A curriculum with its tasks weighed: all draws on the same records."""

    curriculum: Curriculum
    stage: str
    """That is drawn from; where components move by themselves theirs, in order; empty: the sampler has none."""
    tasks: int
    """How many the components have, whatever the stage."""
    _urns: tuple[_Urn, ...]
    """The second one, if any, is what was passed already."""

    def draw(self, number: int) -> TaskPlace:
        """The task of draw *number*, from 0 on."""
        which, chance = chances(self.curriculum, number)
        urn = self._urns[-1] if which < int(self._urns[-1].share * 2**CHANCES) else self._urns[0]
        position, before = turn(number, urn.quotas)
        heap = urn.heaps[position]
        if self.curriculum.sampler.kind is SamplerKind.SEQUENTIAL:
            return heap.place(heap.rows[before % len(heap.rows)])
        return heap.place(heap.pick(chance))

    def split_shares(self) -> Mapping[tuple[EnvironmentName, str], float]:
        """The share of draws of each component, by environment and split; the sum is 1."""
        shares = {(one.environment, one.split): 0.0 for one in self.curriculum.components}
        for urn in self._urns:
            for position, heap in enumerate(urn.heaps):
                shares[heap.component.environment, heap.component.split] += urn.part(position)
        return shares

    def shares(self) -> Mapping[EnvironmentName, float]:
        """The share of draws of each environment; the sum is 1."""
        shares: dict[EnvironmentName, float] = {}
        for (environment, _), share in self.split_shares().items():
            shares[environment] = shares.get(environment, 0.0) + share
        return shares

    def heaviest(self, count: int) -> list[tuple[TaskPlace, float]]:
        """The *count* tasks that are drawn most often, with their shares of draws; of equal ones the first. O(n)."""
        weights: dict[TaskPlace, float] = {}
        for urn in self._urns:
            for position, heap in enumerate(urn.heaps):
                part = urn.part(position)
                for at, row in enumerate(heap.rows):
                    place = heap.place(row)
                    weights[place] = weights.get(place, 0.0) + part * heap.share(at)
        return heapq.nlargest(count, weights.items(), key=lambda item: item[1])


def prepare(curriculum: Curriculum, tables: Tables, records: Records, state: bytes = b"") -> Prepared:
    """Weigh all tasks of *curriculum*: O(n log n).

    Args:
        tables: at least those of its components.
        records: what is known of tasks; those of others do no harm.
        state: what `stages.advance` made last; empty: the beginning.

    Raises:
        InvalidRequest: a component has no task, or none that is in a stage; the message names it.
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
    # Each task once, however many of the passed stages it was in.
    passed = [
        tuple(row for row in part.rows if any(is_in(one, row) for one in sampler.stages[:position]))
        for position, part in zip(positions, parts, strict=True)
    ]
    share = sampler.review if any(passed) else 0.0
    urns = [_urn(1.0 - share, [(part, rows, None) for part, rows in zip(parts, now, strict=True)])]
    if share:
        if sampler.per_component:  # one that has passed no stage keeps its share of draws
            passed = [rows or instead for rows, instead in zip(passed, now, strict=True)]
        urns.append(_urn(share, [(part, rows, None) for part, rows in zip(parts, passed, strict=True)]))
    return Prepared(curriculum, ",".join(names if sampler.per_component else names[:1]), count, tuple(urns))


def turn(number: int, quotas: Sequence[int]) -> tuple[int, int]:
    """The component that draw *number* falls to, and how many draws before it fell to that one.

    A weighted round-robin that needs no memory. The first component gets every draw at which its due, number times its
    share, passes a whole number; those that are left are numbered anew and dealt among the others in the same way. So
    in each stretch of draws every component has its share, but for less than one draw at each step of the dealing.
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
    """Two numbers of `CHANCES` bits, for which urn, and which of its tasks."""
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

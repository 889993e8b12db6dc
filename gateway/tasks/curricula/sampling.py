"""What to train on next: draws from a curriculum, the same ones in every process.

A draw follows from the curriculum's name and seed, the draw's number, the records and the sampler's state, and from
nothing else: not from the draws before it, so that any replica can make it. Where chance decides it is SHA-256 of name,
seed and number; no generator of Python's is asked, whose numbers another version may give otherwise.

`prepare` walks every task once; each draw from what it makes is a bisection.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.core.curriculum import Component, Curriculum, SamplerKind
from gateway.core.ids import EnvironmentName
from gateway.tasks.curricula.sampling_weights import sums_of
from gateway.tasks.curricula.stages import check_stages, is_in, positions_of, rows_of
from gateway.tasks.curricula.tables import Part, Records, Tables, TaskRow, count_rows, parts_of

CHANCES = 64
"""Bits of each number that chance decides by."""


@dataclass(frozen=True, slots=True)
class Place:
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

    def place(self, row: TaskRow) -> Place:
        return Place(self.component.environment, self.component.split, row.index, row.task)


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

    def draw(self, number: int) -> Place:
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

    def weight_of(self, environment: EnvironmentName, split: str, index: int) -> float:
        """The share of draws that a task has; 0 of one that is not drawn now, or not in the curriculum."""
        found = 0.0
        for urn in self._urns:
            for position, heap in enumerate(urn.heaps):
                if (heap.component.environment, heap.component.split) != (environment, split):
                    continue
                row = bisect_left(heap.rows, index, key=lambda one: one.index)
                if row < len(heap.rows) and heap.rows[row].index == index:
                    found += urn.part(position) * heap.share(row)
        return found

    def heaviest(self, count: int) -> list[tuple[Place, float]]:
        """The *count* tasks that are drawn most often, with their shares of draws; of equal ones the first. O(n)."""
        weights: dict[Place, float] = {}
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
    check_stages(curriculum, parts)
    positions = positions_of(curriculum, parts, state)
    names = [sampler.stages[position].name for position in positions]
    now = [rows_of(sampler.stages[position], part.rows) for position, part in zip(positions, parts, strict=True)]
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
    if curriculum.sampler.kind not in (SamplerKind.TARGET_SUCCESS, SamplerKind.LEARNING_PROGRESS):
        return None
    known = records.get(part.component.environment, {})
    return sums_of(part.rows, [known.get(row.task) for row in part.rows], curriculum.sampler, curriculum.success_at)


def _urn(share: float, heaps: Sequence[tuple[Part, Sequence[TaskRow], Sequence[int] | None]]) -> _Urn:
    filled = [_Heap(part.component, rows, sums) for part, rows, sums in heaps if rows]
    ratios = [float(heap.component.weight).as_integer_ratio() for heap in filled]
    whole = math.lcm(*(below for _, below in ratios))
    return _Urn(share, tuple(filled), tuple(above * (whole // below) for above, below in ratios))

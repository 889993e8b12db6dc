"""Splits of curricula: their indices are handles that stand for tasks to be drawn.

An index of a curriculum's split is a handle, ``{"id": "train:<name>/<index>"}``: what it stands for is found by
`CurriculumIndices.draw`, when an episode is about to open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Final

from gateway.core.environment import Environment, TaskSpec
from gateway.core.errors import InvalidRequest, StoreUnavailable, UnknownTask, unknown_index
from gateway.core.session import GroupMembership
from gateway.tasks.curricula.service import Curricula
from gateway.tasks.task_ref import CurriculumIndex, TaskRef

LISTED_MAX: Final = 100_000
"""Tasks of an image's own, or handles, in one answer; who wants more asks for ranges."""
MAX_DIGITS: Final = 18
"""An index has no more; Python refuses to convert some thousands."""


class CurriculumIndices:
    """The splits of curricula."""

    def __init__(self, curricula: Curricula) -> None:
        self._curricula = curricula

    async def refresh(self) -> None:
        """Take over curricula that other replicas were told of, if the store answers."""
        with contextlib.suppress(StoreUnavailable):
            await self._curricula.refresh()

    def splits(self, environment: Environment) -> list[str]:
        """Those that are in *environment*."""
        return self._curricula.splits(environment.name)

    async def count(self, environment: Environment, split: str) -> int | None:
        """Count the handles of *split*; None: it is no curriculum's. Raises as `Curricula.count`."""
        scope = await self._curricula.scope(environment.name, split)
        return None if scope is None else await self._curricula.count(scope)

    async def at(self, environment: Environment, split: str, index: int) -> TaskRef | None:
        """One handle; -1 is the last one. None: *split* is no curriculum's. Raises ``UnknownTask``."""
        scope = await self._curricula.scope(environment.name, split)
        if scope is None:
            return None
        count = await self._curricula.count(scope)
        if not -count <= index < count:
            raise unknown_index(split, index, count)
        index %= count
        return TaskRef(spec=spec_of(split, index), split=split, index=index, handle=CurriculumIndex(scope, index))

    async def next_of(self, environment: Environment, split: str) -> TaskRef | None:
        """Return what the curriculum of *split* draws next, for an opening that names no index; None if it has none."""
        scope = await self._curricula.scope(environment.name, split)
        return None if scope is None else TaskRef(spec={"id": split}, split=split, handle=CurriculumIndex(scope, None))

    async def named(self, environment: Environment, id: str) -> TaskRef | None:
        """The handle that *id* names, ``train:<name>/<index>``; None if it names none."""
        split, slash, number = id.rpartition("/")
        return await self.at(environment, split, int(number)) if slash and is_index(number) else None

    async def draw(self, handle: CurriculumIndex, find: Callable[[str, int], Awaitable[TaskRef]]) -> TaskRef:
        """Return the task that *handle* stands for, with its ticket; *find* looks a task up by split and index.

        Raises:
            InvalidRequest: The curriculum has no task to draw.
            UnknownTask: The drawn task is gone.
            StoreUnavailable: The store does not say what was drawn.
        """
        handed = await self._curricula.hand(handle.scope, handle.index)
        with self.held(handed.ticket):
            try:
                task = await find(handed.place.split, handed.place.index)
            except UnknownTask as error:
                gone = error
            else:
                return replace(task, ticket=handed.ticket, policy=handed.policy)
        raise gone  # its place is kept: once the group is full, the handle stands for a new draw

    @contextlib.contextmanager
    def held(self, ticket: GroupMembership | None) -> Iterator[None]:
        """Give a drawn task's place in its group back if what is inside fails."""
        try:
            yield
        except BaseException:  # a cancellation too: the trainer hung up
            self._curricula.unused(ticket)
            raise


def is_index(text: str) -> bool:
    """Whether *text* is a number that can be an index."""
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS


def places_of(split: str, start: int | None, stop: int | None, count: int) -> range:
    """The indices of a slice of a split's *count* tasks. Raises ``InvalidRequest``: there are too many."""
    first, last, _ = slice(start, stop).indices(count)
    if last - first > LISTED_MAX:
        raise InvalidRequest(f"split {split!r} has too many tasks for one answer: at most {LISTED_MAX} of a range")
    return range(first, max(first, last))


def spec_of(split: str, index: int) -> TaskSpec:
    """The task that a handle is shown as."""
    return {"id": f"{split}/{index}"}

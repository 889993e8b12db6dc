"""Splits of curricula: their indices are handles that stand for tasks to be drawn.

An index of a curriculum's split is a handle, ``{"id": "train:<name>/<index>"}``: what it stands for is found by
`CurriculumIndices.drawn`, when an episode is about to open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Final

from gateway.core.environment import Environment, TaskSpec
from gateway.core.errors import InvalidRequest, StoreUnavailable, UnknownTask, unknown_index, unknown_split
from gateway.core.session import GroupMembership
from gateway.tasks.curricula.model import Curriculum
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

    async def has(self, environment: Environment, split: str) -> bool:
        """Whether *split* is a curriculum's."""
        return await self._scope(environment, split) is not None

    async def count(self, environment: Environment, split: str) -> int:
        """How many handles *split* has, one of a curriculum. Raises ``InvalidRequest``: a component has no task."""
        scope = await self._scope(environment, split)
        if scope is None:
            raise unknown_split(split, self.splits(environment))  # it went meanwhile
        return await self._curricula.count(scope)

    async def at(self, environment: Environment, split: str, index: int) -> TaskRef:
        """One handle; -1 is the last one. Raises ``UnknownTask``."""
        scope = await self._scope(environment, split)
        count = await self.count(environment, split)
        if scope is None or not -count <= index < count:
            raise unknown_index(split, index, count)
        index %= count
        return TaskRef(spec=spec_of(split, index), split=split, index=index, handle=CurriculumIndex(scope, index))

    async def next_of(self, environment: Environment, split: str) -> TaskRef | None:
        """What is drawn next, if *split* is a curriculum's, for an opening that names no index."""
        scope = await self._scope(environment, split)
        return None if scope is None else TaskRef(spec={"id": split}, split=split, handle=CurriculumIndex(scope, None))

    async def named(self, environment: Environment, id: str) -> TaskRef | None:
        """The handle that *id* names, ``train:<name>/<index>``; None if it names none."""
        split, slash, number = id.rpartition("/")
        if not slash or not is_index(number) or await self._scope(environment, split) is None:
            return None
        return await self.at(environment, split, int(number))

    async def drawn(self, offer: TaskRef, find: Callable[[str, int], Awaitable[TaskRef]]) -> TaskRef:
        """The task that *offer* stands for, with its ticket: *offer* itself, unless it is a handle.

        *find* looks a task up by split and index.

        Raises:
            InvalidRequest: the curriculum has no task to draw.
            UnknownTask: what was drawn is not there any more.
            StoreUnavailable: nobody can tell what was drawn.
        """
        if offer.handle is None:
            return offer
        scope, index = offer.handle.scope, offer.handle.index
        handed = await self._curricula.hand(scope, index)
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

    async def _scope(self, environment: Environment, split: str) -> Curriculum | None:
        return await self._curricula.scope(environment.name, split)


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

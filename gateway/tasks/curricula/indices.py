"""Offers curricula as splits whose indices are handles for draws.

A listing shows each index of a curriculum's split as ``{"id": "train:<name>/<index>"}``. `CurriculumIndices.draw`
finds the task of a handle when a trainer opens an episode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Final

from gateway.core.environment import Environment, TaskSpec
from gateway.core.errors import InvalidRequest, StoreUnavailable, UnknownTask, unknown_index
from gateway.core.session import GroupMembership
from gateway.tasks.curricula.model import is_index
from gateway.tasks.curricula.service import Curricula
from gateway.tasks.task_ref import CurriculumIndex, TaskRef

LISTED_MAX: Final = 100_000
"""Maximum number of an image's own tasks, or of handles, in one answer. Clients request more tasks in ranges."""


class CurriculumIndices:
    """Lists the splits of curricula and their handles, and draws a task for a handle."""

    def __init__(self, curricula: Curricula) -> None:
        self._curricula = curricula

    async def refresh(self) -> None:
        """Fetch the curricula that other replicas received, if the store answers."""
        with contextlib.suppress(StoreUnavailable):
            await self._curricula.refresh()

    def splits(self, environment: Environment) -> list[str]:
        """Return the splits of curricula in *environment*."""
        return self._curricula.splits(environment.name)

    async def count(self, environment: Environment, split: str) -> int | None:
        """Return the number of handles of *split*, or None if no curriculum has it. Raises as `Curricula.count`."""
        scope = await self._curricula.scope(environment.name, split)
        return None if scope is None else await self._curricula.count(scope)

    async def at(self, environment: Environment, split: str, index: int) -> TaskRef | None:
        """Return one handle, or None if no curriculum has *split*. Index -1 is the last. Raises ``UnknownTask``."""
        scope = await self._curricula.scope(environment.name, split)
        if scope is None:
            return None
        count = await self._curricula.count(scope)
        if not -count <= index < count:
            raise unknown_index(split, index, count)
        index %= count
        return TaskRef(spec=spec_of(split, index), split=split, index=index, handle=CurriculumIndex(scope, index))

    async def next_of(self, environment: Environment, split: str) -> TaskRef | None:
        """Return a reference to the next draw of *split*, for openings without an index. None: it has no curriculum."""
        scope = await self._curricula.scope(environment.name, split)
        return None if scope is None else TaskRef(spec={"id": split}, split=split, handle=CurriculumIndex(scope, None))

    async def named(self, environment: Environment, id: str) -> TaskRef | None:
        """Return the handle that *id* (``train:<name>/<index>``) names, or None if *id* is not a handle's."""
        split, slash, number = id.rpartition("/")
        return await self.at(environment, split, int(number)) if slash and is_index(number) else None

    async def draw(self, handle: CurriculumIndex, find: Callable[[str, int], Awaitable[TaskRef]]) -> TaskRef:
        """Return the task of *handle* with its group membership. *find* looks a task up by split and index.

        Raises:
            InvalidRequest: The curriculum has no task to draw.
            UnknownTask: The drawn task no longer exists.
            StoreUnavailable: The store does not return the draw.
        """
        handed = await self._curricula.hand(handle.scope, handle.index)
        with self.held(handed.ticket):
            try:
                task = await find(handed.place.split, handed.place.index)
            except UnknownTask as error:
                gone = error
            else:
                return replace(task, ticket=handed.ticket, policy=handed.policy)
        raise gone  # its place in the group stays taken: a full group leads to a new draw

    @contextlib.contextmanager
    def held(self, ticket: GroupMembership | None) -> Iterator[None]:
        """Release a drawn task's place in its group if the context fails."""
        try:
            yield
        except BaseException:  # a cancellation too: the trainer hung up
            self._curricula.unused(ticket)
            raise


def places_of(split: str, start: int | None, stop: int | None, count: int) -> range:
    """Return the indices of a slice of a split's *count* tasks. Raises ``InvalidRequest`` for over `LISTED_MAX`."""
    first, last, _ = slice(start, stop).indices(count)
    if last - first > LISTED_MAX:
        raise InvalidRequest(f"split {split!r} has too many tasks for one answer: at most {LISTED_MAX} of a range")
    return range(first, max(first, last))


def spec_of(split: str, index: int) -> TaskSpec:
    """Return the task that represents a handle in listings."""
    return {"id": f"{split}/{index}"}

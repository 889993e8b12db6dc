"""Looks tasks up in all sources: task files, the store, the image's own tasks, and curricula that draw from these.

The registry holds all tasks of an environment with a ``tasks`` folder, so looking them up queries no worker. An
environment without that folder offers the tasks registered at run time, then its workers' own tasks. A split of the
registry hides a worker's split of the same name, so that the place of a registered task stays valid.

The registry knows tasks by id. A worker's own task is named by an id of the form ``split/index`` (``train/3``). An
AReaL server also gets every other id, because only the server knows its samples. The gateway never searches the
workers' tasks for an id.

Splits of curricula come last. `CurriculumIndices.draw` finds the task of one of their indices.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from gateway.core.curriculum import PREFIX
from gateway.core.environment import Environment, ServerProtocol, Split, SplitType, TaskSpec, UpstreamKind
from gateway.core.errors import UnknownSplit, UnknownTask, unknown_index, unknown_split
from gateway.core.ids import EnvironmentName
from gateway.core.ports.tasks import TaskQueries
from gateway.tasks.curricula.indices import CurriculumIndices, places_of, spec_of
from gateway.tasks.curricula.model import is_index
from gateway.tasks.curricula.service import Curricula
from gateway.tasks.public_view import ListedTasks, check_unchanged, is_public_view, public_view
from gateway.tasks.runtime import RuntimeTasks
from gateway.tasks.task_ref import TaskRef, name_of

T = TypeVar("T")
SEARCHED_AT_ONCE: Final = 256


class TaskLookup:
    """Finds tasks for the frontends."""

    def __init__(self, tasks: RuntimeTasks, *, queries: TaskQueries, curricula: Curricula) -> None:
        self.registry = tasks.registry
        self.indices = CurriculumIndices(curricula)
        self.tasks = tasks
        self._listed = ListedTasks(tasks.registry)
        self._queries = queries
        self._counts: dict[EnvironmentName, dict[str, int]] = {}
        """The last known task counts of images' splits, with which `why_not` refuses an index without a query."""
        self._places: dict[EnvironmentName, TaskPlaces] = {}

    @staticmethod
    def asks(environment: Environment) -> bool:
        """Return True if the gateway queries workers for tasks not in the registry: there is no task folder."""
        return environment.tasks is None

    async def refresh(self) -> None:
        """Fetch the tasks and curricula that other replicas received, for listings. Ignore an unavailable store."""
        await self.tasks.refresh()
        await self.indices.refresh()

    async def sure(self, look_up: Callable[[], T]) -> T:
        """Return the result of *look_up* on the registry. If it finds no task, refresh the registry and try again.

        Raises:
            UnknownTask: *look_up* finds no task in the refreshed registry either.
            StoreUnavailable: *look_up* finds no task and the store does not answer. The task may still exist.
        """
        try:
            return look_up()
        except UnknownTask:
            return await self.tasks.sure(look_up)

    # -- by split and index ---------------------------------------------------------------------------------------

    async def splits(self, environment: Environment) -> list[Split]:
        """Return the environment's splits: the registry's, then the image's own, then those of curricula."""
        known = self.registry.splits(environment.name)
        if self.asks(environment):
            names = {split.name for split in known}
            known = [*known, *(split for split in await self._queries.splits(environment) if split.name not in names)]
        return [*known, *(Split(name, SplitType.TRAIN) for name in self.indices.splits(environment))]

    def registered_splits(self, environment: Environment) -> list[str]:
        """Return the names of the registry's splits."""
        return [one.name for one in self.registry.splits(environment.name)]

    async def usual_split(self, environment: Environment, wanted: str) -> str | None:
        """Return the split of a request that names none: *wanted* if it exists, else the first split, else None."""
        if wanted in self.registered_splits(environment):
            return wanted
        if wanted.startswith(PREFIX) and await self.indices.next_of(environment, wanted) is not None:
            return wanted
        splits = [split.name for split in await self.splits(environment)]
        return wanted if wanted in splits else splits[0] if splits else None

    async def areal_split(self, environment: Environment) -> str:
        """Return the split in which an AReaL sample number is an index, and whose tasks ``task/info`` counts."""
        wanted = environment.areal.split
        return wanted if not self.asks(environment) else await self.usual_split(environment, wanted) or wanted

    async def count(self, environment: Environment, split: str) -> int:
        """Return the number of indices in *split*. Raises ``UnknownSplit``."""
        if split.startswith(PREFIX) and (count := await self.indices.count(environment, split)) is not None:
            return count
        if await self._is_registrys(environment, split):
            return await self.sure(lambda: self.registry.count(environment.name, split))
        count = await self._queries.count(environment, split)
        self._counts.setdefault(environment.name, {})[split] = count
        return count

    async def raw(self, environment: Environment, split: str, index: int) -> bytes:
        """Return one task of a listing as compact JSON. Index -1 is the last task.

        The view of a registered task is the environment's ``task_view``. An image's own task is listed as the image
        lists it.

        Raises:
            UnknownSplit, UnknownTask: There is no such task.
        """
        if split.startswith(PREFIX) and (index_ref := await self.indices.at(environment, split, index)) is not None:
            return _compact(index_ref.spec)
        if await self._is_registrys(environment, split):
            return await self.sure(lambda: self._listed.raw(environment, split, index))
        return _compact(await self._own(environment, split, index))

    async def at(self, environment: Environment, split: str, index: int) -> TaskRef:
        """Return one task, parsed. Index -1 is the last task. Raises ``UnknownSplit``, ``UnknownTask``."""
        if split.startswith(PREFIX) and (index_ref := await self.indices.at(environment, split, index)) is not None:
            return index_ref
        if await self._is_registrys(environment, split):
            return await self.sure(lambda: self._registered_at(environment, split, index))
        count = await self.count(environment, split)
        spec = await self._own(environment, split, index)
        return TaskRef(spec=spec, split=split, index=index % count, is_images=True)

    async def range(self, environment: Environment, split: str, start: int | None, stop: int | None) -> Sequence[bytes]:
        """Return the tasks of the Python slice ``[start:stop]`` of a listing, in the same view as `raw`.

        Raises:
            UnknownSplit: There is no such split.
            InvalidRequest: The range has too many of an image's or a curriculum's tasks for one answer.
        """
        if split.startswith(PREFIX) and (count := await self.indices.count(environment, split)) is not None:
            places = places_of(split, start, stop, count)
            return [_compact(spec_of(split, index)) for index in places]
        if await self._is_registrys(environment, split):
            await self.sure(lambda: self.registry.count(environment.name, split))
            return await self._listed.range(environment, split, start, stop)
        places = places_of(split, start, stop, await self.count(environment, split))
        return [_compact(task) for task in await self._queries.tasks(environment, split, places.start, places.stop)]

    def why_not(self, environment: Environment, split: str, index: int) -> UnknownTask | None:
        """Return the error if local data proves that there is no such task. None: the task may exist."""
        if split.startswith(PREFIX):
            return None
        try:
            self.registry.raw(environment.name, split, index)
        except UnknownTask as error:
            if not self.asks(environment):
                return error
            count = None if environment.server.url else self._counts.get(environment.name, {}).get(split)
            return None if count is None or -count <= index < count else unknown_index(split, index, count)
        return None

    # -- by name --------------------------------------------------------------------------------------------------

    async def find(self, environment: Environment, *ids: str, prefer: str) -> TaskRef:
        """Return the task of the first known id or alias in *ids*: a curriculum's handle, or a task of the registry.

        If several splits have the id, prefer the task in split *prefer*.

        Raises:
            UnknownTask: There is no task with any of these ids.
        """
        for id in ids:
            if id.startswith(PREFIX) and (handle := await self.indices.named(environment, id)) is not None:
                return handle
        return await self.sure(lambda: self._found(environment, ids, prefer))

    def numbered(self, environment: Environment, number: str) -> TaskRef | None:
        """Return the registered task at index *number* of the AReaL split, or None. Needs no store."""
        if is_index(number) and not self.asks(environment):
            with contextlib.suppress(UnknownTask, UnknownSplit):
                return self._registered_at(environment, environment.areal.split, int(number))
        return None

    async def of_view(self, environment: Environment, spec: Mapping[str, Any]) -> TaskRef | None:
        """Return the registered task whose public view a trainer sent back. None: *spec* is no such view.

        Raises:
            InvalidRequest: A field of the view was changed.
        """
        if not is_public_view(spec, environment):
            return None
        try:
            task = await self.find(environment, spec["id"], prefer=spec.get("split") or "")
        except UnknownTask:
            split, _, number = spec["id"].rpartition("/")
            if not is_index(number) or split not in self.registered_splits(environment):
                return None
            task = await self.at(environment, split, int(number))
            if "id" in task.spec:  # only a task without an id is listed with its place
                return None
        check_unchanged(spec, public_view(task.spec, environment, task.place))
        return task

    def copied(self, environment: Environment, spec: Mapping[str, Any]) -> TaskRef | None:
        """Return the registered task of which *spec*, with an id, is a complete copy, as a full listing shows it."""
        split = spec.get("split")
        try:
            task = self._found(environment, [spec["id"]], split if isinstance(split, str) else "")
        except UnknownTask:
            return None
        return task if task.name == name_of(spec) else None

    async def images_own(self, environment: Environment, id: str) -> TaskRef | None:
        """Return the worker's own task that *id* names, or None if *id* does not name a worker's task.

        Raises:
            UnknownTask: *id* names a place that does not exist.
        """
        if not self.asks(environment):
            return None
        split, slash, number = id.rpartition("/")
        splits = [one.name for one in await self._queries.splits(environment)]
        if slash and split in splits and is_index(number):
            return await self.at(environment, split, int(number))
        if environment.protocol is ServerProtocol.AREAL:
            if is_index(id):
                return await self.at(environment, await self.areal_split(environment), int(id))
            return TaskRef(spec={"id": id, "sample_id": id}, is_images=True)
        return None

    async def recognised(self, environment: Environment, spec: Mapping[str, Any]) -> TaskRef:
        """Return a reference to the whole task *spec*. Add its place if *spec* equals an OpenEnv image's own task.

        The reset of such an image accepts a place or arguments, never a task.
        """
        given = TaskRef(spec=spec)
        if environment.wire is not UpstreamKind.OPENENV or not self.asks(environment) or spec.get("env_type"):
            return given
        if spec.keys() <= set(environment.resets.keys):
            return given  # arguments of the image's reset
        places = self._places.setdefault(environment.name, TaskPlaces())
        place = places.get(spec)
        if place is not None:
            with contextlib.suppress(UnknownTask):
                found = await self.at(environment, *place)
                if found.spec == spec:
                    return found
            places.outdated()
        place = await places.search(spec, self._all_of_image(environment))
        return given if place is None else TaskRef(spec=spec, split=place[0], index=place[1], is_images=True)

    async def _all_of_image(self, environment: Environment) -> AsyncIterator[tuple[Place, TaskSpec]]:
        for split in await self._queries.splits(environment):
            count = await self._queries.count(environment, split.name)
            for start in range(0, count, SEARCHED_AT_ONCE):
                some = await self._queries.tasks(environment, split.name, start, start + SEARCHED_AT_ONCE)
                for index, task in enumerate(some, start):
                    yield (split.name, index), task

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _is_registrys(self, environment: Environment, split: str) -> bool:
        """Return True if the registry holds *split*, False if the workers do.

        Raises:
            UnknownSplit: Neither has the split. With a task folder the later look-up in the registry raises this error.
        """
        if not self.asks(environment) or split in self.registered_splits(environment):
            return True
        own = [one.name for one in await self._queries.splits(environment)]
        if split in own:
            return False

        def look_up() -> bool:
            registered = self.registered_splits(environment)
            if split not in registered:
                raise unknown_split(split, [*registered, *own])
            return True

        return await self.sure(look_up)

    def _found(self, environment: Environment, ids: Sequence[str], prefer: str) -> TaskRef:
        unknown = UnknownTask("no task")
        for id in ids:
            try:
                return self._registered_at(environment, *self.registry.find(environment.name, id, prefer=prefer))
            except UnknownTask as error:
                unknown = error
        raise unknown

    def _registered_at(self, environment: Environment, split: str, index: int) -> TaskRef:
        spec = self.registry.task(environment.name, split, index)
        if index < 0:
            index += self.registry.count(environment.name, split)
        return TaskRef(spec=spec, split=split, index=index)

    async def _own(self, environment: Environment, split: str, index: int) -> TaskSpec:
        count = await self.count(environment, split)
        if not -count <= index < count:
            raise unknown_index(split, index, count)
        found = await self._queries.tasks(environment, split, index % count, index % count + 1)
        if not found:
            raise unknown_index(split, index, count)  # removed since the count
        return found[0]


def _compact(task: TaskSpec) -> bytes:
    return json.dumps(task, separators=(",", ":")).encode()


SEARCHED_MAX: Final = 20_000
"""Tasks of one image whose places the gateway remembers by their content."""
SEARCHED_S: Final = 60.0
"""Seconds after a search during which the gateway does not search the image again."""
Place = tuple[str, int]
"""Split and index."""


class TaskPlaces:
    """The places of one third-party image's own tasks, found by the tasks' content.

    OpenEnv trainers receive a task and send it back whole, but the image's reset expects its place.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._places: dict[bytes, Place] = {}
        self._searched_at: float | None = None

    def get(self, task: TaskSpec) -> Place | None:
        """Return the place of *task* at the last search, or None."""
        return self._places.get(_digest(task))

    def outdated(self) -> None:
        """Mark the remembered places as outdated, so that the next search reads the tasks again."""
        self._searched_at = None

    async def search(self, task: TaskSpec, tasks: AsyncIterator[tuple[Place, TaskSpec]]) -> Place | None:
        """Remember the places of *tasks* and return the place of *task*, or None.

        Return None without a search if the last search was less than `SEARCHED_S` ago.
        """
        now = self._clock()
        if self._searched_at is not None and now - self._searched_at < SEARCHED_S:
            return None
        places: dict[bytes, Place] = {}
        async for place, one in tasks:
            places.setdefault(_digest(one), place)
            if len(places) >= SEARCHED_MAX:
                break
        self._places = places
        self._searched_at = now
        return self.get(task)


def _digest(task: TaskSpec) -> bytes:
    return hashlib.blake2b(json.dumps(task, sort_keys=True).encode(), digest_size=16).digest()

"""The tasks of an environment in the form of the protocol, from the author's hooks."""

import asyncio
from collections.abc import Mapping
from typing import Any

from envserver.errors import Refused
from envserver.execution.runner import Place, Runner
from envserver.schema.environment_types import Kind, overrides

_NOT_LISTED = (
    "list_tasks is not supported for this environment. Use the index-based API (num_tasks + get_task) instead."
)


class TaskSets:
    """The tasks of one environment.

    For access by index the ``tasks`` hook runs once per split. For a whole listing it runs each time.
    """

    def __init__(self, kind: Kind, *, runner: Runner) -> None:
        cls = kind.cls
        self._kind = kind
        self._runner = runner
        self._has_list = overrides(cls, "tasks")
        self._has_count = overrides(cls, "num_tasks")
        self._has_get = overrides(cls, "get_task")
        self._lists: dict[str, list[dict[str, Any]]] = {}
        self._locks = {split.name: asyncio.Lock() for split in kind.splits}

    def check_split(self, split: str) -> None:
        """
        Raises:
            Refused: The environment has no such split.
        """
        if split not in self._locks:
            raise Refused(400, "Invalid split")

    async def all(self, split: str) -> list[dict[str, Any]]:
        """Return the tasks of a split.

        Raises:
            Refused: There is no such split, or the environment offers tasks by index only.
        """
        self.check_split(split)
        if self._has_get and not self._has_list:
            raise Refused(400, _NOT_LISTED)
        try:
            return _objects(await self._run(self._kind.cls.tasks, split))
        except NotImplementedError as error:
            raise Refused(400, _NOT_LISTED) from error

    async def count(self, split: str) -> int:
        """Return the number of tasks in a split.

        Raises:
            Refused: There is no such split.
        """
        self.check_split(split)
        if self._has_list and not self._has_count:
            return len(await self._cached(split))
        return int(await self._run(self._kind.cls.num_tasks, split))

    async def get(self, split: str, index: int) -> dict[str, Any]:
        """Return a task. *index* -1 is the last.

        Raises:
            Refused: There is no such split, or the index is out of range.
        """
        count = await self.count(split)
        place = index + count if index < 0 else index
        if not 0 <= place < count:
            raise Refused(400, "Invalid index")
        if self._has_list and not self._has_get:
            return (await self._cached(split))[place]
        try:
            return _object(await self._run(self._kind.cls.get_task, split, place))
        except IndexError as error:
            raise Refused(400, "Invalid index") from error

    async def range(self, split: str, start: int | None, stop: int | None) -> list[dict[str, Any]]:
        """Return the tasks from *start* to *stop*, exclusive, with the rules of a Python slice.

        Raises:
            Refused: There is no such split, or the environment raised IndexError.
        """
        count = await self.count(split)
        first, last = clamp(start, 0, count), clamp(stop, count, count)
        if self._has_list and not self._has_get:
            return (await self._cached(split))[first:last]
        if not self._has_get:
            return _objects(await self._run(self._kind.cls.task_files.read, split, first, last))
        try:
            return [_object(await self._run(self._kind.cls.get_task, split, i)) for i in range(first, last)]
        except IndexError as error:
            raise Refused(400, "Invalid index range") from error

    @property
    def has_ids(self) -> bool:
        """Whether tasks can be found by id. This is impossible in a set that offers tasks by index only."""
        return self._has_list or not self._has_get

    async def find(self, task_id: str) -> dict[str, Any] | None:
        """Return the task with this id from any split, or None if it does not exist or ids are unknown."""
        if not self.has_ids:
            return None
        if not self._has_list:
            found: dict[str, Any] | None = await self._run(self._kind.cls.task_files.find, task_id)
            return found
        for split in self._locks:
            for task in await self._cached(split):
                if task.get("id", task.get("task_id")) == task_id:
                    return task
        return None

    async def _cached(self, split: str) -> list[dict[str, Any]]:
        async with self._locks[split]:  # one caller runs the author's hook, the others wait for it
            if split not in self._lists:
                self._lists[split] = _objects(await self._run(self._kind.cls.tasks, split))
            return self._lists[split]

    async def _run(self, hook: Any, *args: Any) -> Any:
        place = Place(self._kind.place if self._kind.shares_lane else None)
        try:
            return await self._runner.run(place, hook, *args)
        finally:
            self._runner.leave(place)


def clamp(bound: int | None, default: int, count: int) -> int:
    """Convert a slice's bound to a number from 0 to *count*."""
    if bound is None:
        return default
    return min(max(bound + count, 0) if bound < 0 else bound, count)


def _object(task: Any) -> dict[str, Any]:
    if not isinstance(task, Mapping):
        raise TypeError(f"a task must be a mapping, not {type(task).__name__}")
    return dict(task)


def _objects(tasks: Any) -> list[dict[str, Any]]:
    return [_object(task) for task in tasks]

"""Stores the run-time tasks of a one-process gateway in dictionaries, which end with the process.

No method awaits between reading and writing, so each is atomic on the event loop.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace as changed

from gateway.core.errors import InvalidRequest, TaskExists
from gateway.core.ids import EnvironmentName
from gateway.core.ports.tasks import (
    MAX_AT_ONCE,
    MAX_SPLITS,
    MAX_TASK_BYTES,
    MAX_TASKS,
    MAX_TOTAL_BYTES,
    BundleRefused,
    BundleStamp,
    StoredTask,
    TaskChanges,
)
from gateway.stores.memory.queue import Deadlines

_Name = tuple[EnvironmentName, str]

GONE_KEPT = 10_000
"""Maximum number of removed tasks' names kept. A replica that missed more removals reads all tasks again."""
MAX_LIMITED = 100_000
"""Maximum number of keys whose starts are counted. Beyond it, the store forgets the key whose window ends first."""


class MemoryTaskStore:
    """Tasks added to one process at run time; implements ``core.ports.tasks.TaskStore``."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_tasks: int = MAX_TASKS,
        max_total_bytes: int = MAX_TOTAL_BYTES,
        max_splits: int = MAX_SPLITS,
        gone_kept: int = GONE_KEPT,
        max_limited: int = MAX_LIMITED,
    ) -> None:
        """Create an empty store. *clock* is monotonic, in seconds. Only tests set lower limits."""
        self._clock = clock
        self._max_tasks = max_tasks
        self._max_total_bytes = max_total_bytes
        self._max_splits = max_splits
        self._gone_kept = gone_kept
        self._max_limited = max_limited
        self._epoch = uuid.uuid4().hex
        self._number = 0
        self._tasks: dict[_Name, StoredTask] = {}
        self._floor = 0  # number of the last change up to which the names of removed tasks were forgotten
        self._changed: dict[_Name, int] = {}
        self._places: dict[tuple[EnvironmentName, str], int] = {}
        self._bundles: dict[tuple[str, str, str], BundleStamp] = {}  # the newest one, by key, environment and split
        self._starts: dict[str, deque[float]] = {}
        self._starts_end: Deadlines[str] = Deadlines()

    async def put(
        self, tasks: Sequence[StoredTask], *, replace: bool, bundle: BundleStamp | None = None
    ) -> Sequence[StoredTask]:
        check_batch(tasks)
        if bundle is not None:
            self._check_bundle(bundle, tasks)
        for task in tasks:
            if not replace and (task.environment, task.id) in self._tasks:
                raise exists(task.environment, task.id)
        self._check_room(tasks)
        if bundle is not None:
            self._bundles[bundle.key, bundle.environment, bundle.split] = bundle
        return [self._put(task) for task in tasks]

    async def remove(self, environment: EnvironmentName, id: str) -> bool:
        if self._tasks.pop((environment, id), None) is None:
            return False
        self._note((environment, id))
        if len(self._changed) - len(self._tasks) > self._gone_kept:
            self._changed = {name: at for name, at in self._changed.items() if name in self._tasks}
            self._floor = self._number
        return True

    async def version(self) -> str:
        return f"{self._epoch}:{self._number}" if self._number else ""

    async def since(self, version: str) -> TaskChanges:
        epoch, _, number = version.partition(":")
        is_whole = epoch != self._epoch or int(number) < self._floor
        names = [name for name, at in self._changed.items() if is_whole or at > int(number)]
        return TaskChanges(
            version=await self.version(),
            is_whole=is_whole,
            is_last=True,
            tasks=[self._tasks[name] for name in names if name in self._tasks],
            removed=[] if is_whole else [name for name in names if name not in self._tasks],
        )

    async def take(self, key: str, *, starts: int, per_s: float) -> float:
        now = self._clock()
        while (ended := self._starts_end.pop(now)) is not None:
            del self._starts[ended[0]]
        if key not in self._starts and len(self._starts) >= self._max_limited:
            self._forget_first()
        taken = self._starts.setdefault(key, deque())
        while len(taken) > starts:
            taken.popleft()
        if len(taken) == starts and (left_s := taken[0] + per_s - now) > 0:
            return left_s
        taken.append(now)
        self._starts_end.set(key, now + per_s)
        return 0.0

    async def aclose(self) -> None:
        """Do nothing. The Redis store closes its connections here."""

    def _forget_first(self) -> None:
        first = self._starts_end.pop(math.inf)
        if first is not None:
            del self._starts[first[0]]

    def _put(self, task: StoredTask) -> StoredTask:
        name, split = (task.environment, task.id), (task.environment, task.split)
        before = self._tasks.get(name)
        if before is not None and before.split == task.split:
            place = before.place
        else:
            place = self._places.get(split, 0)
            self._places[split] = place + 1
        self._tasks[name] = kept = changed(task, place=place)
        self._note(name)
        return kept

    def _note(self, name: _Name) -> None:
        self._number += 1
        self._changed[name] = self._number

    def _check_bundle(self, bundle: BundleStamp, tasks: Sequence[StoredTask]) -> None:
        accepted = [one for one in self._bundles.values() if one.key == bundle.key]
        newest = max((one.made_at for one in accepted if bundle.is_barred_by(one)), default="")
        if newest:
            raise older_bundle(bundle, newest)
        for task in tasks:
            before = self._tasks.get((task.environment, task.id))
            if bundle.split and before is not None and before.split != bundle.split:
                raise other_split(bundle, task.environment, task.id, before.split)

    def _check_room(self, tasks: Sequence[StoredTask]) -> None:
        after = self._tasks | {(task.environment, task.id): task for task in tasks}
        counts = Counter(environment for environment, _ in after)
        splits = Counter(environment for environment, _ in {*self._places, *((t.environment, t.split) for t in tasks)})
        for environment in {task.environment for task in tasks}:
            if counts[environment] > self._max_tasks:
                raise full_of_tasks(environment, self._max_tasks)
            if splits[environment] > self._max_splits:
                raise full_of_splits(environment, self._max_splits)
        if sum(len(task.body) for task in after.values()) > self._max_total_bytes:
            raise full_of_bytes(self._max_total_bytes)


def check_batch(tasks: Sequence[StoredTask]) -> None:
    """Raise ``InvalidRequest`` for a batch that every store refuses: too many tasks, a large task, or a duplicate."""
    if len(tasks) > MAX_AT_ONCE:
        raise InvalidRequest(f"{len(tasks)} tasks in one request; the maximum is {MAX_AT_ONCE}")
    for task in tasks:
        if len(task.body) > MAX_TASK_BYTES:
            raise InvalidRequest(f"the task {task.id!r} has {len(task.body)} bytes; the maximum is {MAX_TASK_BYTES}")
    names = Counter((task.environment, task.id) for task in tasks)
    for (environment, id), count in names.items():
        if count > 1:
            raise InvalidRequest(f"the task {id!r} of {environment!r} comes {count} times")


def exists(environment: str, id: str) -> TaskExists:
    return TaskExists(f"{environment!r} has a task {id!r} already")


def older_bundle(bundle: BundleStamp, newest: str) -> BundleRefused:
    return BundleRefused(
        f"the bundle was signed at {bundle.made_at}, but another bundle, signed at {newest}, was accepted from key "
        f"{bundle.key}: sign the tasks again"
    )


def other_split(bundle: BundleStamp, environment: str, id: str, split: str) -> BundleRefused:
    return BundleRefused(
        f"the bundle is signed for the split {bundle.split!r}, but {environment!r} has the task {id!r} in {split!r}: "
        f"sign the tasks again, with --split {split} or without --split"
    )


def full_of_tasks(environment: str, limit: int) -> InvalidRequest:
    return InvalidRequest(f"{environment!r} would have more than {limit} tasks that came at run time")


def full_of_splits(environment: str, limit: int) -> InvalidRequest:
    return InvalidRequest(f"{environment!r} would have had more than {limit} splits of tasks that came at run time")


def full_of_bytes(limit: int) -> InvalidRequest:
    return InvalidRequest(f"the tasks that came at run time would be more than {limit} bytes")

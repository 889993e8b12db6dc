"""Adds, replaces and removes tasks at run time in all replicas, and limits how often a task starts.

The store keeps these tasks. Each replica's registry follows the store within a second, or immediately when a request
names a task unknown to the registry.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from envserver.generic.task import schema_problems

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment
from gateway.core.errors import InvalidRequest, RateLimited, StoreUnavailable, TaskExists, TaskInvalid, UnknownTask
from gateway.core.ids import EnvironmentName
from gateway.core.periodic import pause
from gateway.core.ports.tasks import MAX_AT_ONCE, BundleStamp, StoredTask, TaskStore
from gateway.tasks.documents import compact
from gateway.tasks.registry import TaskRegistry
from gateway.tasks.schema import parse, variants_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

REFRESH_S = 1.0
"""Seconds between two queries of the store's version. Each query is one GET."""
DEFAULT_SPLIT = "custom"
MAX_PROBLEMS = 200
"""Maximum number of problems that the gateway reports for one upload."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A task that conforms to the schema, and its environment."""

    environment: Environment
    task: dict[str, Any]

    @property
    def id(self) -> str:
        """The task's id."""
        id: str = self.task["id"]
        return id


@dataclass(frozen=True, slots=True)
class RegisteredTask:
    """The place of a task after its registration."""

    environment: EnvironmentName
    id: str
    split: str
    index: int
    is_new: bool
    """False if the task replaced a task with the same id."""


class RuntimeTasks:
    """Keeps a replica's registry in step with the store that all replicas share."""

    def __init__(self, *, registry: TaskRegistry, store: TaskStore, catalog: Catalog) -> None:
        self.registry = registry
        self._store = store
        self._catalog = catalog

    # -- adding and removing --------------------------------------------------------------------------------------

    def check(self, documents: Sequence[tuple[str, object]], *, environment: str = "") -> list[Checked]:
        """Check tasks before their registration. Each takes about 0.1 ms, so a thread should check large batches.

        Args:
            documents: The place of each task in the upload (``tasks[3]``), and the task as plain data.
            environment: The environment of tasks without an ``env_type``.

        Raises:
            TaskInvalid: Some tasks are invalid. The error has at most `MAX_PROBLEMS` problems of all tasks.
            InvalidRequest: They are more than `MAX_AT_ONCE`.
        """
        checked: list[Checked] = []
        problems: list[tuple[str, str]] = []
        seen: dict[tuple[EnvironmentName, str], str] = {}
        for where, document in documents:
            try:
                found = [self._check(one, environment) for one in variants_of(document)]
            except TaskInvalid as error:
                problems += [(_below(where, path), message) for path, message in error.problems]
                continue
            for one in found:
                first = seen.setdefault((one.environment.name, one.id), where)
                if first != where:
                    problems.append((_below(where, "id"), f"{one.id!r} stands at {first} already"))
            checked += found
            if len(checked) > MAX_AT_ONCE:
                raise InvalidRequest(f"more than {MAX_AT_ONCE} tasks at once, with those that `seeds` adds")
        if problems:
            raise TaskInvalid(problems[:MAX_PROBLEMS])
        return checked

    async def register(
        self, tasks: Sequence[Checked], *, split: str = "", replace: bool = False, bundle: BundleStamp | None = None
    ) -> list[RegisteredTask]:
        """Add all of *tasks* or none. This replica has them immediately, every other replica within a second.

        A task's split is *split*, else the split that the task names, else the split of the task that it replaces, else
        ``custom``. *bundle* is the stamp of the signed bundle that the tasks come from; None: they are unsigned.

        Raises:
            BundleRefused: A newer bundle of the key was accepted, or *bundle* is for another split than a task's.
            TaskExists: The environment has a task with one of these ids or aliases, which may not be replaced: it is in
                a file, *replace* is false, or the name belongs to a task with another id.
            InvalidRequest: The tasks exceed a limit of the store.
            StoreUnavailable: The store does not answer. It may have added the tasks.
        """
        await self.registry.refresh(self._store)
        for one in tasks:
            self._refuse_taken(one, replace=replace)
        before = {(one.environment.name, one.id): self.registry.stored(one.environment.name, one.id) for one in tasks}
        wanted = []
        for one in tasks:
            had = before[one.environment.name, one.id]
            wanted.append(
                StoredTask(
                    environment=one.environment.name,
                    id=one.id,
                    split=split or one.task.get("split") or (had.split if had is not None else DEFAULT_SPLIT),
                    body=compact(one.task),
                    signed_by=bundle.key if bundle is not None else "",
                )
            )
        kept = await self._store.put(wanted, replace=replace, bundle=bundle)
        await self.registry.refresh(self._store)
        return [
            RegisteredTask(
                environment=task.environment,
                id=task.id,
                split=task.split,
                index=self.registry.first_added(task.environment, task.split) + task.place,
                is_new=before[task.environment, task.id] is None,
            )
            for task in kept
        ]

    async def unregister(self, environment: EnvironmentName, task_id: str) -> None:
        """Remove a task that was registered at run time. Its index stays without a task.

        Raises:
            UnknownTask: There is no task with this id, or the task is in a file.
            StoreUnavailable: The store does not answer.
        """
        if not await self._store.remove(environment, task_id):
            for split, stored in self.registry.holders(environment, task_id):
                if stored is None:
                    raise UnknownTask(f"the task {task_id!r} of {environment!r} is in the task file of split {split!r}")
            raise UnknownTask(f"Unknown task: {task_id}")
        await self.registry.refresh(self._store)

    # -- following ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Refresh the registry from the store every second until cancelled."""
        while True:
            try:
                await self.registry.refresh(self._store)
            except StoreUnavailable:
                pass  # the store's client has logged it; the replica serves the known tasks
            except Exception:
                logger.exception("tick_failed loop=tasks")  # without this loop only a miss would find new tasks
            await pause(REFRESH_S)

    async def refresh(self) -> None:
        """Refresh the registry for a listing. If the store does not answer, the listing shows the known tasks."""
        with contextlib.suppress(StoreUnavailable):
            await self.registry.refresh(self._store)

    async def sure(self, look_up: Callable[[], T]) -> T:
        """Return the result of *look_up*. If it finds no task, refresh the registry and call it again.

        Raises:
            UnknownTask: *look_up* finds no task in the refreshed registry either.
            StoreUnavailable: *look_up* finds no task and the store does not answer. The task may still exist.
        """
        try:
            return look_up()
        except UnknownTask:
            await self.registry.refresh(self._store)
            return look_up()

    # -- beginning ------------------------------------------------------------------------------------------------

    async def admit(self, task: Mapping[str, Any], environment: EnvironmentName) -> None:
        """Take one of the starts that the task's ``rate_limit`` allows for all replicas and trainers together.

        Raises:
            RateLimited: No start is left now. The error has the seconds until the next start.
            TaskInvalid: The ``rate_limit`` is malformed.
            StoreUnavailable: The store does not answer.
        """
        limit = task.get("rate_limit")
        if limit is None:
            return
        problems = schema_problems({"rate_limit": limit})
        if problems:
            raise TaskInvalid(problems)
        starts, per_s = int(limit["starts"]), float(limit["per_s"])
        name = str(task.get("id") or hashlib.sha256(compact(task)).hexdigest())
        # The key includes the limit, so that a trainer's inline task with the same id cannot raise the limit.
        key = f"{environment} {name} {starts}/{per_s!r}"
        left_s = await self._store.take(key, starts=starts, per_s=per_s)
        if left_s > 0:
            raise RateLimited(
                f"the task {name[:200]!r} may begin {starts} times in {per_s:g} s; again in {left_s:.1f} s",
                retry_after_s=left_s,
            )

    def _check(self, document: object, environment: str) -> Checked:
        if isinstance(document, Mapping) and environment and not document.get("env_type"):
            document = {**document, "env_type": environment}
        env_type = document.get("env_type") if isinstance(document, Mapping) else None
        name = self.registry.environment_of(env_type) if isinstance(env_type, str) else None
        found = self._catalog.offered.get(name) if name is not None else None
        problems: list[tuple[str, str]] = []
        if isinstance(env_type, str) and env_type and found is None:
            problems.append(("env_type", f"no environment {env_type[:100]!r} is available"))
        elif environment and found is not None and self.registry.environment_of(environment) != found.name:
            problems.append(("env_type", f"the task belongs to {env_type!r}, not to {environment!r}"))
        try:
            task = parse(document, isolation=found.isolation if found is not None else None, is_registered=True)
        except TaskInvalid as error:
            raise TaskInvalid([*problems, *error.problems]) from None
        if problems or found is None:
            raise TaskInvalid(problems)
        return Checked(found, task)

    def _refuse_taken(self, one: Checked, *, replace: bool) -> None:
        environment, task = one.environment.name, one.task
        for name in (one.id, *task.get("aliases", ())):
            for split, stored in self.registry.holders(environment, name):
                if stored is None:
                    raise TaskExists(f"{environment!r} has a task {name!r} already, in the file of {split!r}")
                if stored.id != one.id or (name == one.id and not replace):
                    raise TaskExists(f"{environment!r} has a task {name!r} already")


def _below(where: str, path: str) -> str:
    return f"{where}.{path}" if where and path else where or path

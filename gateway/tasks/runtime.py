"""Tasks at run time: added, replaced and removed while the gateway serves, in all replicas; and how often they begin.

The store has them; each replica's registry follows within a second, and at once where somebody asks for a task that it
does not know.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from envserver.generic.task import schema_problems

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment
from gateway.core.errors import StoreUnavailable, TaskExists, TaskInvalid, TaskRateLimited, UnknownTask
from gateway.core.ids import EnvironmentName
from gateway.core.ports.tasks import StoredTask, TaskStore
from gateway.tasks.documents import compact
from gateway.tasks.registry import TaskRegistry
from gateway.tasks.schema import parse

logger = logging.getLogger(__name__)

T = TypeVar("T")

REFRESH_S = 1.0
"""How often the store is asked for its version: one GET."""
DEFAULT_SPLIT = "custom"
MAX_PROBLEMS = 200
"""Of one upload; what comes after them is not told."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A task that fits the schema, and the environment that it is for."""

    environment: Environment
    task: dict[str, Any]

    @property
    def id(self) -> str:
        """The task's id."""
        id: str = self.task["id"]
        return id


@dataclass(frozen=True, slots=True)
class RegisteredTask:
    """Where a task is now."""

    environment: EnvironmentName
    id: str
    split: str
    index: int
    is_new: bool
    """False: it replaced another one of its id."""


class RuntimeTasks:
    """The registry of a replica together with the store that all replicas share."""

    def __init__(self, *, registry: TaskRegistry, store: TaskStore, catalog: Catalog) -> None:
        self.registry = registry
        self._store = store
        self._catalog = catalog

    # -- adding and removing --------------------------------------------------------------------------------------

    def check(self, documents: Sequence[tuple[str, object]], *, environment: str = "") -> list[Checked]:
        """Check tasks that are to be registered; takes some 0.1 ms for each, so many are a thread's work.

        Args:
            documents: where each stands (``tasks[3]``), and the task as plain data.
            environment: of those that do not say an ``env_type``.

        Raises:
            TaskInvalid: with every problem of every task.
        """
        checked: list[Checked] = []
        problems: list[tuple[str, str]] = []
        seen: dict[tuple[EnvironmentName, str], str] = {}
        for where, document in documents:
            try:
                one = self._check(document, environment)
            except TaskInvalid as error:
                problems += [(_below(where, path), message) for path, message in error.problems]
                continue
            first = seen.setdefault((one.environment.name, one.id), where)
            if first != where:
                problems.append((_below(where, "id"), f"{one.id!r} stands at {first} already"))
            checked.append(one)
        if problems:
            raise TaskInvalid(problems[:MAX_PROBLEMS])
        return checked

    async def register(
        self, tasks: Sequence[Checked], *, split: str = "", replace: bool = False, signed_by: str = ""
    ) -> list[RegisteredTask]:
        """Add *tasks*, all or none of them; every replica has them within a second, this one at once.

        Each goes to *split*, else to the split that it names itself, else to where the one is that it replaces, else
        to ``custom``.

        Raises:
            TaskExists: the environment has a task of one of these ids or aliases, and it may not be replaced: *replace*
                is not given, or it stands in a file.
            InvalidRequest: a limit of the store is exceeded.
            StoreUnavailable: the store does not answer; the tasks may have been added.
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
                    signed_by=signed_by,
                )
            )
        kept = await self._store.put(wanted, replace=replace)
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
        """Remove a task that came at run time; its index means no task from now on.

        Raises:
            UnknownTask: there is none of this id, or it stands in a file.
            StoreUnavailable: the store does not answer.
        """
        if not await self._store.remove(environment, task_id):
            for split, stored in self.registry.holders(environment, task_id):
                if stored is None:
                    raise UnknownTask(f"the task {task_id!r} of {environment!r} stands in the file of {split!r}")
            raise UnknownTask(f"Unknown task: {task_id}")
        await self.registry.refresh(self._store)

    # -- following ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the store each second, until cancelled."""
        while True:
            try:
                await self.registry.refresh(self._store)
            except StoreUnavailable:
                pass  # the link has logged it; what is known goes on being served
            except Exception:
                logger.exception("tick_failed loop=tasks")  # without this loop new tasks would be found on a miss only
            await asyncio.sleep(REFRESH_S)

    async def refresh(self) -> None:
        """Take over what is new, if the store answers: for listings, which then show what is known."""
        with contextlib.suppress(StoreUnavailable):
            await self.registry.refresh(self._store)

    async def sure(self, look_up: Callable[[], T]) -> T:
        """What *look_up* returns; if it finds no task, what it returns once the registry is up to date.

        Raises:
            UnknownTask: as *look_up*.
            StoreUnavailable: no task is known, and the store cannot be asked: never to be read as "not found".
        """
        try:
            return look_up()
        except UnknownTask:
            await self.registry.refresh(self._store)
            return look_up()

    # -- beginning ------------------------------------------------------------------------------------------------

    async def admit(self, task: Mapping[str, Any], environment: EnvironmentName) -> None:
        """Take one of the starts that the task's ``rate_limit`` allows, over all replicas and trainers.

        Raises:
            TaskRateLimited: there is none now; with the seconds until there is.
            TaskInvalid: the limit is none.
            StoreUnavailable: the store does not answer.
        """
        limit = task.get("rate_limit")
        if limit is None:
            return
        problems = schema_problems({"rate_limit": limit})
        if problems:
            raise TaskInvalid(problems)
        starts, per_s = int(limit["starts"]), float(limit["per_s"])
        name = str(task.get("id") or hashlib.sha256(compact(task)).hexdigest())
        # With the limit in the key, a task that a trainer gives inline, under the same id, does not stretch it.
        key = f"{environment} {name} {starts}/{per_s!r}"
        left_s = await self._store.take(key, starts=starts, per_s=per_s)
        if left_s > 0:
            raise TaskRateLimited(
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
            problems.append(("env_type", f"no environment {env_type[:100]!r} is on offer"))
        elif environment and found is not None and self.registry.environment_of(environment) != found.name:
            problems.append(("env_type", f"the task is one of {env_type!r}, not of {environment!r}"))
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

"""Stores run-time tasks in Redis. Each operation is one Lua script (``lua/tasks/``), as in `stores.redis`.

Changes are not published. A replica reads the version each second with one GET, and fetches the changes if it differs.

``docs/design/store.md`` lists the keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace as changed
from typing import Any

from gateway.core.errors import InvalidRequest
from gateway.core.ids import EnvironmentName
from gateway.core.ports.tasks import (
    MAX_SPLITS,
    MAX_TASKS,
    MAX_TOTAL_BYTES,
    BundleStamp,
    StoredTask,
    TaskChanges,
)
from gateway.stores.memory.tasks import (
    GONE_KEPT,
    check_batch,
    exists,
    full_of_bytes,
    full_of_splits,
    full_of_tasks,
    older_bundle,
    other_split,
)
from gateway.stores.redis.client import RedisClient
from gateway.stores.redis.records import text

CHANGES = 500
CHANGES_BYTES = 4 * 2**20
"""Maximum size in bytes of one answer, which has at most `CHANGES` changes: a few milliseconds of Redis's time."""


class RedisTaskStore:
    """Tasks added at run time, shared by all replicas; implements ``core.ports.tasks.TaskStore``."""

    def __init__(
        self,
        *,
        url: str,
        prefix: str = "gateway",
        max_tasks: int = MAX_TASKS,
        max_total_bytes: int = MAX_TOTAL_BYTES,
        max_splits: int = MAX_SPLITS,
        gone_kept: int = GONE_KEPT,
    ) -> None:
        """Create a store without a connection. Connections are opened when they are needed.

        Args:
            url: URL as for `RedisStore`. It is never logged.
            prefix: Prefix of every key, the same as in `RedisStore`, which corrects the clock.
            max_tasks, max_total_bytes, max_splits: Limits of ``core.ports.tasks``; lower in tests.
            gone_kept: Maximum number of removed tasks' names kept.
        """
        root = f"{{{prefix}}}"
        self._version_key = f"{root}:task_version".encode()
        self._max_tasks = max_tasks
        self._max_total_bytes = max_total_bytes
        self._max_splits = max_splits
        self._gone_kept = gone_kept
        self._link = RedisClient(url, root=root, family="tasks")

    async def put(
        self, tasks: Sequence[StoredTask], *, replace: bool, bundle: BundleStamp | None = None
    ) -> Sequence[StoredTask]:
        check_batch(tasks)
        if not tasks:
            return []
        values = [value for task in tasks for value in _values(task)]
        limits = (self._max_tasks, self._max_splits, self._max_total_bytes)
        stamp = bundle or BundleStamp(key="", made_at="", digest="")
        signed = (stamp.key, stamp.environment, stamp.split, stamp.made_at, stamp.digest)
        kind, *rest = await self._link.run("put", "1" if replace else "", *limits, *signed, *values)
        match text(kind):
            case "kept":
                return [changed(task, place=int(place)) for task, place in zip(tasks, rest[0], strict=True)]
            case "older":
                raise older_bundle(stamp, text(rest[0]))
            case "elsewhere":
                raise other_split(stamp, *map(text, rest))
            case "exists":
                raise exists(text(rest[0]), text(rest[1]))
            case "tasks":
                raise full_of_tasks(text(rest[0]), self._max_tasks)
            case "splits":
                raise full_of_splits(text(rest[0]), self._max_splits)
            case _:
                raise full_of_bytes(self._max_total_bytes)

    async def remove(self, environment: EnvironmentName, id: str) -> bool:
        return bool(await self._link.run("remove", environment, id, self._gone_kept))

    async def version(self) -> str:
        found = await self._link.ask("GET", self._version_key)
        return "" if found is None else text(found)

    async def since(self, version: str) -> TaskChanges:
        reached, is_whole, is_last, flat = await self._link.run("since", version, CHANGES, CHANGES_BYTES)
        tasks: list[StoredTask] = []
        removed: list[tuple[EnvironmentName, str]] = []
        for name, kept in zip(flat[::2], flat[1::2], strict=True):
            environment, _, id = text(name).partition(" ")
            if kept:
                tasks.append(_read(EnvironmentName(environment), id, kept))
            elif not is_whole:
                removed.append((EnvironmentName(environment), id))
        return TaskChanges(
            version=text(reached), is_whole=bool(is_whole), is_last=bool(is_last), tasks=tasks, removed=removed
        )

    async def take(self, key: str, *, starts: int, per_s: float) -> float:
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        left_ms = await self._link.run("take", digest, starts, per_s)
        return int(left_ms) / 1000

    async def aclose(self) -> None:
        await self._link.aclose()


def _values(task: StoredTask) -> tuple[Any, ...]:
    if any(" " in name or not name for name in (task.environment, task.id, task.split)):
        raise InvalidRequest(f"the task {task.id!r}: its environment, id and split are names without spaces")
    return task.environment, task.id, task.split, task.signed_by, task.body.decode()


def _read(environment: EnvironmentName, id: str, kept: bytes) -> StoredTask:
    head, _, body = kept.partition(b"\n")
    split, place, signed_by = text(head).split(" ", 2)
    return StoredTask(environment=environment, id=id, split=split, body=body, signed_by=signed_by, place=int(place))

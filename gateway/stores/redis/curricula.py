"""Stores curricula in Redis. Each operation is one Lua script (``lua/curricula/``) or one command.

Changes are not published. A replica fetches the changes since the version that it knows.

``docs/design/store.md`` lists the keys. An era is a random name that a curriculum's draws get with the first draw.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import uuid
from collections.abc import Sequence
from typing import Any

from gateway.core.curriculum import RECENT, Outcome, TaskRecord
from gateway.core.errors import StoreUnavailable
from gateway.core.ids import EnvironmentName
from gateway.core.ports.curricula import (
    MAX_DEFINITION_BYTES,
    MAX_DEFINITIONS,
    MAX_DRAWN_BYTES,
    MAX_HANDLES,
    MAX_RECORDS,
    MAX_STATE_BYTES,
    TOLD_S,
    Drawn,
    RecordPage,
    Turn,
)
from gateway.stores.memory.curricula import (
    GONE_KEPT,
    PAGE_RECORDS,
    check_bytes,
    check_count,
    check_group,
    check_handle,
    check_outcomes,
    full_of_definitions,
)
from gateway.stores.redis.client import RedisClient
from gateway.stores.redis.records import packed, text

PAGE_BYTES = 2**20
"""Maximum size in bytes of one page without its last record: a few milliseconds of Redis's time."""


class RedisCurriculumStore:
    """Curricula shared by all replicas; implements ``core.ports.curricula.CurriculumStore``."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "gateway",
        max_records: int = MAX_RECORDS,
        max_handles: int = MAX_HANDLES,
        max_definitions: int = MAX_DEFINITIONS,
        page_records: int = PAGE_RECORDS,
        page_bytes: int = PAGE_BYTES,
        gone_kept: int = GONE_KEPT,
    ) -> None:
        """Create a store without a connection. Connections are opened when they are needed.

        Args:
            url: URL as for `RedisStore`. It is never logged.
            prefix: Prefix of every key, the same as in `RedisStore`, which corrects the clock.
            max_records, max_handles, max_definitions: Limits of ``core.ports.curricula``; lower in tests.
            page_records, page_bytes: Maximum number of changes, and maximum bytes, in one page of records.
            gone_kept: Maximum number of removed records' names kept per environment.
        """
        self._root = f"{{{prefix}}}"
        self._max_records = max_records
        self._max_handles = max_handles
        self._max_definitions = max_definitions
        self._page = page_records, page_bytes
        self._gone_kept = gone_kept
        self._link = RedisClient(url, root=self._root, family="curricula")

    # -- records --------------------------------------------------------------------------------------------------

    async def note(self, outcomes: Sequence[Outcome]) -> int:
        check_outcomes(outcomes)
        if not outcomes:
            return 0
        limits = TOLD_S, self._max_records, RECENT, self._gone_kept
        values = [value for outcome in outcomes for value in _values(outcome)]
        return int(await self._link.run("note", *limits, _random(), *values))

    async def records(self, environment: EnvironmentName, since: str = "") -> RecordPage:
        version, is_whole, is_last, flat = await self._link.run("records", environment, since, *self._page)
        listed = list(zip(flat[::2], flat[1::2], strict=True))
        return RecordPage(
            version=text(version),
            is_whole=bool(is_whole),
            is_last=bool(is_last),
            records=[_record(environment, text(task), kept) for task, kept in listed if kept],
            removed=[text(task) for task, kept in listed if not kept],
        )

    async def forget(self, environment: EnvironmentName, task: str = "") -> int:
        return int(await self._link.run("forget", environment, task, self._gone_kept))

    # -- draws ----------------------------------------------------------------------------------------------------

    async def join(self, curriculum: str, handle: int, *, member: str, group_size: int, group_s: float) -> Drawn | Turn:
        check_handle(curriculum, handle, self._max_handles)
        group_s = check_group(group_size, group_s)
        who, call = _hashed(member), _random()
        work = self._link.begin("join", curriculum, handle, who, call, group_size, group_s, _random())
        kind, *rest = await self._taken(work, curriculum, handle, who, call)
        return Drawn(int(rest[0]), rest[1]) if kind == b"drawn" else Turn(int(rest[0]))

    async def propose(self, curriculum: str, handle: int, turn: Turn, place: bytes, *, member: str) -> Drawn | None:
        check_handle(curriculum, handle, self._max_handles)
        check_bytes("a draw of", place, MAX_DRAWN_BYTES)
        who, call = _hashed(member), _random()
        work = self._link.begin("propose", curriculum, handle, turn.number, place, who, call)
        answer = await self._taken(work, curriculum, handle, who, call)
        return Drawn(int(answer[0]), answer[1]) if answer else None

    async def leave(self, curriculum: str, handle: int, *, member: str) -> None:
        await self._link.run("leave", curriculum, handle, _hashed(member), "")

    async def numbers(self, curriculum: str, count: int) -> int:
        check_count(count)
        key = packed(f"{self._root}:curriculum:{curriculum}")
        return int(await self._link.ask("HINCRBY", key, b"number", packed(count))) - count

    async def _taken(self, work: asyncio.Task[Any], curriculum: str, handle: int, who: str, call: str) -> Any:
        """Wait for a call that may take a place in a group, and release the place if the caller does not receive it.

        The place is not released if the opening repeated the call on any replica: then the later call has it too.
        """
        try:
            return await asyncio.shield(work)
        except BaseException as exc:  # the trainer hung up, or the answer was lost: undo the call in Redis
            undone = self._link.detach(self._undo(work, curriculum, handle, who, call))
            if not isinstance(exc, StoreUnavailable):
                await asyncio.shield(undone)
            raise

    async def _undo(self, work: asyncio.Task[Any], curriculum: str, handle: int, who: str, call: str) -> None:
        await asyncio.wait({work})
        with contextlib.suppress(StoreUnavailable):  # then the place ends with its group's time
            await self._link.run("leave", curriculum, handle, who, call)

    # -- state ----------------------------------------------------------------------------------------------------

    async def state(self, curriculum: str) -> tuple[int, bytes]:
        key = packed(f"{self._root}:curriculum:{curriculum}")
        version, state = await self._link.ask("HMGET", key, b"version", b"state")
        return int(version or 0), state or b""

    async def set_state(self, curriculum: str, version: int, state: bytes) -> bool:
        check_bytes("a sampler's state of", state, MAX_STATE_BYTES)
        return bool(await self._link.run("set_state", curriculum, version, state))

    async def reset(self, curriculum: str) -> None:
        keys = [packed(f"{self._root}:{kind}:{curriculum}") for kind in ("curriculum", "curriculum_turns")]
        await self._link.ask("UNLINK", *keys)

    # -- definitions that came by the API -------------------------------------------------------------------------

    async def define(self, curriculum: str, body: bytes) -> None:
        check_bytes(f"the definition of {curriculum!r} has", body, MAX_DEFINITION_BYTES)
        if not await self._link.run("define", curriculum, body, self._max_definitions, _random()):
            raise full_of_definitions(self._max_definitions)

    async def undefine(self, curriculum: str) -> bool:
        return bool(await self._link.run("undefine", curriculum, _random()))

    async def definitions(self) -> tuple[str, dict[str, bytes]]:
        version, flat = await self._link.run("definitions")
        return text(version), {text(name): body for name, body in zip(flat[::2], flat[1::2], strict=True)}

    async def definitions_version(self) -> str:
        return text(await self._link.ask("GET", packed(f"{self._root}:curriculum_version")) or b"")

    async def aclose(self) -> None:
        await self._link.aclose()


def _random() -> str:
    return uuid.uuid4().hex


def _hashed(name: str) -> str:
    """Return the 32-digit hash that replaces a name of any length in a key."""
    return hashlib.sha256(packed(name)).hexdigest()[:32]


def _values(outcome: Outcome) -> tuple[str | float, ...]:
    numbers = float(outcome.reward), int(outcome.finished), int(outcome.steps), float(outcome.seconds)
    return outcome.environment, outcome.task, *numbers, outcome.policy, outcome.lease and _hashed(outcome.lease)


def _record(environment: EnvironmentName, task: str, kept: bytes) -> TaskRecord:
    """Decode a task record that note.lua wrote."""
    head, recent, policy = text(kept).split("\n", 2)
    attempts, finished, mean, spread, steps, seconds, seen_at = head.split(" ")
    return TaskRecord(
        environment=environment,
        task=task,
        attempts=int(attempts),
        finished=int(finished),
        mean=float(mean),
        spread=float(spread),
        steps=float(steps),
        seconds=float(seconds),
        seen_at=float(seen_at),
        policy=policy,
        recent=tuple(float(reward) for reward in recent.split(" "))[-RECENT:],
    )

"""Implements the store that many replicas share in Redis. Each operation is one Lua script (``lua/``).

Redis's clock decides every deadline, so the replicas' clocks need not agree. Scripts derive their keys from one hash
tag, so all keys are in one slot of a Redis cluster. In a queue, owners take turns, one opening each, and the openings
of one owner keep their order. ``docs/design/store.md`` lists the keys. Scripts use INFO, which Redis ACLs must allow.

The data is *whole* while the key ``whole`` names the current run of the server. `rebuilt` writes this key. A script
that needs to know compares the key with the server's run id (``is_whole`` in ``lua/shared/base.lua``). So a Redis is
not whole after it was emptied, after a restart (whatever it loaded), or after a failover. The server checks this in the
same step that reads or writes. So no client has to detect the loss, and no connection, pool or proxy can hide it.

Two cases remain. A primary cut off from its Redis replicas still counts as whole and grants slots. This lasts while
some gateways reach it and others reach its successor (``min-replicas-to-write`` bounds that time). A server that loses
some keys while it runs, by eviction, does not detect it (use ``noeviction``).

Recovery: `lead` reports to each replica that the store is not whole. The leader adopts workers and their sessions, and
replicas restore the sessions that they serve. Waiting claims enter their queue again. Then the leader calls `rebuilt`,
with the fence that it had at the start. `rebuilt` refuses a lead from before a further data loss.

Channels: ``notices`` (``ended:<lease>:<id>``, ``wanted:<environment>``) and ``replica:<name>`` (leases of openings that
were settled).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.core.broadcast import Broadcast, Following
from gateway.core.errors import (
    InvalidRequest,
    SessionClosed,
    SessionExists,
    SessionNotFound,
    StoreUnavailable,
)
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.leader_lease import Lead
from gateway.core.session import (
    Activity,
    CapacityWanted,
    CloseReason,
    Notice,
    Session,
    SessionEnded,
    SessionRequest,
    SessionState,
)
from gateway.core.worker import EnvironmentLoad, Worker
from gateway.stores.limits import too_fast
from gateway.stores.redis.claims import RedisClaims
from gateway.stores.redis.client import Listener, RedisClient, happened
from gateway.stores.redis.records import (
    as_loads,
    as_session,
    as_sessions,
    as_worker,
    packed,
    pairs,
    request_values,
    session_values,
    text,
    texts,
    worker_values,
)
from gateway.stores.retry_after import bounded

SUBSCRIBE_S = 5.0
"""Maximum seconds that `RedisStore.start` waits for its subscription."""
JUMP_MS = 10_000
"""Milliseconds of difference between two clocks that count as a jump. Commands are at most ``client.ANSWER_S`` late."""
CURSOR_DIGITS = 20
"""Largest number of digits of a 64-bit number."""
NOTES_S = 10.0
"""Minimum seconds that sessions live after a data loss, in which replicas write their notes again."""
READING_KEPT_MS = 24 * 3_600_000
"""Milliseconds for which the clock reading of an ended process is kept."""


class RedisStore:
    """Sessions, workers, leases and deadlines of all replicas; implements ``core.ports.store.Store``."""

    def __init__(
        self,
        *,
        url: str,
        replica: str,
        prefix: str = "gateway",
        queue_max: int = 10_000,
        closed_kept_s: float = 600.0,
        closing_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a store without a connection; `start` connects.

        Args:
            url: ``redis://…``, ``rediss://…`` or ``unix://…``. It may contain a password, so it is never logged.
            replica: Name of this process, unique among the processes that share *prefix*.
            prefix: Prefix of every key and channel. Gateways with different prefixes do not see each other.
            queue_max: Maximum number of openings that wait for one environment.
            closed_kept_s: Seconds for which the close reason of a session is kept.
            closing_s: Seconds after which a closing session that was not released is due again.
            clock: Monotonic clock, in seconds, used only to detect jumps of Redis's clock.
        """
        self._root = f"{{{prefix}}}"
        self._replica = replica
        self._closed_kept_s = closed_kept_s
        self._closing_s = closing_s
        self._clock = clock
        self._owner = ""
        # A name per process, because readings of a monotonic clock mean nothing to another process.
        self._clock_name = uuid.uuid4().hex
        # The highest fence that Redis reported. It is the minimum for the next fence if Redis loses its data.
        self._last_fence = 0
        self._link = RedisClient(url, root=self._root)
        self._wakes = f"{self._root}:replica:{replica}"
        self._listener = Listener(self._link.client, [f"{self._root}:notices", self._wakes], self)
        self._notices: Broadcast[Notice] = Broadcast()
        self._claims = RedisClaims(self._link, replica=replica, queue_max=queue_max)
        self._is_open = False

    async def start(self) -> None:
        """Load the scripts and open the subscription.

        Raises:
            StoreUnavailable: Redis does not answer. All connections are closed.
        """
        try:
            await self._link.load()
            self._listener.start()
            self._claims.start()
            if not await happened(self._listener.is_subscribed, timeout_s=SUBSCRIBE_S):
                raise StoreUnavailable("the store does not answer")
        except BaseException:
            await self.aclose()
            raise
        self._is_open = True

    # -- the request path ---------------------------------------------------------------------------------------

    async def claim(self, opening: SessionRequest, *, wait_s: float) -> Session:
        self._check()
        return await self._claims.claim(opening, wait_s=wait_s)

    async def pace(self, owner: Owner, *, per_s: float, within_s: float) -> float:
        kind, wait_ms = await self._run("pace", owner, per_s, within_s)
        wait_s = float(wait_ms) / 1000
        if kind == b"refused":
            raise too_fast(owner, per_s, wait_s, within_s)
        return wait_s

    async def opened(self, id: SessionId, lease: str, *, handle: str = "", scorer: str = "") -> Session:
        kind, *rest = await self._run("opened", id, lease, handle, scorer)
        if kind == b"unknown":
            raise SessionNotFound(f"no session {id} of this lease")
        if kind == b"closed":
            raise SessionClosed(CloseReason(text(rest[0])))
        return as_session(pairs(rest[0]))

    async def rebind(self, id: SessionId, lease: str, *, was: str, handle: str) -> bool:
        return bool(await self._run("rebind", id, lease, was, handle))

    async def find(self, id: SessionId) -> Session:
        found = pairs(await self._run("find", id))
        if not found:
            raise SessionNotFound(f"no session {id}")
        if found["state"] == SessionState.CLOSED:
            raise SessionClosed(CloseReason(found["reason"]), result=found.get("result", ""))
        return as_session(found)

    async def touch(self, notes: Sequence[Activity]) -> list[SessionId]:
        self._check()
        gone = await self._link.run_in_batches("touch", items=[(note.id, note.quiet_s) for note in notes])
        return [SessionId(text(id)) for id in gone]

    async def count_turn(self, id: SessionId, lease: str, *, key: str = "") -> int:
        kind, *rest = await self._run("count_turn", id, lease, key)
        if kind == b"unknown":
            raise SessionNotFound(f"no open session {id} of this lease")
        if kind == b"closed":
            raise SessionClosed(CloseReason(text(rest[0])))
        return int(rest[0])

    async def note_late(self, id: SessionId, lease: str, steps: int) -> None:
        await self._run("note", id, lease, "steps_before_late", steps)

    async def note_result(self, id: SessionId, lease: str, result: str) -> None:
        await self._run("note", id, lease, "result", result)

    async def begin_close(self, id: SessionId, reason: CloseReason, *, lease: str = "") -> Session | None:
        answer = await self._run("begin_close", id, reason, self._closing_s, lease)
        return None if answer is None else as_session(pairs(answer))

    async def release(self, id: SessionId, lease: str) -> bool:
        return bool(await self._run("release", id, lease, self._closed_kept_s))

    async def keep_reply(self, id: SessionId, reply: bytes) -> None:
        await self._run("keep_reply", id, reply, self._closed_kept_s)

    async def kept_reply(self, id: SessionId) -> bytes | None:
        reply: bytes | None = await self._run("kept_reply", id)
        return reply

    async def hand_over(self, id: SessionId, lease: str, opening: SessionRequest) -> Session | None:
        kind, *rest = await self._run(
            "hand_over", *request_values(opening, self._replica), id, lease, self._closed_kept_s
        )
        if kind == b"exists":
            raise SessionExists(f"session {opening.id} exists")
        return None if kind == b"none" else as_session(pairs(rest[0]))

    # -- the control loop ---------------------------------------------------------------------------------------

    async def late(self, limit: int) -> list[Session]:
        return as_sessions(await self._run("late", limit))

    async def expire(self, ids: Sequence[SessionId]) -> list[Session]:
        self._check()
        return as_sessions(await self._link.run_in_batches("expire", self._closing_s, items=[(id,) for id in ids]))

    async def due(self, limit: int) -> list[Session]:
        return as_sessions(await self._run("due", limit, self._closing_s))

    async def add_worker(self, worker: Worker, *, fence: int = 0) -> None:
        await self._run("add_worker", *worker_values(worker), fence)

    async def worker_ready(self, id: WorkerId, address: str, *, slots: int = 0) -> bool:
        return bool(await self._run("worker_ready", id, address, slots))

    async def limit_worker(self, id: WorkerId, slots: int) -> None:
        await self._run("limit_worker", id, max(1, slots))

    async def pause_worker(self, id: WorkerId, *, fence: int = 0) -> bool:
        return bool(await self._run("pause_worker", id, fence))

    async def suspect_worker(self, id: WorkerId) -> bool:
        return bool(await self._run("suspect_worker", id))

    async def wake_worker(self, id: WorkerId) -> bool:
        return bool(await self._run("wake_worker", id))

    async def drain_worker(self, id: WorkerId, *, only_if_idle: bool = False, fence: int = 0) -> bool:
        return bool(await self._run("drain_worker", id, int(only_if_idle), fence))

    async def remove_worker(self, id: WorkerId, reason: CloseReason, *, fence: int = 0) -> list[Session] | None:
        ended = await self._run("remove_worker", id, reason, self._closed_kept_s, fence)
        return None if ended is None else as_sessions(ended)

    async def worker(self, id: WorkerId) -> Worker | None:
        self._check()
        found = texts(await self._link.ask("HGETALL", packed(f"{self._root}:worker:{id}")))
        return as_worker(found) if found else None

    async def load(self) -> Mapping[EnvironmentName, EnvironmentLoad]:
        return as_loads(await self._run("load"))

    async def sessions(self, *, limit: int = 1000) -> list[Session]:
        return as_sessions(await self._run("sessions", limit))

    async def session_page(self, *, limit: int, cursor: str = "") -> tuple[list[Session], str]:
        if cursor and not (cursor.isascii() and cursor.isdigit() and len(cursor) <= CURSOR_DIGITS):
            raise InvalidRequest(f"{cursor[:40]!r} is not the cursor of a page of sessions")
        following, found = await self._run("session_page", cursor or "0", limit)
        return as_sessions(found), "" if following == b"0" else text(following)

    async def fail_waiting(
        self, environment: EnvironmentName, message: str, *, for_s: float = 0.0, fence: int = 0
    ) -> int:
        return int(await self._run("fail_waiting", environment, bounded(message), for_s, fence))

    async def own(self, owner: str, *, takes_over: bool = False) -> str:
        self._owner = owner
        return text(await self._run("own", owner, int(takes_over)))

    async def lead(self, replica: str, *, ttl_s: float) -> Lead:
        # Each replica calls this about every second, and so detects a jump of Redis's clock.
        reading_ms = round(self._clock() * 1000)
        self._check()
        clock = (self._clock_name, reading_ms, JUMP_MS, READING_KEPT_MS)
        arguments = (replica, ttl_s, *clock, self._last_fence, self._owner)
        # Urgent: behind a thousand claims the call would be late, and this replica would count as gone.
        answer = await self._link.run("lead", *arguments, urgent=True)
        fence, last, is_whole = (int(number) for number in answer)
        self._last_fence = max(self._last_fence, last)
        return Lead(fence=fence, is_whole=bool(is_whole))

    async def resign(self, replica: str) -> None:
        await self._run("resign", replica)

    async def adopt(self, worker: Worker, sessions: Sequence[Session], *, fence: int) -> list[SessionId]:
        # One script for any number of sessions: until all are registered, the worker seems to have room.
        values = [value for session in sessions for value in session_values(session)]
        held = await self._run("adopt", *worker_values(worker), len(sessions), *values, fence)
        return [SessionId(text(id)) for id in held]

    async def restore(self, sessions: Sequence[Session]) -> list[SessionId]:
        self._check()
        held = await self._link.run_in_batches("restore", items=[session_values(session) for session in sessions])
        return [SessionId(text(id)) for id in held]

    async def rebuilt(self, *, fence: int) -> None:
        await self._run("rebuilt", NOTES_S, fence)

    # -- all ----------------------------------------------------------------------------------------------------

    def notices(self) -> Following[Notice]:
        return self._notices.follow()

    async def ping(self) -> None:
        self._check()
        await self._link.ask("PING")

    async def aclose(self) -> None:
        self._is_open = False
        await self._claims.aclose()
        await self._listener.aclose()
        await self._link.aclose()
        self._notices.close()

    def _check(self) -> None:
        if not self._is_open:
            raise StoreUnavailable("the store is not open")

    async def _run(self, name: str, *arguments: str | float | bytes) -> Any:
        self._check()
        return await self._link.run(name, *arguments)

    def heard(self, channel: str, message: str) -> None:
        if channel == self._wakes:
            self._claims.wake(message)
            return
        kind, _, name = message.partition(":")
        lease, _, id = name.partition(":")
        if kind == "ended":
            self._notices.publish(SessionEnded(SessionId(id), lease))
        elif kind == "wanted":
            self._notices.publish(CapacityWanted(EnvironmentName(name)))

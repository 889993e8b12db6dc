"""The store of many replicas: Redis, where each operation is one Lua script (``lua/``).

Redis' own clock decides every deadline, so replicas need not agree on the time. Scripts derive their keys from one hash
tag, so all of them live in one slot of a cluster. A claim that waits is not polled for: whoever frees a slot assigns it
to the first ticket in the same script and publishes its lease to the replica that waits. In a queue owners take turns,
one opening each; those of one owner keep their order.

The keys are in ``docs/design/store.md``. What a loss of data means is in `recovery`. Scripts use INFO: a Redis with
access lists must allow it.

Tickets of a dead replica are swept a second after their wait is over, by the next look at that queue; `load` looks each
tick.
Channels: ``notices`` (``ended:<id>``, ``wanted:<environment>``) and ``replica:<name>`` (a lease that was settled).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.errors import (
    EnvironmentUnavailable,
    GatewayError,
    PoolExhausted,
    SessionClosed,
    SessionExists,
    SessionNotFound,
    StoreUnavailable,
)
from gateway.core.ids import EnvironmentName, SessionId, WorkerId
from gateway.core.leader_lease import Lead
from gateway.core.session import (
    Activity,
    CapacityWanted,
    CloseReason,
    Session,
    SessionEnded,
    SessionRequest,
    SessionState,
)
from gateway.core.worker import EnvironmentLoad, Worker
from gateway.stores.notifications import Following, Notices
from gateway.stores.redis.client import DRAIN_S, Listener, RedisClient, cancelled, happened
from gateway.stores.redis.records import (
    as_loads,
    as_session,
    as_sessions,
    as_worker,
    packed,
    pairs,
    text,
    texts,
    worker_values,
)
from gateway.stores.redis.recovery import AT_ONCE, RedisRecovery
from gateway.stores.retry_after import bounded, retry_after

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""How often a replica looks whether a message about its waiting claims was lost."""
SUBSCRIBE_S = 5.0
"""The longest that `RedisStore.start` waits for its subscription."""
GRACE_S = 1.0
"""A ticket counts this much longer than its claim waits: a replica that lives leaves by itself, on its own clock."""
GIVE_BACK_S = 10.0
"""How long a claim whose caller is gone is given back again, where Redis did not answer."""
GIVE_BACK_PAUSE_S = 0.25
FAILED_KEPT_S = 60
"""How long a replica has to fetch why its opening failed."""
JUMP_MS = 10_000
"""From here on a difference between two clocks is a jump; commands are late by at most ``redis_link.ANSWER_S``."""
READING_KEPT_MS = 24 * 3_600_000
"""How long the clock of a process that ended is remembered."""


@dataclass(slots=True)
class _Wait:
    """A claim of this replica that has no slot yet."""

    opening: SessionRequest
    until: float
    """Of the event loop's clock."""
    news: asyncio.Event
    queued: bool = False
    """Whether Redis has its ticket: only then does its absence there mean something."""
    asking: asyncio.Task[Any] | None = None
    """The last time that Redis was asked for a slot, which runs to its end whatever becomes of the claim."""


class RedisStore(RedisRecovery):
    """Sessions, workers, leases and deadlines of all replicas; the seam is ``core.ports.Store``."""

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
        """Connect to nothing yet; that is `start`.

        Args:
            url: ``redis://…``, ``rediss://…`` or ``unix://…``; may hold a password, so it is never logged.
            replica: unique to this process among those that share *prefix*.
            prefix: of every key and channel; gateways with different ones do not see each other.
            queue_max: openings that may wait for one environment.
            closed_kept_s: how long it is remembered why a session was closed.
            closing_s: after how long a closing session that nobody released is due again.
            clock: seconds, monotonic; only to notice that Redis' clock jumped.
        """
        self._root = f"{{{prefix}}}"
        self._replica = replica
        self._queue_max = queue_max
        self._closed_kept_s = closed_kept_s
        self._closing_s = closing_s
        self._clock = clock
        self._owner = ""
        # A name per process: readings of a monotonic clock mean nothing to another, even of the same replica.
        self._clock_name = uuid.uuid4().hex
        # The highest that Redis told: a floor for the next one, should Redis lose its data.
        self._last_fence = 0
        self._is_subscribed = asyncio.Event()
        self._link = RedisClient(url, root=self._root)
        self._wakes = f"{self._root}:replica:{replica}"
        self._listener = Listener(
            self._link.client,
            [f"{self._root}:notices", self._wakes],
            heard=self._heard,
            subscribed=self._is_subscribed.set,
        )
        self._notices = Notices()
        self._waits: dict[str, _Wait] = {}
        self._none_waits = asyncio.Event()
        self._stopping = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None
        self._is_open = False

    async def start(self) -> None:
        """Load the scripts and open the subscription.

        Raises:
            StoreUnavailable: Redis does not answer; nothing is left open.
        """
        try:
            await self._link.load()
            self._listener.start()
            self._poller = asyncio.get_running_loop().create_task(self._poll())
            if not await happened(self._is_subscribed, timeout_s=SUBSCRIBE_S):
                raise StoreUnavailable("the store does not answer")
        except BaseException:
            await self.aclose()
            raise
        self._is_open = True

    # -- the request path ---------------------------------------------------------------------------------------

    async def claim(self, opening: SessionRequest, *, wait_s: float) -> Session:
        self._check()
        wait = _Wait(opening, asyncio.get_running_loop().time() + wait_s, asyncio.Event())
        # Known before Redis is asked: the grant may be published before the answer is read.
        self._waits[opening.lease] = wait
        self._none_waits.clear()
        try:
            answer = await self._asked(wait, wait_s)
            if answer[0] == b"waiting":
                answer = await self._waited(wait)
        except BaseException:  # the trainer hung up, or an answer was lost: whatever Redis did is undone
            await asyncio.shield(self._link.detach(self._give_back(wait)))
            raise
        finally:
            del self._waits[opening.lease]
            if not self._waits:
                self._none_waits.set()
        return _granted(opening, answer)

    async def opened(self, id: SessionId, lease: str, *, handle: str = "") -> Session:
        kind, *rest = await self._run("opened", id, lease, handle)
        if kind == b"unknown":
            raise SessionNotFound(f"no session {id} of this lease")
        if kind == b"closed":
            raise SessionClosed(CloseReason(text(rest[0])))
        return as_session(pairs(rest[0]))

    async def rebind(self, id: SessionId, lease: str, *, was: str, handle: str) -> bool:
        return bool(await self._run("rebind", id, lease, was, handle))

    async def find(self, id: SessionId) -> Session:
        self._check()
        found = pairs(await self._link.run("find", id))
        if not found:
            raise SessionNotFound(f"no session {id}")
        if found["state"] == SessionState.CLOSED:
            raise SessionClosed(CloseReason(found["reason"]))
        return as_session(found)

    async def touch(self, notes: Sequence[Activity]) -> list[SessionId]:
        gone: list[SessionId] = []
        for start in range(0, len(notes), AT_ONCE):
            arguments = [value for note in notes[start : start + AT_ONCE] for value in (note.id, note.quiet_s)]
            gone += [SessionId(text(id)) for id in await self._run("touch", *arguments)]
        return gone

    async def count_turn(self, id: SessionId, lease: str, *, key: str = "") -> int:
        kind, *rest = await self._run("count_turn", id, lease, key)
        if kind == b"unknown":
            raise SessionNotFound(f"no open session {id} of this lease")
        if kind == b"closed":
            raise SessionClosed(CloseReason(text(rest[0])))
        return int(rest[0])

    async def begin_close(self, id: SessionId, reason: CloseReason, *, lease: str = "") -> Session | None:
        answer = await self._run("begin_close", id, reason, self._closing_s, lease)
        return None if answer is None else as_session(pairs(answer))

    async def release(self, id: SessionId, lease: str) -> bool:
        return bool(await self._run("release", id, lease, self._closed_kept_s))

    async def hand_over(self, id: SessionId, lease: str, opening: SessionRequest) -> Session | None:
        kind, *rest = await self._run("hand_over", *self._ticket(opening), id, lease, self._closed_kept_s)
        if kind == b"exists":
            raise SessionExists(f"session {opening.id} exists")
        return None if kind == b"none" else as_session(pairs(rest[0]))

    # -- the control loop ---------------------------------------------------------------------------------------

    async def late(self, limit: int) -> list[Session]:
        return as_sessions(await self._run("late", limit))

    async def expire(self, ids: Sequence[SessionId]) -> list[Session]:
        expired: list[Session] = []
        for start in range(0, len(ids), AT_ONCE):
            expired += as_sessions(await self._run("expire", self._closing_s, *ids[start : start + AT_ONCE]))
        return expired

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

    async def fail_waiting(self, environment: EnvironmentName, message: str, *, fence: int = 0) -> int:
        return int(await self._run("fail_waiting", environment, bounded(message), FAILED_KEPT_S, fence))

    async def open_breaker(self, environment: EnvironmentName, message: str, *, for_s: float, fence: int = 0) -> None:
        await self._run("open_breaker", environment, bounded(message), for_s, FAILED_KEPT_S, fence)

    async def own(self, owner: str, *, takes_over: bool = False) -> str:
        self._owner = owner
        return text(await self._run("own", owner, int(takes_over)))

    async def lead(self, replica: str, *, ttl_s: float) -> Lead:
        # Each replica calls this every second or so, which is when a jump of Redis' clock is noticed.
        reading_ms = round(self._clock() * 1000)
        self._check()
        clock = (self._clock_name, reading_ms, JUMP_MS, READING_KEPT_MS)
        arguments = (replica, ttl_s, *clock, self._last_fence, self._owner)
        # Urgent: behind a thousand claims it would come too late, and this replica would be taken for gone.
        answer = await self._link.run("lead", *arguments, urgent=True)
        fence, last, is_whole = (int(number) for number in answer)
        self._last_fence = max(self._last_fence, last)
        return Lead(fence=fence, is_whole=bool(is_whole))

    async def resign(self, replica: str) -> None:
        await self._run("resign", replica)

    # -- all ----------------------------------------------------------------------------------------------------

    def notices(self) -> Following:
        return self._notices.follow()

    async def ping(self) -> None:
        self._check()
        await self._link.ask("PING")

    async def aclose(self) -> None:
        self._is_open = False
        self._stopping.set()
        for wait in self._waits.values():
            wait.news.set()
        if self._waits:
            await happened(self._none_waits, timeout_s=DRAIN_S)
        await self._listener.aclose()
        if self._poller is not None:
            await cancelled([self._poller])
        await self._link.aclose()
        self._notices.close()

    def _check(self) -> None:
        if not self._is_open:
            raise StoreUnavailable("the store is not open")

    async def _run(self, name: str, *arguments: str | float) -> Any:
        self._check()
        return await self._link.run(name, *arguments)

    # -- waiting ------------------------------------------------------------------------------------------------

    def _ticket(self, opening: SessionRequest) -> tuple[str | float, ...]:
        """The values of ``OPENING`` in ``lua/shared/waiting.lua``."""
        return (
            opening.id,
            opening.name,
            opening.owner,
            opening.environment,
            opening.lease,
            opening.fingerprint,
            opening.idle_s,
            opening.setup_s,
            opening.task,
            self._replica,
            opening.episode,
            opening.policy,
            opening.group,
            opening.group_size,
            opening.together_s,
            int(opening.is_use),
        )

    async def _asked(self, wait: _Wait, wait_s: float) -> list[Any]:
        """Ask for a slot, or a place in the queue for *wait_s*; what ``claim.lua`` answers."""
        kept_s = wait_s + GRACE_S if wait_s > 0 else 0
        wait.asking = self._link.begin("claim", *self._ticket(wait.opening), kept_s, self._queue_max)
        answer: list[Any] = await asyncio.shield(wait.asking)
        return answer

    async def _waited(self, wait: _Wait) -> list[Any]:
        """Wait for news of a ticket until its time is over; what ``settle.lua`` answers then.

        Redis may go away meanwhile: the poll wakes a claim once Redis is back, and one whose ticket was lost queues
        anew, behind those that did so before it.
        """
        opening = wait.opening
        wait.queued = True
        loop = asyncio.get_running_loop()
        while True:
            await happened(wait.news, timeout_s=wait.until - loop.time())
            # Cleared before Redis is asked: what is published from here on is news.
            wait.news.clear()
            if self._stopping.is_set():
                raise StoreUnavailable("the store is closed")
            late = loop.time() >= wait.until
            try:
                answer: list[Any] = await self._link.run(
                    "settle", opening.id, opening.environment, opening.owner, opening.lease, int(late)
                )
                if answer[0] == b"unknown" and not late:
                    answer = await self._asked(wait, wait.until - loop.time())
            except StoreUnavailable:
                if late:
                    raise
                continue
            if answer[0] != b"waiting":
                return answer

    async def _give_back(self, wait: _Wait) -> None:
        """Undo a claim; the caller, which is gone or has its error, waits for the first try only.

        If Redis does not answer for `GIVE_BACK_S`, the ticket's deadline does it, or the session's.
        """
        if wait.asking is not None:
            await asyncio.wait({wait.asking})
        if not await self._given_back(wait.opening):
            self._link.detach(self._give_back_later(wait.opening))

    async def _give_back_later(self, opening: SessionRequest) -> None:
        """Ask again: what has the claim's lease is the claim's, so it may be given back twice."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + GIVE_BACK_S
        while loop.time() < deadline and not await happened(self._stopping, timeout_s=GIVE_BACK_PAUSE_S):
            if await self._given_back(opening):
                return
        logger.warning("claim_not_given_back session=%s setup_s=%.0f", opening.id, opening.setup_s)

    async def _given_back(self, opening: SessionRequest) -> bool:
        """Try to undo a claim; False: Redis did not answer."""
        try:
            await self._link.run("give_back", opening.id, opening.environment, opening.owner, opening.lease)
        except StoreUnavailable:
            return False
        return True

    async def _poll(self) -> None:
        while not await happened(self._stopping, timeout_s=POLL_S):
            await self._look()

    async def _look(self) -> None:
        """Wake every claim whose ticket is gone, in case the message was lost."""
        queued = [(wait.opening.id, lease) for lease, wait in self._waits.items() if wait.queued]
        for start in range(0, len(queued), AT_ONCE):
            try:
                settled = await self._link.run(
                    "not_waiting", *(value for pair in queued[start : start + AT_ONCE] for value in pair)
                )
            except StoreUnavailable:
                # Those that wait go on: their tickets may still be there when Redis is back.
                return
            for lease in settled:
                self._wake(text(lease))

    def _heard(self, channel: str, message: str) -> None:
        if channel == self._wakes:
            self._wake(message)
            return
        kind, _, name = message.partition(":")
        lease, _, id = name.partition(":")
        if kind == "ended":
            self._notices.publish(SessionEnded(SessionId(id), lease))
        elif kind == "wanted":
            self._notices.publish(CapacityWanted(EnvironmentName(name)))

    def _wake(self, lease: str) -> None:
        if (wait := self._waits.get(lease)) is not None:
            wait.news.set()


def _granted(opening: SessionRequest, answer: list[Any]) -> Session:
    """Read what claim.lua or settle.lua answered: the session, or the error to raise."""
    kind, *rest = answer
    if kind == b"granted":
        return as_session(pairs(rest[0]))
    raise _refusal(text(kind), opening, rest)


def _refusal(kind: str, opening: SessionRequest, rest: list[Any]) -> GatewayError:
    environment = opening.environment
    match kind:
        case "exists":
            return SessionExists(f"session {opening.id} exists")
        case "broken" | "failed":
            return EnvironmentUnavailable(text(rest[1]), retry_after_s=int(rest[0]) / 1000)
        case "full":
            message = f"no slot of {environment} is free, and {int(rest[0])} wait for one"
            rest = rest[1:]
        case "lost":
            message = f"the slot of {environment} was lost before it could be used"
        case _:  # left, unknown
            message = f"no slot of {environment} became free in time"
    place, pace_ms = rest
    return PoolExhausted(message, retry_after_s=retry_after(int(place), float(pace_ms) / 1000 if pace_ms else None))

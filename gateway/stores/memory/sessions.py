"""Implements the store of a one-process gateway in dictionaries, which end with the process.

No method awaits between reading and writing, so each is atomic on the event loop. Only `claim` waits, for a ticket that
another step settles. The constructor's clock (seconds, monotonic) gives the time. The event loop bounds the wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from gateway.core.broadcast import Broadcast, Following
from gateway.core.errors import (
    NotLeading,
    SessionClosed,
    SessionExists,
    SessionNotFound,
    StoreUnavailable,
)
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.leader_lease import Lead
from gateway.core.session import (
    BY_TRAINER,
    Activity,
    CapacityWanted,
    CloseReason,
    Notice,
    Session,
    SessionEnded,
    SessionRequest,
    SessionState,
)
from gateway.core.worker import EnvironmentLoad, Worker, WorkerState
from gateway.stores.memory import recovery
from gateway.stores.memory.slots import Slots
from gateway.stores.retry_after import bounded


class MemoryStore:
    """Sessions, workers, leases and deadlines of one process; implements ``core.ports.store.Store``.

    The store ends with its process, so no leader outlives its fences and no older state returns. Only tests of the
    code that rebuilds a store use a store that is not whole.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        queue_max: int = 10_000,
        closed_kept_s: float = 600.0,
        closing_s: float = 60.0,
        is_whole: bool = True,
    ) -> None:
        """Create an empty store. The arguments are those of `RedisStore`; *is_whole* is False in recovery tests."""
        self._clock = clock
        self._closing_s = closing_s
        self._notices: Broadcast[Notice] = Broadcast()
        self._slots = Slots(self._notices, queue_max=queue_max, closed_kept_s=closed_kept_s, is_whole=is_whole)
        self._owner = ""
        self._leader = ""
        self._leads_until = 0.0
        self._fence = 0
        self._is_closed = False

    async def start(self) -> None:
        """Do nothing; the Redis store connects here."""

    # -- the request path ---------------------------------------------------------------------------------------

    async def claim(self, opening: SessionRequest, *, wait_s: float) -> Session:
        ticket = self._slots.enter(opening, wait_s, self._now())
        try:
            if not ticket.settled.done():
                await asyncio.wait({ticket.settled}, timeout=wait_s)
        except BaseException:  # the trainer hung up
            self._slots.give_back(ticket, self._clock())
            raise
        return self._slots.taken(ticket, self._clock())

    async def pace(self, owner: Owner, *, per_s: float, within_s: float) -> float:
        return self._slots.owners.book(owner, self._now(), per_s=per_s, within_s=within_s)

    async def opened(self, id: SessionId, lease: str, *, handle: str = "", scorer: str = "") -> Session:
        now = self._now()
        session = self._of_lease(id, lease)
        if session.state is SessionState.OPENING or not session.handle:
            session = replace(session, state=SessionState.OPEN, handle=handle, scorer=session.scorer or scorer)
            self._slots.sessions[id] = session
        self._slots.deadlines.set(id, now + session.idle_s)
        return session

    async def rebind(self, id: SessionId, lease: str, *, was: str, handle: str) -> bool:
        self._now()
        session = self._slots.sessions.get(id)
        if session is None or session.lease != lease:
            self._check_whole()
            return False
        if session.state is not SessionState.OPEN or session.handle != was:
            return False
        self._slots.sessions[id] = replace(session, handle=handle)
        return True

    async def find(self, id: SessionId) -> Session:
        self._now()
        if (session := self._slots.sessions.get(id)) is not None:
            return session
        self._check_whole()
        if (closed := self._slots.closed.get(id)) is not None:
            raise SessionClosed(closed.reason, result=closed.result)
        raise SessionNotFound(f"no session {id}")

    async def touch(self, notes: Sequence[Activity]) -> list[SessionId]:
        now = self._now()
        gone = []
        for note in notes:
            session = self._slots.sessions.get(note.id)
            if session is None or session.state is not SessionState.OPEN:
                gone.append(note.id)
                continue
            deadline = now - max(0.0, note.quiet_s) + session.idle_s
            if deadline > self._slots.deadlines.at(note.id):
                self._slots.deadlines.set(note.id, deadline)
        if gone:
            self._check_whole()
        return gone

    async def count_turn(self, id: SessionId, lease: str, *, key: str = "") -> int:
        self._now()
        session = self._slots.sessions.get(id)
        if session is not None and session.lease == lease and session.reason in BY_TRAINER:
            raise SessionNotFound(f"session {id} was ended by its trainer")
        if self._of_lease(id, lease).state is not SessionState.OPEN:
            raise SessionNotFound(f"session {id} is not open yet")
        count, last = self._slots.turns.get(id, (0, ""))
        if not key or key != last:
            count += 1
            self._slots.turns[id] = count, key
        return count

    async def note_late(self, id: SessionId, lease: str, steps: int) -> None:
        self._note(id, lease, steps_before_late=steps)

    async def note_result(self, id: SessionId, lease: str, result: str) -> None:
        self._note(id, lease, result=result)

    def _note(self, id: SessionId, lease: str, **values: Any) -> None:
        self._now()
        session = self._slots.sessions.get(id)
        if session is not None and session.lease == lease and session.state is SessionState.OPEN:
            self._slots.sessions[id] = replace(session, **values)

    async def begin_close(self, id: SessionId, reason: CloseReason, *, lease: str = "") -> Session | None:
        now = self._now()
        session = self._slots.sessions.get(id)
        if session is None or lease not in ("", session.lease):
            self._check_whole()
            return None
        return None if session.state is SessionState.CLOSING else self._closing(session, reason, now)

    async def release(self, id: SessionId, lease: str) -> bool:
        now = self._now()
        session = self._slots.sessions.get(id)
        if session is None or session.lease != lease or session.state is not SessionState.CLOSING:
            return False
        self._slots.forget(session, session.reason, now)
        self._slots.free(session, now)
        return True

    async def keep_reply(self, id: SessionId, reply: bytes) -> None:
        self._slots.keep_reply(id, reply, self._now())

    async def kept_reply(self, id: SessionId) -> bytes | None:
        self._now()
        if (kept := self._slots.replies.get(id)) is not None:
            return kept[0]
        self._check_whole()
        return None

    async def hand_over(self, id: SessionId, lease: str, opening: SessionRequest) -> Session | None:
        now = self._now()
        slots = self._slots
        session = slots.sessions.get(id)
        if session is None or session.lease != lease or session.state is not SessionState.CLOSING:
            return None
        held = slots.workers[session.worker]
        if held.worker.state is not WorkerState.READY or held.worker.environment != opening.environment:
            return None
        if len(held.sessions) > held.worker.slots:  # the worker was limited: the slot ends with its session
            return None
        if session.owner != opening.owner and slots.owners.room(opening) < 1:
            return None
        if opening.id != id and (opening.id in slots.sessions or opening.id in slots.tickets):
            raise SessionExists(f"session {opening.id} exists")
        slots.forget(session, session.reason, now)
        held.sessions.remove(id)
        granted = slots.grant(opening, held, now)
        if session.owner != opening.owner:
            slots.serve_owners({session.owner}, now)
        if opening.group:
            slots.serve(opening.environment, now)  # its group's reservation may have shrunk
        return granted

    # -- the control loop ---------------------------------------------------------------------------------------

    async def late(self, limit: int) -> list[Session]:
        return self._late(limit, self._now(), is_open=True)

    async def expire(self, ids: Sequence[SessionId]) -> list[Session]:
        now = self._now()
        if not self._slots.is_whole:
            return []
        found = [self._slots.sessions[id] for id in ids if id in self._slots.sessions]
        late = [s for s in found if s.state is SessionState.OPEN and self._slots.deadlines.at(s.id) <= now]
        return [self._closing(session, CloseReason.EXPIRED, now) for session in late]

    async def due(self, limit: int) -> list[Session]:
        now = self._now()
        late = self._late(limit, now, is_open=False)
        return [self._closing(session, session.reason or CloseReason.OPEN_FAILED, now) for session in late]

    async def add_worker(self, worker: Worker, *, fence: int = 0) -> None:
        now = self._now(fence)
        if worker.id not in self._slots.workers:
            self._slots.enlist(worker, now)
            self._slots.serve(worker.environment, now)

    async def worker_ready(self, id: WorkerId, address: str, *, slots: int = 0) -> bool:
        now = self._now()
        held = self._slots.workers.get(id)
        if held is None or held.worker.state is not WorkerState.STARTING:
            return False
        slots = slots if slots > 0 else held.worker.slots
        worker = replace(held.worker, state=WorkerState.READY, address=address, slots=slots)
        self._slots.make_ready(held, worker, now)
        return True

    async def wake_worker(self, id: WorkerId) -> bool:
        now = self._now()
        held = self._slots.workers.get(id)
        if held is None or held.worker.state not in (WorkerState.PAUSED, WorkerState.SUSPECT):
            return False
        self._slots.make_ready(held, replace(held.worker, state=WorkerState.READY), now)
        return True

    async def pause_worker(self, id: WorkerId, *, fence: int = 0) -> bool:
        self._now(fence)
        held = self._slots.workers.get(id)
        if held is None:
            return False
        if held.worker.state is WorkerState.READY and not held.sessions and self._slots.is_whole:
            held.become(WorkerState.PAUSED)
        return held.worker.state is WorkerState.PAUSED

    async def suspect_worker(self, id: WorkerId) -> bool:
        self._now()
        held = self._slots.workers.get(id)
        if held is None:
            return False
        if held.worker.state is WorkerState.READY:
            held.become(WorkerState.SUSPECT)
            self._notices.publish(CapacityWanted(held.worker.environment))
        return held.worker.state is WorkerState.SUSPECT

    async def limit_worker(self, id: WorkerId, slots: int) -> None:
        self._now()
        held = self._slots.workers.get(id)
        slots = max(1, slots)
        if held is None or slots >= held.worker.slots:
            return
        held.worker = replace(held.worker, slots=slots)
        self._want_for_waiting(held.worker.environment)

    async def drain_worker(self, id: WorkerId, *, only_if_idle: bool = False, fence: int = 0) -> bool:
        self._now(fence)
        held = self._slots.workers.get(id)
        if held is None:
            return False
        if held.worker.state is not WorkerState.DRAINING:
            if only_if_idle and (held.sessions or not self._slots.is_whole):
                return False
            self._slots.drain(held)
        return True

    async def remove_worker(self, id: WorkerId, reason: CloseReason, *, fence: int = 0) -> list[Session] | None:
        now = self._now(fence)
        held = self._slots.workers.get(id)
        if held is None:
            return None
        self._slots.delist(held)
        ended = []
        for session in [self._slots.sessions[id] for id in held.sessions]:
            # A closing session keeps its reason: a session that its trainer deleted is "not found".
            closed = replace(session, state=SessionState.CLOSED, reason=session.reason or reason)
            self._slots.forget(session, closed.reason, now)
            self._notices.publish(SessionEnded(session.id, session.lease))
            ended.append(closed)
        self._slots.serve_owners({session.owner for session in ended}, now)
        self._want_for_waiting(held.worker.environment)
        return ended

    async def worker(self, id: WorkerId) -> Worker | None:
        self._now()
        held = self._slots.workers.get(id)
        return None if held is None else held.worker

    async def load(self) -> Mapping[EnvironmentName, EnvironmentLoad]:
        return self._slots.load(self._now())

    async def sessions(self, *, limit: int = 1000) -> list[Session]:
        self._now()
        return list(islice(self._slots.sessions.values(), limit))

    async def session_page(self, *, limit: int, cursor: str = "") -> tuple[list[Session], str]:
        self._now()
        ids = sorted(id for id in self._slots.sessions if id > cursor)
        page = [self._slots.sessions[id] for id in ids[:limit]]
        return page, page[-1].id if len(ids) > limit else ""

    async def fail_waiting(
        self, environment: EnvironmentName, message: str, *, for_s: float = 0.0, fence: int = 0
    ) -> int:
        now = self._now(fence)
        message = bounded(message)
        if for_s > 0:
            self._slots.queues[environment].open_breaker(message, now + for_s)
        return self._slots.fail_waiting(environment, message, retry_after_s=for_s)

    # -- leading and recovery -----------------------------------------------------------------------------------

    async def own(self, owner: str, *, takes_over: bool = False) -> str:
        now = self._now()
        if not self._owner or (takes_over and now >= self._leads_until):
            self._owner = owner
        return self._owner

    async def lead(self, replica: str, *, ttl_s: float) -> Lead:
        now = self._now()
        leads = now < self._leads_until
        if leads and self._leader != replica:
            return Lead(fence=0, is_whole=self._slots.is_whole)
        if not leads:
            self._fence += 1
        self._leader, self._leads_until = replica, now + ttl_s
        return Lead(fence=self._fence, is_whole=self._slots.is_whole)

    async def resign(self, replica: str) -> None:
        if self._leader == replica:
            self._leads_until = 0.0

    async def adopt(self, worker: Worker, sessions: Sequence[Session], *, fence: int) -> list[SessionId]:
        return recovery.adopt(self._slots, worker, sessions, self._now(fence))

    async def restore(self, sessions: Sequence[Session]) -> list[SessionId]:
        return recovery.restore(self._slots, sessions, self._now())

    async def rebuilt(self, *, fence: int) -> None:
        recovery.finish(self._slots, self._notices, self._now(fence))

    # -- all ----------------------------------------------------------------------------------------------------

    def notices(self) -> Following[Notice]:
        return self._notices.follow()

    async def ping(self) -> None:
        self._now()

    async def aclose(self) -> None:
        self._is_closed = True
        for ticket in list(self._slots.tickets.values()):
            self._slots.settle(ticket, StoreUnavailable("the store is closed"))
        self._notices.close()

    def _now(self, fence: int = 0) -> float:
        """Drop expired entries, and return the current time.

        Raises:
            StoreUnavailable: The store is closed.
            NotLeading: *fence* belongs to an earlier lead. A fence of 0 is not checked.
        """
        if self._is_closed:
            raise StoreUnavailable("the store is closed")
        now = self._clock()
        self._slots.tidy(now)
        if 0 < fence < self._fence:
            raise NotLeading("another replica leads the control loop by now")
        return now

    def _check_whole(self) -> None:
        """Raise ``StoreUnavailable`` while the store is being rebuilt, because a missing entry may be lost data."""
        if not self._slots.is_whole:
            raise StoreUnavailable("the store is being rebuilt")

    def _of_lease(self, id: SessionId, lease: str) -> Session:
        """Return the opening or open session of *lease*. Raise ``SessionNotFound`` or ``SessionClosed`` without one."""
        session = self._slots.sessions.get(id) or self._slots.closed.get(id)
        if session is None or session.lease != lease:
            self._check_whole()
            raise SessionNotFound(f"no session {id} of this lease")
        if session.reason is not None:
            raise SessionClosed(session.reason)
        assert isinstance(session, Session), "a closed one has a reason"
        return session

    def _closing(self, session: Session, reason: CloseReason, now: float) -> Session:
        session = self._slots.sessions[session.id] = replace(session, state=SessionState.CLOSING, reason=reason)
        self._slots.deadlines.set(session.id, now + self._closing_s)
        self._notices.publish(SessionEnded(session.id, session.lease))
        return session

    def _late(self, limit: int, now: float, *, is_open: bool) -> list[Session]:
        """List up to *limit* sessions past their deadline, earliest first: open sessions, or all other ones."""
        slots = self._slots
        passed: list[tuple[SessionId, float]] = []
        late: list[Session] = []
        while slots.is_whole and len(late) < limit and (entry := slots.deadlines.pop(now)) is not None:
            passed.append(entry)
            session = slots.sessions[entry[0]]
            if (session.state is SessionState.OPEN) == is_open:
                late.append(session)
        for id, deadline in passed:
            slots.deadlines.set(id, deadline)
        return late

    def _want_for_waiting(self, environment: EnvironmentName) -> None:
        if self._slots.queues[environment]:
            self._notices.publish(CapacityWanted(environment))

"""The store of a gateway that is one process: everything in dictionaries, gone with it.

No method awaits between reading and writing, so each is atomic on the event loop; only `claim` waits, for a ticket that
others settle. Time is the clock handed in (seconds, monotonic), but for the wait itself, which the event loop bounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from gateway.core.errors import (
    SessionClosed,
    SessionExists,
    SessionNotFound,
    StoreUnavailable,
)
from gateway.core.ids import EnvironmentName, SessionId, WorkerId
from gateway.core.session import (
    Activity,
    CapacityWanted,
    CloseReason,
    Session,
    SessionEnded,
    SessionRequest,
    SessionState,
)
from gateway.core.worker import EnvironmentLoad, Worker, WorkerState
from gateway.stores.memory.records import MemoryTurns
from gateway.stores.memory.recovery import MemoryRecovery
from gateway.stores.notifications import Following
from gateway.stores.retry_after import bounded


class MemoryStore(MemoryRecovery):
    """Sessions, workers, leases and deadlines of one process; the seam is ``core.ports.Store``."""

    async def start(self) -> None:
        """Do nothing; the Redis store connects here."""

    # -- the request path ---------------------------------------------------------------------------------------

    async def claim(self, opening: SessionRequest, *, wait_s: float) -> Session:
        ticket = self._enter(opening, wait_s)
        try:
            if not ticket.settled.done():
                await asyncio.wait({ticket.settled}, timeout=wait_s)
        except BaseException:  # the trainer hung up
            self._give_back(ticket)
            raise
        return self._taken(ticket)

    async def opened(self, id: SessionId, lease: str, *, handle: str = "") -> Session:
        now = self._tidied()
        session = self._sessions.get(id)
        if session is None or session.lease != lease:
            closed = self._closed.get(id)
            if session is None and closed is not None and closed.lease == lease:
                raise SessionClosed(closed.reason)
            self._leadership.check_whole()
            raise SessionNotFound(f"no session {id} of this lease")
        if session.state is SessionState.CLOSING:
            raise SessionClosed(session.reason or CloseReason.OPEN_FAILED)
        if session.state is SessionState.OPENING or not session.handle:
            session = self._sessions[id] = replace(session, state=SessionState.OPEN, handle=handle)
        self._deadlines.set(id, now + session.idle_s)
        return session

    async def rebind(self, id: SessionId, lease: str, *, was: str, handle: str) -> bool:
        self._tidied()
        session = self._sessions.get(id)
        if session is None or session.lease != lease:
            self._leadership.check_whole()
            return False
        if session.state is not SessionState.OPEN:
            return False
        if session.handle != was:
            return False
        self._sessions[id] = replace(session, handle=handle)
        return True

    async def find(self, id: SessionId) -> Session:
        self._tidied()
        if (session := self._sessions.get(id)) is not None:
            return session
        self._leadership.check_whole()
        if (closed := self._closed.get(id)) is not None:
            raise SessionClosed(closed.reason)
        raise SessionNotFound(f"no session {id}")

    async def touch(self, notes: Sequence[Activity]) -> list[SessionId]:
        now = self._tidied()
        gone = []
        for note in notes:
            session = self._sessions.get(note.id)
            if session is None or session.state is not SessionState.OPEN:
                gone.append(note.id)
                continue
            deadline = now - max(0.0, note.quiet_s) + session.idle_s
            if deadline > self._deadlines.at(note.id):
                self._deadlines.set(note.id, deadline)
        if gone:
            self._leadership.check_whole()
        return gone

    async def count_turn(self, id: SessionId, lease: str, *, key: str = "") -> int:
        self._tidied()
        session = self._sessions.get(id) or self._closed.get(id)
        if session is None or session.lease != lease:
            self._leadership.check_whole()
        if session is None or session.lease != lease:
            raise SessionNotFound(f"no open session {id} of this lease")
        if session.reason is not None and session.reason.is_trainers:
            raise SessionNotFound(f"session {id} was ended by its trainer")
        if session.reason is not None:
            raise SessionClosed(session.reason)
        if isinstance(session, Session) and session.state is not SessionState.OPEN:
            raise SessionNotFound(f"session {id} is not open yet")
        turns = self._turns.setdefault(id, MemoryTurns())
        if not key or key != turns.key:
            turns.count += 1
            turns.key = key
        return turns.count

    async def begin_close(self, id: SessionId, reason: CloseReason, *, lease: str = "") -> Session | None:
        now = self._tidied()
        session = self._sessions.get(id)
        if session is None or lease not in ("", session.lease):
            self._leadership.check_whole()
            return None
        return None if session.state is SessionState.CLOSING else self._closing(session, reason, now)

    async def release(self, id: SessionId, lease: str) -> bool:
        now = self._tidied()
        session = self._sessions.get(id)
        if session is None or session.lease != lease or session.state is not SessionState.CLOSING:
            return False
        self._forget(session, session.reason, now)
        self._free(session, now)
        return True

    async def hand_over(self, id: SessionId, lease: str, opening: SessionRequest) -> Session | None:
        now = self._tidied()
        session = self._sessions.get(id)
        if session is None or session.lease != lease or session.state is not SessionState.CLOSING:
            return None
        held = self._workers[session.worker]
        if held.worker.state is not WorkerState.READY or held.worker.environment != opening.environment:
            return None
        if len(held.sessions) > held.worker.slots:  # it was limited: the slot goes with its session
            return None
        if opening.id != id and (opening.id in self._sessions or self._admission.holds(opening.id)):
            raise SessionExists(f"session {opening.id} exists")
        self._forget(session, session.reason, now)
        held.sessions.remove(id)
        granted = self._grant(opening, held, now)
        if opening.group:
            self._serve(opening.environment, now)  # what was reserved for it is free
        return granted

    # -- the control loop ---------------------------------------------------------------------------------------

    async def late(self, limit: int) -> list[Session]:
        now = self._tidied()
        if not self._leadership.is_whole:
            return []
        passed: list[tuple[SessionId, float]] = []
        late: list[Session] = []
        while len(late) < limit and (entry := self._deadlines.pop(now)) is not None:
            passed.append(entry)
            session = self._sessions[entry[0]]
            if session.state is SessionState.OPEN:
                late.append(session)
        for id, deadline in passed:
            self._deadlines.set(id, deadline)
        return late

    async def expire(self, ids: Sequence[SessionId]) -> list[Session]:
        now = self._tidied()
        if not self._leadership.is_whole:
            return []
        found = [self._sessions[id] for id in ids if id in self._sessions]
        late = [s for s in found if s.state is SessionState.OPEN and self._deadlines.at(s.id) <= now]
        return [self._closing(session, CloseReason.EXPIRED, now) for session in late]

    async def due(self, limit: int) -> list[Session]:
        now = self._tidied()
        if not self._leadership.is_whole:
            return []
        spared: list[tuple[SessionId, float]] = []
        late: list[Session] = []
        while len(late) < limit and (entry := self._deadlines.pop(now)) is not None:
            session = self._sessions[entry[0]]
            if session.state is SessionState.OPEN:
                spared.append(entry)
            else:
                late.append(session)
        for id, deadline in spared:
            self._deadlines.set(id, deadline)
        return [self._closing(session, session.reason or CloseReason.OPEN_FAILED, now) for session in late]

    async def add_worker(self, worker: Worker, *, fence: int = 0) -> None:
        now = self._tidied()
        self._leadership.check(fence)
        if worker.id not in self._workers:
            self._enlist(worker, now)
            self._serve(worker.environment, now)

    async def worker_ready(self, id: WorkerId, address: str, *, slots: int = 0) -> bool:
        now = self._tidied()
        held = self._workers.get(id)
        if held is None or held.worker.state is not WorkerState.STARTING:
            return False
        slots = slots if slots > 0 else held.worker.slots
        held.worker = replace(held.worker, state=WorkerState.READY, address=address, slots=slots)
        held.idle_since = now
        self._admission.close_breaker(held.worker.environment)
        self._serve(held.worker.environment, now)
        return True

    async def limit_worker(self, id: WorkerId, slots: int) -> None:
        self._tidied()
        held = self._workers.get(id)
        slots = max(1, slots)
        if held is None or slots >= held.worker.slots:
            return
        held.worker = replace(held.worker, slots=slots)
        if self._admission.waiting(held.worker.environment):
            self._notices.publish(CapacityWanted(held.worker.environment))

    async def drain_worker(self, id: WorkerId, *, only_if_idle: bool = False, fence: int = 0) -> bool:
        self._tidied()
        self._leadership.check(fence)
        held = self._workers.get(id)
        if held is None:
            return False
        if held.worker.state is not WorkerState.DRAINING:
            if only_if_idle and (held.sessions or not self._leadership.is_whole):
                return False
            self._drain(held)
        return True

    async def remove_worker(self, id: WorkerId, reason: CloseReason, *, fence: int = 0) -> list[Session] | None:
        now = self._tidied()
        self._leadership.check(fence)
        held = self._workers.pop(id, None)
        if held is None:
            return None
        environment = held.worker.environment
        del self._by_environment[environment][id]
        if not self._by_environment[environment]:
            del self._by_environment[environment]
        ended = []
        for session in [self._sessions[id] for id in held.sessions]:
            # What was closing for another reason keeps it: a session that its trainer deleted is not found.
            closed = replace(session, state=SessionState.CLOSED, reason=session.reason or reason)
            self._forget(session, closed.reason, now)
            self._notices.publish(SessionEnded(session.id, session.lease))
            ended.append(closed)
        if self._admission.waiting(environment):
            self._notices.publish(CapacityWanted(environment))
        return ended

    async def worker(self, id: WorkerId) -> Worker | None:
        self._tidied()
        held = self._workers.get(id)
        return None if held is None else held.worker

    async def load(self) -> Mapping[EnvironmentName, EnvironmentLoad]:
        now = self._tidied()
        for name in self._groups.environments() | self._admission.environments():
            self._serve(name, now)  # a group may have waited for long enough
        return {
            name: EnvironmentLoad(
                workers=tuple(self._worker_load(held, now) for held in self._by_environment.get(name, {}).values()),
                waiting=self._admission.waiting(name),
                to_come=self._groups.to_come(name),
                arrivals=self._admission.arrivals[name],
                hits=self._admission.hits[name],
                broken_s=self._admission.broken(name, now)[1],
            )
            for name in self._by_environment.keys() | self._admission.environments()
        }

    async def sessions(self, *, limit: int = 1000) -> list[Session]:
        self._tidied()
        return list(islice(self._sessions.values(), limit))

    async def fail_waiting(self, environment: EnvironmentName, message: str, *, fence: int = 0) -> int:
        self._tidied()
        self._leadership.check(fence)
        return self._fail_all(environment, bounded(message))

    async def open_breaker(self, environment: EnvironmentName, message: str, *, for_s: float, fence: int = 0) -> None:
        now = self._tidied()
        self._leadership.check(fence)
        message = bounded(message)
        self._admission.open_breaker(environment, message, now + for_s)
        self._fail_all(environment, message, retry_after_s=for_s)

    # -- all ----------------------------------------------------------------------------------------------------

    def notices(self) -> Following:
        return self._notices.follow()

    async def ping(self) -> None:
        self._tidied()

    async def aclose(self) -> None:
        self._is_closed = True
        for ticket in self._admission.all():
            self._settle(ticket, StoreUnavailable("the store is closed"))
        self._notices.close()

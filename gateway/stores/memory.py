"""The store of a gateway that is one process: everything in dictionaries, gone with it.

No method awaits between reading and writing, so each is atomic on the event loop; only `claim` waits, for a ticket that
others settle. Time is the clock handed in (seconds, monotonic), but for the wait itself, which the event loop bounds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from gateway.core.errors import (
    EnvironmentUnavailable,
    GatewayError,
    PoolExhausted,
    SessionClosed,
    SessionExists,
    SessionNotFound,
    StoreUnavailable,
)
from gateway.core.model import (
    CapacityWanted,
    CloseReason,
    EnvironmentLoad,
    EnvironmentName,
    Note,
    Opening,
    Session,
    SessionEnded,
    SessionId,
    SessionState,
    Worker,
    WorkerId,
    WorkerLoad,
    WorkerState,
)
from gateway.stores.admission import bounded
from gateway.stores.deadlines import Deadlines
from gateway.stores.memory_queues import Admission, Ticket
from gateway.stores.memory_rebuilding import Leadership, Rebuilding
from gateway.stores.memory_records import Closed, Held, Turns
from gateway.stores.notices import Following, Notices


class MemoryStore(Rebuilding):
    """Sessions, workers, leases and deadlines of one process; the seam is ``core.ports.Store``."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        queue_max: int = 10_000,
        closed_kept_s: float = 600.0,
        closing_s: float = 60.0,
        is_whole: bool = True,
    ) -> None:
        """Hold nothing yet; only tests of what rebuilds a store begin with one that is not whole."""
        self._clock = clock
        self._closed_kept_s = closed_kept_s
        self._closing_s = closing_s
        # The mutable state: whoever holds a slot, whoever waits for one, and what is remembered.
        self._sessions: dict[SessionId, Session] = {}
        self._deadlines: Deadlines[SessionId] = Deadlines()
        self._turns: dict[SessionId, Turns] = {}
        self._workers: dict[WorkerId, Held] = {}
        self._by_environment: dict[EnvironmentName, dict[WorkerId, Held]] = {}
        self._admission = Admission(queue_max)
        self._closed: dict[SessionId, Closed] = {}
        self._closed_deadlines: Deadlines[SessionId] = Deadlines()
        self._leadership = Leadership(is_whole=is_whole)
        self._notices = Notices()
        self._numbers = 0
        self._is_closed = False

    async def start(self) -> None:
        """Do nothing; the Redis store connects here."""

    # -- the request path ---------------------------------------------------------------------------------------

    async def claim(self, opening: Opening, *, wait_s: float) -> Session:
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

    async def touch(self, notes: Sequence[Note]) -> list[SessionId]:
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
        if session is None or session.lease != lease or session.reason is CloseReason.DELETED:
            raise SessionNotFound(f"no open session {id} of this lease")
        if session.reason is not None:
            raise SessionClosed(session.reason)
        if isinstance(session, Session) and session.state is not SessionState.OPEN:
            raise SessionNotFound(f"session {id} is not open yet")
        turns = self._turns.setdefault(id, Turns())
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

    async def hand_over(self, id: SessionId, lease: str, opening: Opening) -> Session | None:
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
        return self._grant(opening, held, now)

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
        return {
            name: EnvironmentLoad(
                workers=tuple(self._worker_load(held, now) for held in self._by_environment.get(name, {}).values()),
                waiting=self._admission.waiting(name),
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

    # -- waiting ------------------------------------------------------------------------------------------------

    def _enter(self, opening: Opening, wait_s: float) -> Ticket:
        """Take a slot, or a place in the queue, in one step: nobody can come between the two."""
        now = self._tidied()
        environment, admission = opening.environment, self._admission
        if opening.id in self._sessions or admission.holds(opening.id):
            raise SessionExists(f"session {opening.id} exists")
        ticket = Ticket(opening, asyncio.get_running_loop().create_future())
        admission.arrivals[environment] += 1
        held = self._least_used(environment)
        if held is not None:
            # A slot is only free while nobody waits: whoever frees one serves the queue in the same step.
            admission.hits[environment] += 1
            ticket.settled.set_result(self._grant(opening, held, now))
            return ticket
        message, left_s = admission.broken(environment, now)
        if left_s > 0:
            raise EnvironmentUnavailable(message, retry_after_s=left_s)
        if wait_s <= 0 or admission.is_full(opening):
            waiting = admission.waiting(environment)
            raise PoolExhausted(
                f"no slot of {environment} is free, and {waiting} wait for one",
                retry_after_s=admission.retry_after_s(opening, now),
            )
        admission.enter(ticket, now + wait_s, now)
        self._notices.publish(CapacityWanted(environment))
        return ticket

    def _taken(self, ticket: Ticket) -> Session:
        """What the wait came to: the session that was granted, or the error."""
        if not ticket.settled.done():
            self._settle(ticket, self._too_late(ticket, self._clock()))
        outcome = ticket.settled.result()
        if isinstance(outcome, GatewayError):
            raise outcome
        session = self._sessions.get(outcome.id)
        if session is None or session.lease != outcome.lease or session.state is not SessionState.OPENING:
            raise PoolExhausted(
                f"the slot of {outcome.environment} was lost before it could be used",
                retry_after_s=self._admission.retry_after_s(ticket.opening, self._clock()),
            )
        return session

    def _give_back(self, ticket: Ticket) -> None:
        """Undo a claim whose caller is gone, however far it got."""
        if not ticket.settled.done():
            self._admission.leave(ticket)
            return
        outcome = ticket.settled.result()
        if isinstance(outcome, GatewayError):
            return
        session = self._sessions.get(outcome.id)
        if session is not None and session.lease == outcome.lease and session.state is SessionState.OPENING:
            now = self._clock()
            self._forget(session, None, now)
            self._free(session, now)

    def _serve(self, environment: EnvironmentName, now: float) -> None:
        """Give free slots to those that wait, owner by owner."""
        since = self._admission.served_at(environment)
        served = 0
        while (ticket := self._admission.first(environment)) and (held := self._least_used(environment)) is not None:
            self._admission.serve(ticket, now)
            ticket.settled.set_result(self._grant(ticket.opening, held, now))
            served += 1
        if since is not None and served:
            self._admission.note_pace(environment, since, served, now)

    def _fail_all(self, environment: EnvironmentName, message: str, *, retry_after_s: float = 0.0) -> int:
        tickets = self._admission.of(environment)
        for ticket in tickets:
            self._settle(ticket, EnvironmentUnavailable(message, retry_after_s=retry_after_s))
        return len(tickets)

    def _settle(self, ticket: Ticket, outcome: GatewayError) -> None:
        self._admission.leave(ticket)
        ticket.settled.set_result(outcome)

    def _too_late(self, ticket: Ticket, now: float) -> PoolExhausted:
        return PoolExhausted(
            f"no slot of {ticket.opening.environment} became free in time",
            retry_after_s=self._admission.retry_after_s(ticket.opening, now),
        )

    def _drop_ticket(self, id: SessionId, now: float) -> None:
        for ticket in [ticket for ticket in self._admission.all() if ticket.opening.id == id]:
            self._settle(ticket, SessionExists(f"session {id} exists"))

    # -- slots --------------------------------------------------------------------------------------------------

    def _enlist(self, worker: Worker, now: float) -> Held:
        self._numbers += 1
        held = Held(worker=worker, number=self._numbers, added_at=now, idle_since=now)
        self._workers[worker.id] = held
        self._by_environment.setdefault(worker.environment, {})[worker.id] = held
        return held

    def _least_used(self, environment: EnvironmentName) -> Held | None:
        if not self._leadership.is_whole:
            return None  # a slot may seem free only because its session was lost
        # A walk over one environment's workers (some hundred at most) instead of a heap that each grant would reorder.
        free = [held for held in self._by_environment.get(environment, {}).values() if held.has_room]
        return min(free, key=lambda held: (len(held.sessions), held.number), default=None)

    def _grant(self, opening: Opening, held: Held, now: float) -> Session:
        session = Session(
            id=opening.id,
            name=opening.name,
            owner=opening.owner,
            environment=opening.environment,
            lease=opening.lease,
            fingerprint=opening.fingerprint,
            idle_s=opening.idle_s,
            worker=held.worker.id,
            address=held.worker.address,
            state=SessionState.OPENING,
            task=opening.task,
            episode=opening.episode,
            policy=opening.policy,
        )
        self._closed.pop(session.id, None)
        self._closed_deadlines.discard(session.id)
        self._sessions[session.id] = session
        self._deadlines.set(session.id, now + opening.setup_s)
        held.sessions.add(session.id)
        held.uses += 1
        if held.is_spent:
            self._drain(held)
        return session

    def _closing(self, session: Session, reason: CloseReason, now: float) -> Session:
        session = self._sessions[session.id] = replace(session, state=SessionState.CLOSING, reason=reason)
        self._deadlines.set(session.id, now + self._closing_s)
        self._notices.publish(SessionEnded(session.id, session.lease))
        return session

    def _forget(self, session: Session, reason: CloseReason | None, now: float) -> None:
        """Drop a live session; why it ended is remembered unless its trainer did it, or never knew of it (None)."""
        del self._sessions[session.id]
        self._turns.pop(session.id, None)
        self._deadlines.discard(session.id)
        if reason is not None and reason is not CloseReason.DELETED:
            self._closed[session.id] = Closed(session.lease, reason)
            self._closed_deadlines.set(session.id, now + self._closed_kept_s)

    def _free(self, session: Session, now: float) -> None:
        held = self._workers[session.worker]
        held.sessions.remove(session.id)
        if not held.sessions:
            held.idle_since = now
            if held.worker.state is WorkerState.DRAINING:
                self._notices.publish(CapacityWanted(session.environment))
        self._serve(session.environment, now)

    def _drain(self, held: Held) -> None:
        held.worker = replace(held.worker, state=WorkerState.DRAINING)
        self._notices.publish(CapacityWanted(held.worker.environment))

    @staticmethod
    def _worker_load(held: Held, now: float) -> WorkerLoad:
        return WorkerLoad(
            worker=held.worker,
            used=len(held.sessions),
            idle_s=0.0 if held.sessions else now - held.idle_since,
            age_s=now - held.added_at,
        )

    def _tidied(self) -> float:
        """The time, once what has run out by then is gone: places in queues and memories of closed sessions."""
        if self._is_closed:
            raise StoreUnavailable("the store is closed")
        now = self._clock()
        while (ticket := self._admission.late(now)) is not None:
            self._settle(ticket, self._too_late(ticket, now))
        while (memory := self._closed_deadlines.pop(now)) is not None:
            del self._closed[memory[0]]
        return now

"""Of the memory store: what it holds, who gets a slot, and who waits for one.

Each method is one step that nobody comes between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from gateway.core.errors import (
    EnvironmentUnavailable,
    GatewayError,
    PoolExhausted,
    SessionExists,
    StoreUnavailable,
)
from gateway.core.ids import EnvironmentName, SessionId, WorkerId
from gateway.core.session import CapacityWanted, CloseReason, Session, SessionEnded, SessionRequest, SessionState
from gateway.core.worker import Worker, WorkerLoad, WorkerState
from gateway.stores.memory.expiry_heap import Deadlines
from gateway.stores.memory.groups import Groups
from gateway.stores.memory.leadership import MemoryLeadership
from gateway.stores.memory.queue import Admission, QueueTicket
from gateway.stores.memory.records import Closed, Held, MemoryTurns
from gateway.stores.notifications import Notices


class Slots:
    """The state of ``MemoryStore``, and how slots change hands in it."""

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
        self._turns: dict[SessionId, MemoryTurns] = {}
        self._workers: dict[WorkerId, Held] = {}
        self._by_environment: dict[EnvironmentName, dict[WorkerId, Held]] = {}
        self._admission = Admission(queue_max)
        self._groups = Groups()
        self._closed: dict[SessionId, Closed] = {}
        self._closed_deadlines: Deadlines[SessionId] = Deadlines()
        self._leadership = MemoryLeadership(is_whole=is_whole)
        self._notices = Notices()
        self._numbers = 0
        self._is_closed = False

    # -- waiting ------------------------------------------------------------------------------------------------

    def _enter(self, opening: SessionRequest, wait_s: float) -> QueueTicket:
        """Take a slot, or a place in the queue, in one step: nobody can come between the two."""
        now = self._tidied()
        environment, admission = opening.environment, self._admission
        if opening.id in self._sessions or admission.holds(opening.id):
            raise SessionExists(f"session {opening.id} exists")
        ticket = QueueTicket(opening, asyncio.get_running_loop().create_future())
        admission.arrivals[environment] += 1
        if (session := self._take(opening, now)) is not None:
            admission.hits[environment] += 1
            ticket.settled.set_result(session)
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
        self._groups.enter(ticket)
        admission.enter(ticket, now + wait_s, now)
        self._notices.publish(CapacityWanted(environment))
        self._serve(environment, now)  # slots may have been kept for a group until just now
        return ticket

    def _take(self, opening: SessionRequest, now: float) -> Session | None:
        """Grant a free slot that is meant for *opening*, if there is one: none is another's while somebody waits."""
        if self._least_used(opening.environment) is None:
            return None
        need, home = 1, self._groups.home(opening)
        if not self._groups.takes_reserved(opening):
            need = self._groups.wanted(opening)
            if self._admission.waiting(opening.environment) or self._available(opening.environment) < need:
                return None
            home = self._find_home(opening.environment, need)
        session = self._granted(opening, home, now)
        if need > 1:
            self._groups.reserve(opening, need - 1, now, home)
        return session

    def _taken(self, ticket: QueueTicket) -> Session:
        """What the wait came to: the session that was granted, or the error."""
        if not ticket.settled.done():
            self._settle(ticket, self._too_late(ticket, self._clock()))
            self._serve(ticket.opening.environment, self._clock())
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

    def _give_back(self, ticket: QueueTicket) -> None:
        """Undo a claim whose caller is gone, however far it got."""
        if not ticket.settled.done():
            self._leave(ticket)
            self._serve(ticket.opening.environment, self._clock())
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
        """Give free slots to those that wait, owner by owner; those behind a group that waits for more wait as well."""
        since = self._admission.served_at(environment)
        served = 0
        while (ticket := self._admission.first(environment)) and self._least_used(environment) is not None:
            tickets, reserved = self._next(ticket, now)
            if not tickets:
                break
            self._admission.serve(tickets, now)
            home = self._find_home(environment, len(tickets) + reserved)
            for each in tickets:
                self._groups.leave(each)
                each.settled.set_result(self._granted(each.opening, home, now))
            self._groups.reserve(ticket.opening, reserved, now, home)
            served += len(tickets)
        if since is not None and served:
            self._admission.note_pace(environment, since, served, now)

    def _next(self, first: QueueTicket, now: float) -> tuple[list[QueueTicket], int]:
        """Who is served next, *first* or its whole group; and how many slots are kept for those of it that come later.

        A group is served all at once, or as far as there are slots once it has waited long enough for more.
        """
        opening = first.opening
        available, need = self._available(opening.environment), self._groups.wanted(opening)
        if not opening.group:
            return [first] if available else [], 0
        waiting = self._groups.waiting(opening)[:need]
        if available < need:
            last_call = min(self._admission.until(ticket) for ticket in waiting)
            if not available or not self._groups.is_impatient(opening, last_call, now):
                return [], 0
            self._groups.part(opening, now)
            return waiting[:available], 0
        return waiting, need - len(waiting)

    def _fail_all(self, environment: EnvironmentName, message: str, *, retry_after_s: float = 0.0) -> int:
        tickets = self._admission.of(environment)
        for ticket in tickets:
            self._settle(ticket, EnvironmentUnavailable(message, retry_after_s=retry_after_s))
        return len(tickets)

    def _settle(self, ticket: QueueTicket, outcome: GatewayError) -> None:
        self._leave(ticket)
        ticket.settled.set_result(outcome)

    def _leave(self, ticket: QueueTicket) -> None:
        self._admission.leave(ticket)
        self._groups.leave(ticket)

    def _too_late(self, ticket: QueueTicket, now: float) -> PoolExhausted:
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

    def _available(self, environment: EnvironmentName) -> int:
        """Free slots that are kept for no group."""
        free = sum(held.room for held in self._by_environment.get(environment, {}).values())
        return max(0, free - self._groups.reserved(environment))

    def _find_home(self, environment: EnvironmentName, need: int) -> WorkerId | None:
        """The worker for a group that wants *need* slots; None: it is no group, or fits none."""
        held = self._find_room(environment, need) if need > 1 else None
        return None if held is None else held.worker.id

    def _find_room(self, environment: EnvironmentName, need: int) -> Held | None:
        """The worker with the fewest sessions that has *need* slots beside those that are kept in it for groups."""
        workers = self._by_environment.get(environment, {}).values()
        free = [held for held in workers if held.room - self._groups.reserved_in(held.worker.id) >= need]
        return min(free, key=lambda held: (len(held.sessions), held.number), default=None)

    def _granted(self, opening: SessionRequest, home: WorkerId | None, now: float) -> Session:
        """Grant *opening* a slot of *home*, if that has room, else of another worker; there is one."""
        held = self._workers.get(home) if home is not None else None
        if held is None or not held.has_room:
            held = self._find_room(opening.environment, 1) or self._least_used(opening.environment)
        assert held is not None, "granted no more than there are"
        return self._grant(opening, held, now)

    def _grant(self, opening: SessionRequest, held: Held, now: float) -> Session:
        self._groups.granted(opening, now)
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
        held.uses += opening.is_use
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
        if reason is not None and not reason.is_trainers:
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
        changed = set(self._groups.let_go(now))
        while (ticket := self._admission.late(now)) is not None:
            self._settle(ticket, self._too_late(ticket, now))
            changed.add(ticket.opening.environment)
        for environment in changed:  # slots that were kept are anybody's
            self._serve(environment, now)
        while (memory := self._closed_deadlines.pop(now)) is not None:
            del self._closed[memory[0]]
        return now

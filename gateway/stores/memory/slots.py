"""The slots of one process' workers: the sessions that hold them, the openings that wait, and how slots change hands.

Each method is one step on the event loop. Moments are seconds of the store's clock.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field, replace

from gateway.core.errors import (
    EnvironmentUnavailable,
    GatewayError,
    PoolExhausted,
    SessionExists,
)
from gateway.core.ids import EnvironmentName, SessionId, WorkerId
from gateway.core.session import BY_TRAINER, CapacityWanted, CloseReason, Session, SessionRequest, SessionState
from gateway.core.worker import EnvironmentLoad, Worker, WorkerLoad, WorkerState
from gateway.stores.memory.groups import Groups
from gateway.stores.memory.queue import Deadlines, Queue, QueueTicket
from gateway.stores.notifications import Notices


@dataclass(frozen=True, slots=True)
class Closed:
    """A session that the gateway ended, as far as it is remembered."""

    lease: str
    reason: CloseReason
    until: float


@dataclass(slots=True)
class Held:
    """A worker and the sessions that it holds."""

    worker: Worker
    added_at: float
    idle_since: float
    uses: int = 0
    sessions: set[SessionId] = field(default_factory=set)

    @property
    def has_room(self) -> bool:
        return self.worker.state is WorkerState.READY and len(self.sessions) < self.worker.slots

    @property
    def room(self) -> int:
        """The number of sessions that it takes more."""
        if not self.has_room:
            return 0
        room = self.worker.slots - len(self.sessions)
        return min(room, self.worker.max_uses - self.uses) if self.worker.max_uses else room

    @property
    def is_spent(self) -> bool:
        return 0 < self.worker.max_uses <= self.uses

    def become(self, state: WorkerState) -> None:
        """Give the worker another state."""
        self.worker = replace(self.worker, state=state)


class Slots:
    """All workers, live sessions and waiting openings of one process, and the memory of sessions that were closed."""

    def __init__(self, notices: Notices, *, queue_max: int, closed_kept_s: float, is_whole: bool) -> None:
        self.is_whole = is_whole
        self.sessions: dict[SessionId, Session] = {}
        self.deadlines: Deadlines[SessionId] = Deadlines()
        #: Of each session that had turns: how many, and the key of the last one.
        self.turns: dict[SessionId, tuple[int, str]] = {}
        #: In the order in which they are forgotten; a plain dict walks over all its holes to find its first key.
        self.closed: OrderedDict[SessionId, Closed] = OrderedDict()
        self.workers: dict[WorkerId, Held] = {}
        self.queues: defaultdict[EnvironmentName, Queue] = defaultdict(lambda: Queue(queue_max))
        self.tickets: dict[SessionId, QueueTicket] = {}
        self._ticket_ends: Deadlines[SessionId] = Deadlines()
        self._by_environment: defaultdict[EnvironmentName, dict[WorkerId, Held]] = defaultdict(dict)
        self._groups = Groups()
        self._notices = notices
        self._closed_kept_s = closed_kept_s
        self._tickets_made = 0

    def tidy(self, now: float) -> None:
        """Drop what has run out by now: places in queues, slots that are kept, and memories of closed sessions."""
        changed = set(self._groups.let_go(now)) if self._groups.by_id else set()
        while (passed := self._ticket_ends.pop(now)) is not None:
            ticket = self.tickets[passed[0]]
            self.settle(ticket, self._too_late(ticket, now))
            changed.add(ticket.opening.environment)
        for environment in changed:  # slots that were kept are anybody's
            self.serve(environment, now)
        while self.closed and next(iter(self.closed.values())).until <= now:
            self.closed.popitem(last=False)

    # -- waiting ------------------------------------------------------------------------------------------------

    def enter(self, opening: SessionRequest, wait_s: float, now: float) -> QueueTicket:
        """Take a slot, or a place in the queue, in one step: no other opening comes between the two."""
        environment, queue = opening.environment, self.queues[opening.environment]
        if opening.id in self.sessions or opening.id in self.tickets:
            raise SessionExists(f"session {opening.id} exists")
        self._tickets_made += 1
        ticket = QueueTicket(opening, asyncio.get_running_loop().create_future(), self._tickets_made, now + wait_s)
        queue.arrivals += 1
        if (session := self._take(opening, now)) is not None:
            queue.hits += 1
            ticket.settled.set_result(session)
            return ticket
        message, left_s = queue.broken(now)
        if left_s > 0:
            raise EnvironmentUnavailable(message, retry_after_s=left_s)
        if wait_s <= 0 or queue.is_full(opening.owner):
            raise PoolExhausted(
                f"no slot of {environment} is free, and {len(queue)} wait for one",
                retry_after_s=queue.retry_after_s(opening, now),
            )
        self._groups.enter(ticket)
        self.tickets[opening.id] = ticket
        self._ticket_ends.set(opening.id, ticket.until)
        queue.enter(ticket, now)
        self._notices.publish(CapacityWanted(environment))
        self.serve(environment, now)  # slots may have been kept for a group until just now
        return ticket

    def taken(self, ticket: QueueTicket, now: float) -> Session:
        """Return the session that *ticket* was granted; raise the error if the wait failed."""
        if not ticket.settled.done():
            self.settle(ticket, self._too_late(ticket, now))
            self.serve(ticket.opening.environment, now)
        outcome = ticket.settled.result()
        if isinstance(outcome, GatewayError):
            raise outcome
        if not self._is_opening(outcome):
            raise PoolExhausted(
                f"the slot of {outcome.environment} was lost before it could be used",
                retry_after_s=self.queues[outcome.environment].retry_after_s(ticket.opening, now),
            )
        return self.sessions[outcome.id]

    def give_back(self, ticket: QueueTicket, now: float) -> None:
        """Undo a claim whose caller is gone, however far it got."""
        if not ticket.settled.done():
            self._leave(ticket)
            self.serve(ticket.opening.environment, now)
            return
        outcome = ticket.settled.result()
        if not isinstance(outcome, GatewayError) and self._is_opening(outcome):
            session = self.sessions[outcome.id]
            self.forget(session, None, now)
            self.free(session, now)

    def serve(self, environment: EnvironmentName, now: float) -> None:
        """Give free slots to waiting openings, owner by owner; openings behind a group that waits for more wait too."""
        queue = self.queues[environment]
        since, served = queue.served_at, 0
        while (ticket := queue.first()) and self._least_used(environment) is not None:
            tickets, reserved = self._next(ticket, now)
            if not tickets:
                break
            queue.serve(tickets, now)
            home = self._find_home(environment, len(tickets) + reserved)
            for each in tickets:
                self._forget_ticket(each)
                each.settled.set_result(self._granted(each.opening, home, now))
            self._groups.reserve(ticket.opening, reserved, now, home)
            served += len(tickets)
        if served:
            queue.note_pace(since, served, now)

    def fail_waiting(self, environment: EnvironmentName, message: str, *, retry_after_s: float) -> int:
        """Let all that wait for *environment* fail; return how many."""
        tickets = self.queues[environment].tickets()
        for ticket in tickets:
            self.settle(ticket, EnvironmentUnavailable(message, retry_after_s=retry_after_s))
        return len(tickets)

    def settle(self, ticket: QueueTicket, outcome: GatewayError) -> None:
        """Let the opening of *ticket*, which waits, fail."""
        self._leave(ticket)
        ticket.settled.set_result(outcome)

    def _take(self, opening: SessionRequest, now: float) -> Session | None:
        """Grant a free slot that is meant for *opening*, if there is one: none is another's while somebody waits."""
        if self._least_used(opening.environment) is None:
            return None
        need, home, is_kept = 1, None, False
        if opening.group:
            is_kept, home = self._groups.take_reserved(opening)
        if not is_kept:
            need = self._groups.wanted(opening) if opening.group else 1
            if self.queues[opening.environment] or self._available(opening.environment) < need:
                return None
            home = self._find_home(opening.environment, need)
        session = self._granted(opening, home, now)
        if need > 1:
            self._groups.reserve(opening, need - 1, now, home)
        return session

    def _next(self, first: QueueTicket, now: float) -> tuple[list[QueueTicket], int]:
        """Return the tickets to serve next, *first* or its group; and the slots to keep for the rest of the group.

        A group is served all at once, or as far as there are slots once it has waited long enough for more.
        """
        opening = first.opening
        available = self._available(opening.environment)
        if not opening.group:
            return [first] if available else [], 0
        need = self._groups.wanted(opening)
        waiting = self._groups.waiting(opening)[:need]
        if available < need:
            last_call = min(ticket.until for ticket in waiting)
            if not available or not self._groups.is_impatient(opening, last_call, now):
                return [], 0
            self._groups.part(opening, now)
            return waiting[:available], 0
        return waiting, need - len(waiting)

    def _leave(self, ticket: QueueTicket) -> None:
        self.queues[ticket.opening.environment].leave(ticket)
        self._forget_ticket(ticket)

    def _forget_ticket(self, ticket: QueueTicket) -> None:
        del self.tickets[ticket.opening.id]
        self._ticket_ends.discard(ticket.opening.id)
        self._groups.leave(ticket)

    def _too_late(self, ticket: QueueTicket, now: float) -> PoolExhausted:
        environment = ticket.opening.environment
        return PoolExhausted(
            f"no slot of {environment} became free in time",
            retry_after_s=self.queues[environment].retry_after_s(ticket.opening, now),
        )

    # -- slots --------------------------------------------------------------------------------------------------

    def enlist(self, worker: Worker, now: float) -> Held:
        """Register *worker*."""
        held = Held(worker=worker, added_at=now, idle_since=now)
        self.workers[worker.id] = self._by_environment[worker.environment][worker.id] = held
        return held

    def delist(self, held: Held) -> None:
        """Forget a worker; its sessions are the caller's."""
        del self.workers[held.worker.id]
        del self._by_environment[held.worker.environment][held.worker.id]

    def make_ready(self, held: Held, worker: Worker, now: float) -> None:
        """Let *held* be *worker*, which is ready: close its environment's breaker and give its slots away."""
        held.worker, held.idle_since = worker, now
        self.queues[worker.environment].close_breaker()
        self.serve(worker.environment, now)

    def drain(self, held: Held) -> None:
        """Let a worker take no more sessions."""
        held.become(WorkerState.DRAINING)
        self._notices.publish(CapacityWanted(held.worker.environment))

    def grant(self, opening: SessionRequest, held: Held, now: float) -> Session:
        """Make *opening* a session of *held*, which has room."""
        if opening.group:
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
        self.hold(session, held, now + opening.setup_s)
        held.uses += opening.is_use
        if held.is_spent:
            self.drain(held)
        return session

    def hold(self, session: Session, held: Held, deadline: float) -> None:
        """Let *session* hold a slot of *held*; no earlier session of its id is remembered."""
        self.closed.pop(session.id, None)
        self.sessions[session.id] = session
        self.deadlines.set(session.id, deadline)
        held.sessions.add(session.id)

    def forget(self, session: Session, reason: CloseReason | None, now: float) -> None:
        """Drop a live session; why it ended is remembered unless its trainer did it, or never knew of it (None)."""
        del self.sessions[session.id]
        self.turns.pop(session.id, None)
        self.deadlines.discard(session.id)
        if reason is not None and reason not in BY_TRAINER:
            self.closed[session.id] = Closed(session.lease, reason, now + self._closed_kept_s)

    def free(self, session: Session, now: float) -> None:
        """Give the slot of *session*, which is forgotten, to the next that waits."""
        held = self.workers[session.worker]
        held.sessions.remove(session.id)
        if not held.sessions:
            held.idle_since = now
            if held.worker.state is WorkerState.DRAINING:
                self._notices.publish(CapacityWanted(session.environment))
        self.serve(session.environment, now)

    def load(self, now: float) -> dict[EnvironmentName, EnvironmentLoad]:
        """Count what every environment holds and what waits."""
        names = self._by_environment.keys() | self.queues.keys()
        for name in names:
            self.serve(name, now)  # a group may have waited for long enough
        return {
            name: EnvironmentLoad(
                workers=tuple(_load_of(held, now) for held in self._by_environment[name].values()),
                waiting=len(self.queues[name]),
                to_come=self._groups.to_come(name, self.queues[name].tickets()) if self._groups.by_id else 0,
                arrivals=self.queues[name].arrivals,
                hits=self.queues[name].hits,
                broken_s=self.queues[name].broken(now)[1],
            )
            for name in names
        }

    def _is_opening(self, granted: Session) -> bool:
        session = self.sessions.get(granted.id)
        return session is not None and (session.lease, session.state) == (granted.lease, SessionState.OPENING)

    def _least_used(self, environment: EnvironmentName) -> Held | None:
        if not self.is_whole:
            return None  # a slot may seem free only because its session was lost
        # A walk over one environment's workers (some hundred, oldest first) instead of a heap that each grant would
        # reorder.
        free = [held for held in self._by_environment[environment].values() if held.has_room]
        return min(free, key=lambda held: len(held.sessions), default=None)

    def _available(self, environment: EnvironmentName) -> int:
        """Count free slots that are kept for no group."""
        free = sum(held.room for held in self._by_environment[environment].values())
        return max(0, free - self._groups.reserved[environment])

    def _find_home(self, environment: EnvironmentName, need: int) -> WorkerId | None:
        """Return the worker for a group that wants *need* slots; None if it is no group, or fits no worker."""
        held = self._find_room(environment, need) if need > 1 else None
        return None if held is None else held.worker.id

    def _find_room(self, environment: EnvironmentName, need: int) -> Held | None:
        """Return the worker with the fewest sessions that has *need* slots beside the slots kept in it for groups."""
        workers = self._by_environment[environment].values()
        free = [held for held in workers if held.room - self._groups.reserved_in[held.worker.id] >= need]
        return min(free, key=lambda held: len(held.sessions), default=None)

    def _granted(self, opening: SessionRequest, home: WorkerId | None, now: float) -> Session:
        """Grant *opening* a slot of *home*, if that has room, else of another worker; there is one."""
        held = self.workers.get(home) if home is not None else None
        if held is None or not held.has_room:
            held = self._find_room(opening.environment, 1) or self._least_used(opening.environment)
        assert held is not None, "granted no more than there are"
        return self.grant(opening, held, now)


def _load_of(held: Held, now: float) -> WorkerLoad:
    return WorkerLoad(
        worker=held.worker,
        used=len(held.sessions),
        idle_s=0.0 if held.sessions else now - held.idle_since,
        age_s=now - held.added_at,
    )

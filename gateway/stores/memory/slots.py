"""Assigns the slots of one process's workers to sessions and waiting openings, for the memory store.

Each method is one atomic step on the event loop. Points in time are seconds of the store's clock.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field, replace

from gateway.core.broadcast import Broadcast
from gateway.core.errors import (
    EnvironmentUnavailable,
    GatewayError,
    PoolExhausted,
    SessionExists,
)
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.ports.calls import TOTAL_BYTES
from gateway.core.session import BY_TRAINER, CapacityWanted, CloseReason, Notice, Session, SessionRequest, SessionState
from gateway.core.worker import EnvironmentLoad, Worker, WorkerLoad, WorkerState
from gateway.stores.limits import NO_LIMIT
from gateway.stores.memory.groups import Groups
from gateway.stores.memory.owners import Owners
from gateway.stores.memory.queue import Deadlines, Queue, QueueTicket


@dataclass(frozen=True, slots=True)
class Closed:
    """The lease, close reason and result of a session that the gateway ended, kept until `until`."""

    lease: str
    reason: CloseReason
    until: float
    result: str


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
        """Number of further sessions that the worker accepts, limited by its free slots and remaining uses."""
        if not self.has_room:
            return 0
        room = self.worker.slots - len(self.sessions)
        return min(room, self.worker.max_uses - self.uses) if self.worker.max_uses else room

    @property
    def is_spent(self) -> bool:
        return 0 < self.worker.max_uses <= self.uses

    def become(self, state: WorkerState) -> None:
        """Set the worker's state."""
        self.worker = replace(self.worker, state=state)


class Slots:
    """All workers, live sessions and waiting openings of one process, and its recently closed sessions."""

    def __init__(self, notices: Broadcast[Notice], *, queue_max: int, closed_kept_s: float, is_whole: bool) -> None:
        self.is_whole = is_whole
        self.sessions: dict[SessionId, Session] = {}
        self.deadlines: Deadlines[SessionId] = Deadlines()
        #: Number of turns, and the key of the last turn, of each session that had turns.
        self.turns: dict[SessionId, tuple[int, str]] = {}
        #: Ordered by expiry. A plain dict would scan all its deleted entries to find its first key.
        self.closed: OrderedDict[SessionId, Closed] = OrderedDict()
        self.replies: OrderedDict[SessionId, tuple[bytes, float]] = OrderedDict()
        """Last replies of ended episodes, the oldest first, and the times until which they are kept."""
        self._reply_bytes = 0
        self.owners = Owners()
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
        """Drop expired queue places, expired group reservations, and closed sessions that were kept long enough."""
        has_changed = bool(list(self._groups.let_go(now))) if self._groups.by_id else False
        while (passed := self._ticket_ends.pop(now)) is not None:
            self._expire(self.tickets[passed[0]], now)
            has_changed = True
        if has_changed:  # slots that were reserved are free for every opening
            self._serve_all(now)
        while self.closed and next(iter(self.closed.values())).until <= now:
            self.closed.popitem(last=False)
        while self.replies and next(iter(self.replies.values()))[1] <= now:
            self._drop_reply(next(iter(self.replies)))

    # -- waiting ------------------------------------------------------------------------------------------------

    def enter(self, opening: SessionRequest, wait_s: float, now: float) -> QueueTicket:
        """Take a slot or a place in the queue, in one atomic step, and return the ticket.

        Raises:
            SessionExists: A session or a waiting opening has the same id.
            EnvironmentUnavailable: No slot is free, and the environment's circuit breaker is open.
            PoolExhausted: No slot is free, and *wait_s* is 0 or the queue is full.
        """
        environment, queue = opening.environment, self.queues[opening.environment]
        if opening.group and self._groups.is_unprivileged(opening, now):
            opening = replace(opening, group="")
        if opening.id in self.sessions or opening.id in self.tickets:
            raise SessionExists(f"session {opening.id} exists")
        self._tickets_made += 1
        ticket = QueueTicket(opening, asyncio.get_running_loop().create_future(), self._tickets_made, now + wait_s)
        need = self._groups.wanted(opening) if opening.group else 1
        is_allowed = self.owners.room(opening) >= need
        queue.arrivals += is_allowed
        if is_allowed and (session := self._take(opening, need, now)) is not None:
            queue.hits += 1
            ticket.settled.set_result(session)
            return ticket
        message, left_s = queue.broken(now)
        if left_s > 0:
            raise EnvironmentUnavailable(message, retry_after_s=left_s)
        if wait_s <= 0 or queue.is_full(opening.owner):
            limit = self.owners.reached(opening, need=need)
            raise PoolExhausted(
                limit or f"no slot of {environment} is free, and {len(queue)} wait for one",
                retry_after_s=queue.retry_after_s(opening, now),
            )
        self._groups.enter(ticket)
        self.tickets[opening.id] = ticket
        self._ticket_ends.set(opening.id, ticket.until)
        queue.enter(ticket, now)
        self._notices.publish(CapacityWanted(environment))
        self.serve(environment, now)  # a group's reservation may have just ended
        return ticket

    def taken(self, ticket: QueueTicket, now: float) -> Session:
        """Return the session that *ticket* was granted. Raise the ticket's error if the wait failed."""
        if not ticket.settled.done():
            self._expire(ticket, now)
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
        """Undo a claim whose caller is gone: leave the queue, or release the slot that was granted."""
        if not ticket.settled.done():
            self._leave(ticket)
            self._groups.abandon(ticket, now)
            self.serve(ticket.opening.environment, now)
            return
        outcome = ticket.settled.result()
        if not isinstance(outcome, GatewayError) and self._is_opening(outcome):
            session = self.sessions[outcome.id]
            self.forget(session, None, now)
            self.free(session, now)

    def serve(self, environment: EnvironmentName, now: float) -> int:
        """Grant free slots to waiting openings, owner by owner. Return the number of granted slots.

        A group that waits for more slots blocks the queue once half of it has come. An owner at its limit never does.
        """
        queue = self.queues[environment]
        since, served = queue.served_at, 0
        while self._least_used(environment) is not None and (turn := self._turn(queue, now)):
            tickets, reserved, absent = turn
            queue.serve(tickets, absent, now)
            home = self._find_home(environment, len(tickets) + reserved)
            for each in tickets:
                self._forget_ticket(each)
                each.settled.set_result(self._granted(each.opening, home, now))
            self._groups.reserve(tickets[0].opening, reserved, now, home)
            served += len(tickets)
        if served:
            queue.note_pace(since, served, now)
        return served

    def serve_owners(self, owners: set[Owner], now: float) -> None:
        """Grant free slots to waiting openings of *owners*, whose sessions ended, in order of arrival.

        In any environment, they may have waited only for the limit of their owner.
        """
        firsts: dict[EnvironmentName, int] = {}
        for environment, queue in self.queues.items():
            numbers = [number for owner in owners if (number := queue.first_number(owner)) is not None]
            if numbers:
                firsts[environment] = min(numbers)
        for environment in sorted(firsts, key=firsts.__getitem__):
            self.serve(environment, now)

    def _serve_all(self, now: float) -> None:
        """Grant the free slots of every environment, until a grant in one has no effect in another.

        A grant may bring an owner to its limit, so that it no longer blocks the queue of another environment.
        """
        while sum([self.serve(environment, now) for environment in sorted(self.queues)]):
            pass

    def fail_waiting(self, environment: EnvironmentName, message: str, *, retry_after_s: float) -> int:
        """Fail every opening that waits for *environment*, and return their number."""
        tickets = self.queues[environment].tickets()
        for ticket in tickets:
            self.settle(ticket, EnvironmentUnavailable(message, retry_after_s=retry_after_s))
        return len(tickets)

    def settle(self, ticket: QueueTicket, outcome: GatewayError) -> None:
        """Fail the waiting opening of *ticket* with *outcome*."""
        self._leave(ticket)
        ticket.settled.set_result(outcome)

    def _take(self, opening: SessionRequest, need: int, now: float) -> Session | None:
        """Grant *opening* a slot reserved for its group, or *need* free slots that no waiting opening may take.

        The limits of the owner allow *need* sessions. Return None if there is no such slot.
        """
        if self._least_used(opening.environment) is None:
            return None
        is_kept, home = self._groups.take_reserved(opening) if opening.group else (False, None)
        if not is_kept:
            if self._available(opening.environment) < need or not self._overtakes_none(opening):
                return None
            home = self._find_home(opening.environment, need)
        session = self._granted(opening, home, now)
        if need > 1:
            self._groups.reserve(opening, need - 1, now, home)
        return session

    def _overtakes_none(self, opening: SessionRequest) -> bool:
        """Return True if only other owners wait for the opening's environment, each of them at its limit."""
        firsts = [first.opening for first in self.queues[opening.environment].firsts()]
        return all(first.owner != opening.owner and self._is_over_limit(first) for first in firsts)

    def _is_over_limit(self, opening: SessionRequest) -> bool:
        return self.owners.room(opening) < self._groups.wanted(opening)

    def _turn(self, queue: Queue, now: float) -> tuple[list[QueueTicket], int, int] | None:
        """Return what `_next` returns for the first owner that is served. None: no owner is served."""
        for first in queue.firsts():
            turn = self._next(first, now)
            if turn[0]:
                return turn
            if not (self._is_over_limit(first.opening) or self._groups.is_gathering(first.opening)):
                return None
        return None

    def _next(self, first: QueueTicket, now: float) -> tuple[list[QueueTicket], int, int]:
        """Return the tickets to serve if it is the turn of *first*, and two numbers for the rest of its group.

        The numbers are the slots to reserve, and the members that have not come. A group gets all its slots together.
        After it has waited long enough, it gets the slots that are free. Its owner's limits bound both.
        """
        opening = first.opening
        available = min(self._available(opening.environment), self.owners.room(opening))
        if not opening.group:
            return [first] if available else [], 0, 0
        need = self._groups.wanted(opening)
        waiting = self._groups.waiting(opening)[:need]
        absent = need - len(waiting)
        if available < need:
            last_call = min(ticket.until for ticket in waiting)
            if not available or not self._groups.is_impatient(opening, last_call, now):
                return [], 0, 0
            self._groups.part(opening, absent, now)
            return waiting[:available], 0, absent
        return waiting, absent, absent

    def _expire(self, ticket: QueueTicket, now: float) -> None:
        self.settle(ticket, self._too_late(ticket, now))
        self._groups.abandon(ticket, now)

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
            self.owners.reached(ticket.opening) or f"no slot of {environment} became free in time",
            retry_after_s=self.queues[environment].retry_after_s(ticket.opening, now),
        )

    # -- slots --------------------------------------------------------------------------------------------------

    def enlist(self, worker: Worker, now: float) -> Held:
        """Add *worker* to its environment."""
        held = Held(worker=worker, added_at=now, idle_since=now)
        self.workers[worker.id] = self._by_environment[worker.environment][worker.id] = held
        return held

    def delist(self, held: Held) -> None:
        """Remove a worker. The caller handles its sessions."""
        del self.workers[held.worker.id]
        del self._by_environment[held.worker.environment][held.worker.id]

    def make_ready(self, held: Held, worker: Worker, now: float) -> None:
        """Store *worker*, which is ready, in *held*, close its environment's circuit breaker and grant its slots."""
        held.worker, held.idle_since = worker, now
        self.queues[worker.environment].close_breaker()
        self.serve(worker.environment, now)

    def drain(self, held: Held) -> None:
        """Stop assigning sessions to a worker, and notify the control loop."""
        held.become(WorkerState.DRAINING)
        self._notices.publish(CapacityWanted(held.worker.environment))

    def grant(self, opening: SessionRequest, held: Held, now: float) -> Session:
        """Turn *opening* into a session of *held*, which has a free slot."""
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
        """Assign a slot of *held* to *session*, and forget the closed session of the same id."""
        self.closed.pop(session.id, None)
        self._drop_reply(session.id)
        self.sessions[session.id] = session
        self.deadlines.set(session.id, deadline)
        held.sessions.add(session.id)
        self.owners.add(session)

    def forget(self, session: Session, reason: CloseReason | None, now: float) -> None:
        """Remove a live session, and keep *reason* unless the trainer ended the session or never received it (None)."""
        del self.sessions[session.id]
        self.owners.remove(session)
        self.turns.pop(session.id, None)
        self.deadlines.discard(session.id)
        if reason is not None and reason not in BY_TRAINER:
            self.closed[session.id] = Closed(session.lease, reason, now + self._closed_kept_s, session.result)

    def keep_reply(self, id: SessionId, reply: bytes, now: float) -> None:
        """Keep the reply that ends an episode. Beyond `TOTAL_BYTES` of replies the oldest go first."""
        self._drop_reply(id)
        self.replies[id] = reply, now + self._closed_kept_s
        self._reply_bytes += len(reply)
        while self._reply_bytes > TOTAL_BYTES:
            self._drop_reply(next(iter(self.replies)))

    def _drop_reply(self, id: SessionId) -> None:
        if (kept := self.replies.pop(id, None)) is not None:
            self._reply_bytes -= len(kept[0])

    def free(self, session: Session, now: float) -> None:
        """Release the slot of *session*, which `forget` has removed, and grant it to the next waiting opening."""
        held = self.workers[session.worker]
        held.sessions.remove(session.id)
        if not held.sessions:
            held.idle_since = now
            if held.worker.state is WorkerState.DRAINING:
                self._notices.publish(CapacityWanted(session.environment))
        self.serve_owners({session.owner}, now)
        self.serve(session.environment, now)

    def load(self, now: float) -> dict[EnvironmentName, EnvironmentLoad]:
        """Return the workers, waiting openings and counters of every environment."""
        names = self._by_environment.keys() | self.queues.keys()
        broken = {name: self.queues[name].broken(now) for name in names}
        self._serve_all(now)  # a group's wait for all its slots may be over
        return {
            name: EnvironmentLoad(
                workers=tuple(_load_of(held, now) for held in self._by_environment[name].values()),
                waiting=len(self.queues[name]),
                to_come=self._groups.to_come(name, self.queues[name].tickets()) if self._groups.by_id else 0,
                over_limit=self._count_over_limit(self.queues[name]),
                arrivals=self.queues[name].arrivals,
                hits=self.queues[name].hits,
                broken_s=broken[name][1],
                broken_why=broken[name][0],
            )
            for name in names
        }

    def _count_over_limit(self, queue: Queue) -> int:
        """Return the number of waiting openings, and of members of their groups to come, that exceed their limits."""
        count = 0
        for first in queue.firsts():
            if (room := self.owners.room(first.opening)) < NO_LIMIT:
                tickets = queue.of(first.opening.owner)
                count += max(0, len(tickets) + self._groups.missing(tickets) - room)
        return count

    def _is_opening(self, granted: Session) -> bool:
        session = self.sessions.get(granted.id)
        return session is not None and (session.lease, session.state) == (granted.lease, SessionState.OPENING)

    def _least_used(self, environment: EnvironmentName) -> Held | None:
        if not self.is_whole:
            return None  # the session that holds a seemingly free slot may be among the lost data
        # A scan of one environment's workers (some hundred, oldest first), because each grant would reorder a heap.
        free = [held for held in self._by_environment[environment].values() if held.has_room]
        return min(free, key=lambda held: len(held.sessions), default=None)

    def _available(self, environment: EnvironmentName) -> int:
        """Return the number of free slots that are not reserved for a group."""
        free = sum(held.room for held in self._by_environment[environment].values())
        return max(0, free - self._groups.reserved[environment])

    def _find_home(self, environment: EnvironmentName, need: int) -> WorkerId | None:
        """Return a worker with room for a whole group of *need* openings; None if no worker fits, or *need* is 1."""
        held = self._find_room(environment, need) if need > 1 else None
        return None if held is None else held.worker.id

    def _find_room(self, environment: EnvironmentName, need: int) -> Held | None:
        """Return the worker with the fewest sessions among those with *need* free slots that no group reserved."""
        workers = self._by_environment[environment].values()
        free = [held for held in workers if held.room - self._groups.reserved_in[held.worker.id] >= need]
        return min(free, key=lambda held: len(held.sessions), default=None)

    def _granted(self, opening: SessionRequest, home: WorkerId | None, now: float) -> Session:
        """Grant *opening* a slot of *home* if it has room, else of another worker. A slot must be free."""
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

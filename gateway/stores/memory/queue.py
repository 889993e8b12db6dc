"""Openings that wait in one process, and what the memory store knows besides to admit or refuse one.

Nothing here waits or reads a clock: the store calls it with the time (seconds), in steps that nobody comes between.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.core.errors import GatewayError
from gateway.core.ids import EnvironmentName, Owner, SessionId
from gateway.core.session import Session, SessionRequest
from gateway.stores.memory.expiry_heap import SLACK, Deadlines
from gateway.stores.retry_after import PACE_KEPT_S, mean, retry_after


@dataclass(slots=True, eq=False)
class QueueTicket:
    """A place in the queue of an environment; settled once, with a session or with what the claim raises."""

    opening: SessionRequest
    settled: asyncio.Future[Session | GatewayError]
    number: int = 0
    """Tickets count up in the order of their arrival."""


@dataclass(slots=True)
class _Line:
    """The openings of one owner in a queue, in order of arrival; never empty."""

    round: int
    """In which the first of them is served."""
    # An OrderedDict, since a plain dict walks over all its holes to find its first key.
    tickets: OrderedDict[SessionId, QueueTicket] = field(default_factory=OrderedDict)

    @property
    def first(self) -> QueueTicket:
        return next(iter(self.tickets.values()))


class Queue:
    """What waits for one environment: owners take turns, and within a round who came first is first.

    Start-time fair queueing where all owners weigh the same: one that has nothing in the queue joins the round after
    the one that is being served, so it gains nothing by leaving and coming back.
    """

    def __init__(self, now: float) -> None:
        self.served_at = now
        """When the last slot went to one that waited here; at first, when the queue began."""
        self._lines: dict[Owner, _Line] = {}
        self._round = 0
        self._waiting = 0
        #: Round, number of the first ticket, and owner, as a heap; entries that are no more true are skipped.
        self._turns: list[tuple[int, int, Owner]] = []

    def __len__(self) -> int:
        return self._waiting

    def enter(self, ticket: QueueTicket) -> None:
        """Put *ticket* behind those of its owner."""
        owner = ticket.opening.owner
        line = self._lines.get(owner)
        if line is None:
            line = self._lines[owner] = _Line(self._round + 1)
        line.tickets[ticket.opening.id] = ticket
        self._waiting += 1
        if len(line.tickets) == 1:
            self._list(owner)

    def leave(self, ticket: QueueTicket) -> None:
        """Take *ticket* out; those behind it keep their owner's round."""
        owner = ticket.opening.owner
        line = self._lines[owner]
        was_first = line.first is ticket
        del line.tickets[ticket.opening.id]
        self._waiting -= 1
        if not line.tickets:
            del self._lines[owner]
        elif was_first:
            self._list(owner)

    def serve(self, tickets: Sequence[QueueTicket], now: float) -> None:
        """Take *tickets* out, the `first` and others of its owner: each was a turn of that."""
        self.served_at = now
        line = self._lines[tickets[0].opening.owner]
        self._round = line.round
        line.round += len(tickets)
        for ticket in tickets:
            self.leave(ticket)

    def first(self) -> QueueTicket | None:
        """Whose turn it is."""
        while self._turns:
            line = self._line_of(self._turns[0])
            if line is not None:
                return line.first
            heapq.heappop(self._turns)
        return None

    def tickets(self) -> list[QueueTicket]:
        """All that wait."""
        return [ticket for line in self._lines.values() for ticket in line.tickets.values()]

    def has(self, owner: Owner) -> bool:
        """Whether *owner* has openings in it."""
        return owner in self._lines

    def place(self, opening: SessionRequest) -> int:
        """At which place *opening* is served at the latest, as owners take turns; or would be, if it is not in here."""
        line = self._lines.get(opening.owner)
        tickets = () if line is None else line.tickets
        if opening.id not in tickets:
            owners = len(self._lines) + (line is None)
            return min(self._waiting + 1, (len(tickets) + 1) * owners)
        # A walk, mostly of one step: those whose wait is over came first.
        own = next(place for place, id in enumerate(tickets, start=1) if id == opening.id)
        return min(self._waiting, own * len(self._lines))

    def _list(self, owner: Owner) -> None:
        if len(self._turns) > 2 * len(self._lines) + SLACK:
            self._turns = [turn for turn in self._turns if self._line_of(turn) is not None]
            heapq.heapify(self._turns)
        line = self._lines[owner]
        heapq.heappush(self._turns, (line.round, line.first.number, owner))

    def _line_of(self, turn: tuple[int, int, Owner]) -> _Line | None:
        """The line that *turn* stands for, None if it is no more true."""
        round, number, owner = turn
        line = self._lines.get(owner)
        return line if line is not None and (line.round, line.first.number) == (round, number) else None


class Admission:
    """The queues of all environments, their pace, breakers and counts."""

    def __init__(self, queue_max: int) -> None:
        """*queue_max*: openings that may wait for one environment, but for the first of an owner (see `is_full`)."""
        self._queue_max = queue_max
        self._queues: dict[EnvironmentName, Queue] = {}
        self._tickets: dict[SessionId, QueueTicket] = {}
        self._deadlines: Deadlines[SessionId] = Deadlines()
        #: Seconds between two slots, and when the last one of them came.
        self._paces: dict[EnvironmentName, tuple[float, float]] = {}
        self._breakers: dict[EnvironmentName, tuple[str, float]] = {}
        self._numbers = 0
        self.arrivals: Counter[EnvironmentName] = Counter()
        self.hits: Counter[EnvironmentName] = Counter()

    def environments(self) -> set[EnvironmentName]:
        """All of which there is something to tell."""
        return self._queues.keys() | self._breakers.keys() | self.arrivals.keys()

    # -- queues -------------------------------------------------------------------------------------------------

    def holds(self, id: SessionId) -> bool:
        """Whether an opening of this id waits, for whatever environment."""
        return id in self._tickets

    def waiting(self, environment: EnvironmentName) -> int:
        """How many wait for *environment*."""
        return len(self._queues.get(environment, ()))

    def is_full(self, opening: SessionRequest) -> bool:
        """Whether *opening* finds no place; of an owner that has none in a full queue, the first one still does."""
        queue = self._queues.get(opening.environment)
        waiting = 0 if queue is None else len(queue)
        is_first = queue is None or not queue.has(opening.owner)
        return waiting >= (2 * self._queue_max if is_first else self._queue_max)

    def enter(self, ticket: QueueTicket, until: float, now: float) -> None:
        """Let *ticket* wait, at most *until*."""
        opening = ticket.opening
        self._numbers += 1
        ticket.number = self._numbers
        self._tickets[opening.id] = ticket
        self._deadlines.set(opening.id, until)
        if opening.environment not in self._queues:
            self._queues[opening.environment] = Queue(now)
        self._queues[opening.environment].enter(ticket)

    def leave(self, ticket: QueueTicket) -> None:
        """Take *ticket* out, if it still waits."""
        opening = ticket.opening
        if self._tickets.get(opening.id) is ticket:
            self._queues[opening.environment].leave(ticket)
            self._forget(opening)

    def first(self, environment: EnvironmentName) -> QueueTicket | None:
        """Whose turn it is in the queue of *environment*; None: nobody waits."""
        queue = self._queues.get(environment)
        return None if queue is None else queue.first()

    def serve(self, tickets: Sequence[QueueTicket], now: float) -> None:
        """Take *tickets* out, the `first` and others of its group, which get slots."""
        self._queues[tickets[0].opening.environment].serve(tickets, now)
        for ticket in tickets:
            self._deadlines.discard(ticket.opening.id)
            del self._tickets[ticket.opening.id]
        self._end(tickets[0].opening.environment)

    def until(self, ticket: QueueTicket) -> float:
        """When the wait of *ticket* ends."""
        return self._deadlines.at(ticket.opening.id)

    def late(self, now: float) -> QueueTicket | None:
        """One whose wait is over by *now*; the caller takes it out."""
        passed = self._deadlines.pop(now)
        return None if passed is None else self._tickets[passed[0]]

    def of(self, environment: EnvironmentName) -> list[QueueTicket]:
        """All that wait for *environment*."""
        return self._queues[environment].tickets() if environment in self._queues else []

    def all(self) -> list[QueueTicket]:
        """All that wait."""
        return list(self._tickets.values())

    def _forget(self, opening: SessionRequest) -> None:
        del self._tickets[opening.id]
        self._deadlines.discard(opening.id)
        self._end(opening.environment)

    def _end(self, environment: EnvironmentName) -> None:
        if not self._queues[environment]:
            del self._queues[environment]

    # -- pace ---------------------------------------------------------------------------------------------------

    def served_at(self, environment: EnvironmentName) -> float | None:
        """When the last slot went to one that waits for *environment*, or the queue began; None: nobody waits."""
        queue = self._queues.get(environment)
        return None if queue is None else queue.served_at

    def note_pace(self, environment: EnvironmentName, since: float, slots: int, now: float) -> None:
        """Remember that *slots* slots came since the moment *since*."""
        self._paces[environment] = (mean(self._pace(environment, now), (now - since) / slots, slots), now)

    def retry_after_s(self, opening: SessionRequest, now: float) -> float:
        """In how many seconds *opening* may find a slot, where it stands or would stand; 0: not known."""
        queue = self._queues.get(opening.environment)
        return retry_after(1 if queue is None else queue.place(opening), self._pace(opening.environment, now))

    def _pace(self, environment: EnvironmentName, now: float) -> float | None:
        pace_s, noted_at = self._paces.get(environment, (0.0, 0.0))
        if environment in self._paces and now - noted_at >= PACE_KEPT_S:
            del self._paces[environment]
        return pace_s if environment in self._paces else None

    # -- breakers -----------------------------------------------------------------------------------------------

    def open_breaker(self, environment: EnvironmentName, message: str, until: float) -> None:
        """Keep why openings of *environment* fail, up to the moment *until*."""
        self._breakers[environment] = (message, until)

    def close_breaker(self, environment: EnvironmentName) -> None:
        """Forget it, if it is open."""
        self._breakers.pop(environment, None)

    def broken(self, environment: EnvironmentName, now: float) -> tuple[str, float]:
        """The message of the breaker and how much longer it is open (s); 0: it is not."""
        message, until = self._breakers.get(environment, ("", now))
        if until <= now:
            self.close_breaker(environment)
            return "", 0.0
        return message, until - now

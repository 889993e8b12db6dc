"""Implements the memory store's queue of one environment, and its heap of deadlines.

The queue holds the waiting openings, the pace of the slots, the circuit breaker and the counters. The store expires its
contents with the heap. Nothing here waits or reads a clock: the store passes the time (seconds). Each step is atomic.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gateway.core.errors import GatewayError
from gateway.core.ids import Owner, SessionId
from gateway.core.session import Session, SessionRequest
from gateway.stores.retry_after import PACE_KEPT_S, mean, retry_after


@dataclass(slots=True, eq=False)
class QueueTicket:
    """A place in an environment's queue. It is settled once, with a session or with the error that the claim raises."""

    opening: SessionRequest
    settled: asyncio.Future[Session | GatewayError]
    number: int
    """Serial number, in order of arrival."""
    until: float
    """The time at which the wait ends."""


@dataclass(slots=True)
class _Line:
    """The openings of one owner in a queue, in order of arrival; never empty."""

    round: int
    """The round in which the first opening is served."""
    # An OrderedDict, because a plain dict scans all its deleted entries to find its first key.
    tickets: OrderedDict[SessionId, QueueTicket] = field(default_factory=OrderedDict)

    @property
    def first(self) -> QueueTicket:
        return next(iter(self.tickets.values()))


class Queue:
    """Openings that wait for one environment. Owners take turns, in each round in order of arrival.

    This is start-time fair queueing with equal weights. An owner without a queued opening joins the round after the
    current round, or the round of its next turn if that is later. So an owner gains nothing by leaving and returning.
    """

    def __init__(self, queue_max: int) -> None:
        """*queue_max*: maximum number of waiting openings, with an exception for new owners (see `is_full`)."""
        self.served_at = 0.0
        """The time at which a waiting opening last got a slot, or at which the empty queue got its first opening."""
        self.arrivals = 0
        self.hits = 0
        self._queue_max = queue_max
        self._lines: dict[Owner, _Line] = {}
        #: The round of the next turn of owners that have left the queue.
        self._next_rounds: dict[Owner, int] = {}
        self._round = 0
        self._waiting = 0
        #: Seconds between two slots, and the time of the last slot.
        self._pace: tuple[float, float] | None = None
        self._breaker = ("", 0.0)

    def __len__(self) -> int:
        return self._waiting

    def is_full(self, owner: Owner) -> bool:
        """Return True if *owner* gets no place. An owner without a queued opening gets one up to twice the limit."""
        return self._waiting >= (self._queue_max if owner in self._lines else 2 * self._queue_max)

    def enter(self, ticket: QueueTicket, now: float) -> None:
        """Append *ticket* to its owner's line."""
        if not self._waiting:
            self.served_at = now
        owner = ticket.opening.owner
        line = self._lines.get(owner)
        if line is None:
            line = self._lines[owner] = _Line(max(self._round + 1, self._next_rounds.pop(owner, 0)))
        line.tickets[ticket.opening.id] = ticket
        self._waiting += 1

    def leave(self, ticket: QueueTicket) -> None:
        """Remove *ticket*. The owner's round stays the same."""
        line = self._lines[ticket.opening.owner]
        del line.tickets[ticket.opening.id]
        self._waiting -= 1
        if not line.tickets:
            del self._lines[ticket.opening.owner]
            self._next_rounds[ticket.opening.owner] = line.round
        if not self._waiting:
            self._next_rounds.clear()

    def serve(self, tickets: Sequence[QueueTicket], absent: int, now: float) -> None:
        """Remove *tickets* of one owner. Each ticket, and each of *absent* members of their group, uses one turn."""
        self.served_at = now
        line = self._lines[tickets[0].opening.owner]
        self._round = max(self._round, line.round)
        # From the present round on: an owner that was passed over at its limit does not make up for these rounds.
        line.round = self._round + len(tickets) + absent
        for ticket in tickets:
            self.leave(ticket)

    def firsts(self) -> list[QueueTicket]:
        """Return the first ticket of each owner, in the order in which they are served."""
        # A sort of the owners, because each turn would reorder a heap. An owner is an API key, so there are few.
        lines = sorted(self._lines.values(), key=lambda line: (line.round, line.first.number))
        return [line.first for line in lines]

    def of(self, owner: Owner) -> list[QueueTicket]:
        """Return the waiting tickets of *owner*, in order of arrival."""
        line = self._lines.get(owner)
        return [] if line is None else list(line.tickets.values())

    def first_number(self, owner: Owner) -> int | None:
        """Return the serial number of the owner's first ticket; None if the owner has no ticket."""
        line = self._lines.get(owner)
        return None if line is None else line.first.number

    def tickets(self) -> list[QueueTicket]:
        """Return all waiting tickets, owner by owner."""
        return [ticket for line in self._lines.values() for ticket in line.tickets.values()]

    # -- pace ---------------------------------------------------------------------------------------------------

    def note_pace(self, since: float, slots: int, now: float) -> None:
        """Update the pace: waiting openings got *slots* slots since the time *since*."""
        self._pace = mean(self._pace_s(now), (now - since) / slots, slots), now

    def retry_after_s(self, opening: SessionRequest, now: float) -> float:
        """Return the estimated seconds until *opening* gets a slot, queued or not; 0 if the pace is unknown."""
        return retry_after(self._place(opening), self._pace_s(now))

    def _pace_s(self, now: float) -> float | None:
        return self._pace[0] if self._pace is not None and now - self._pace[1] < PACE_KEPT_S else None

    def _place(self, opening: SessionRequest) -> int:
        """Return the latest place in the service order that *opening* has, or would have, as owners take turns."""
        line = self._lines.get(opening.owner)
        tickets = () if line is None else line.tickets
        if opening.id not in tickets:
            owners = len(self._lines) + (line is None)
            return min(self._waiting + 1, (len(tickets) + 1) * owners)
        # A scan, mostly of one step: the openings whose wait is over arrived first.
        own = next(place for place, id in enumerate(tickets, start=1) if id == opening.id)
        return min(self._waiting, own * len(self._lines))

    # -- breaker ------------------------------------------------------------------------------------------------

    def open_breaker(self, message: str, until: float) -> None:
        """Open the circuit breaker up to the time *until*. Openings fail with *message*."""
        self._breaker = message, until

    def close_breaker(self) -> None:
        """Close the circuit breaker. Do nothing if it is closed."""
        self._breaker = "", 0.0

    def broken(self, now: float) -> tuple[str, float]:
        """Return the circuit breaker's message and the seconds for which it stays open; 0 seconds if it is closed."""
        message, until = self._breaker
        return (message, until - now) if until > now else ("", 0.0)


K = TypeVar("K", bound=Hashable)

SLACK = 64
"""Stale heap entries allowed, in addition to one per key, before `Deadlines` rebuilds the heap."""


class Deadlines(Generic[K]):
    """A set of keys with one deadline each, in seconds of the caller's clock.

    Sessions are renewed far more often than they end. So a later deadline costs a dictionary write, not a heap entry:
    `pop` moves an entry that comes up too early.
    """

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        #: Each key has an entry at or before its deadline. `pop` skips stale entries.
        self._heap: list[tuple[float, K]] = []

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: object) -> bool:
        return key in self._at

    def at(self, key: K) -> float:
        """Return the deadline of *key*. Raises ``KeyError`` if it has no deadline."""
        return self._at[key]

    def set(self, key: K, at: float) -> None:
        """Set the deadline of *key* to *at*, earlier or later than its previous deadline."""
        before = self._at.get(key)
        self._at[key] = at
        if before is None or at < before:
            self._push(key, at)

    def discard(self, key: K) -> None:
        """Remove *key*. Do nothing if it has no deadline."""
        self._at.pop(key, None)

    def pop(self, now: float) -> tuple[K, float] | None:
        """Remove and return the earliest key whose deadline is not after *now*, with its deadline; else return None."""
        while self._heap and self._heap[0][0] <= now:
            listed, key = heapq.heappop(self._heap)
            at = self._at.get(key)
            if at is not None and listed < at:
                self._push(key, at)
            elif at is not None:
                del self._at[key]
                return key, at
        return None

    def _push(self, key: K, at: float) -> None:
        if len(self._heap) > 2 * len(self._at) + SLACK:
            self._heap = [(due, other) for other, due in self._at.items() if other != key]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (at, key))

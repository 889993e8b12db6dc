"""The queue of one environment in one process: openings that wait, the pace of its slots, its breaker and its counts;
and the heap of deadlines by which the memory store expires what it holds.

Nothing here waits or reads a clock: the store passes the time (seconds), and each of its steps is atomic.
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
    """A place in the queue of an environment; settled once, with a session or with what the claim raises."""

    opening: SessionRequest
    settled: asyncio.Future[Session | GatewayError]
    number: int
    """Tickets count up in the order of their arrival."""
    until: float
    """When its wait ends."""


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
    """Openings that wait for one environment: owners take turns, in each round in the order of arrival.

    Start-time fair queueing where all owners weigh the same: one that has nothing in the queue joins the round after
    the one that is being served, so it gains nothing by leaving and coming back.
    """

    def __init__(self, queue_max: int) -> None:
        """*queue_max*: openings that may wait, but for the first of an owner (see `is_full`)."""
        self.served_at = 0.0
        """When the last slot went to an opening that waited here; at first, when the queue began."""
        self.arrivals = 0
        self.hits = 0
        self._queue_max = queue_max
        self._lines: dict[Owner, _Line] = {}
        self._round = 0
        self._waiting = 0
        #: Seconds between two slots, and when the last one of them came.
        self._pace: tuple[float, float] | None = None
        self._breaker = ("", 0.0)

    def __len__(self) -> int:
        return self._waiting

    def is_full(self, owner: Owner) -> bool:
        """Return True if *owner* finds no place; in a full queue, an owner that has none still finds one."""
        return self._waiting >= (self._queue_max if owner in self._lines else 2 * self._queue_max)

    def enter(self, ticket: QueueTicket, now: float) -> None:
        """Put *ticket* behind those of its owner."""
        if not self._waiting:
            self.served_at = now
        line = self._lines.setdefault(ticket.opening.owner, _Line(self._round + 1))
        line.tickets[ticket.opening.id] = ticket
        self._waiting += 1

    def leave(self, ticket: QueueTicket) -> None:
        """Take *ticket* out; those behind it keep their owner's round."""
        line = self._lines[ticket.opening.owner]
        del line.tickets[ticket.opening.id]
        self._waiting -= 1
        if not line.tickets:
            del self._lines[ticket.opening.owner]

    def serve(self, tickets: Sequence[QueueTicket], now: float) -> None:
        """Take *tickets* out, the `first` and others of its owner: each was a turn of that."""
        self.served_at = now
        line = self._lines[tickets[0].opening.owner]
        self._round = line.round
        line.round += len(tickets)
        for ticket in tickets:
            self.leave(ticket)

    def first(self) -> QueueTicket | None:
        """Return the ticket whose turn it is."""
        # A walk over the owners instead of a heap that each turn reorders: an owner is an API key.
        lines = self._lines.values()
        line = min(lines, key=lambda line: (line.round, line.first.number), default=None)
        return None if line is None else line.first

    def tickets(self) -> list[QueueTicket]:
        """Return all that wait."""
        return [ticket for line in self._lines.values() for ticket in line.tickets.values()]

    # -- pace ---------------------------------------------------------------------------------------------------

    def note_pace(self, since: float, slots: int, now: float) -> None:
        """Remember that *slots* slots came since the moment *since*."""
        self._pace = mean(self._pace_s(now), (now - since) / slots, slots), now

    def retry_after_s(self, opening: SessionRequest, now: float) -> float:
        """Return the seconds in which *opening* may find a slot, where it is or would be; 0 if that is not known."""
        return retry_after(self._place(opening), self._pace_s(now))

    def _pace_s(self, now: float) -> float | None:
        return self._pace[0] if self._pace is not None and now - self._pace[1] < PACE_KEPT_S else None

    def _place(self, opening: SessionRequest) -> int:
        """Return the place at which *opening* is served at the latest, as owners take turns; or would be."""
        line = self._lines.get(opening.owner)
        tickets = () if line is None else line.tickets
        if opening.id not in tickets:
            owners = len(self._lines) + (line is None)
            return min(self._waiting + 1, (len(tickets) + 1) * owners)
        # A walk, mostly of one step: those whose wait is over came first.
        own = next(place for place, id in enumerate(tickets, start=1) if id == opening.id)
        return min(self._waiting, own * len(self._lines))

    # -- breaker ------------------------------------------------------------------------------------------------

    def open_breaker(self, message: str, until: float) -> None:
        """Keep why openings fail, up to the moment *until*."""
        self._breaker = message, until

    def close_breaker(self) -> None:
        """Forget it, if it is open."""
        self._breaker = "", 0.0

    def broken(self, now: float) -> tuple[str, float]:
        """Return the message of the breaker and the seconds for which it stays open; 0: it is not open."""
        message, until = self._breaker
        return message, max(0.0, until - now)


K = TypeVar("K", bound=Hashable)

SLACK = 64
"""Stale heap entries that are tolerated besides as many as there are keys, before the heap is built anew."""


class Deadlines(Generic[K]):
    """A set of keys with one deadline each; moments are seconds of the owner's clock.

    A deadline that moves later costs a dictionary write, not a heap entry: sessions are renewed far more often than
    they end, so an entry that comes up too early is pushed back only when it is looked at.
    """

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        #: Each key has an entry that is no later than its deadline; `pop` skips stale entries.
        self._heap: list[tuple[float, K]] = []

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: object) -> bool:
        return key in self._at

    def at(self, key: K) -> float:
        """The deadline of *key*; KeyError if it has none."""
        return self._at[key]

    def set(self, key: K, at: float) -> None:
        """Give *key* the deadline *at*, earlier or later than what it had."""
        before = self._at.get(key)
        self._at[key] = at
        if before is None or at < before:
            self._push(key, at)

    def discard(self, key: K) -> None:
        """Forget *key*, if it is known."""
        self._at.pop(key, None)

    def pop(self, now: float) -> tuple[K, float] | None:
        """Take out the earliest key whose deadline is not after *now*, with the deadline; None if there is none."""
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

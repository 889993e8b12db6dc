"""Counts the sessions of each owner, and books the starts of its openings, for the memory store.

Nothing here waits or reads a clock: the store passes the time (seconds).
"""

from __future__ import annotations

from collections import Counter

from gateway.core.ids import EnvironmentName, Owner
from gateway.core.session import Session, SessionRequest
from gateway.stores.limits import reached, room, too_fast
from gateway.stores.memory.queue import Deadlines


class Owners:
    """The owners of the sessions of one process. Owners without sessions and booked starts take no memory."""

    def __init__(self) -> None:
        self._held: Counter[Owner] = Counter()
        self._held_here: Counter[tuple[EnvironmentName, Owner]] = Counter()
        #: The time at which each owner has used up its booked starts.
        self._booked_until: Deadlines[Owner] = Deadlines()

    def add(self, session: Session) -> None:
        """Count *session*, which holds a slot from now on."""
        self._held[session.owner] += 1
        self._held_here[session.environment, session.owner] += 1

    def remove(self, session: Session) -> None:
        """Stop counting *session*, which holds no slot any more."""
        self._held[session.owner] -= 1
        if not self._held[session.owner]:
            del self._held[session.owner]
        here = (session.environment, session.owner)
        self._held_here[here] -= 1
        if not self._held_here[here]:
            del self._held_here[here]

    def room(self, opening: SessionRequest) -> int:
        """Return the number of further sessions that the limits of *opening* allow its owner."""
        return room(opening, *self._counts(opening))

    def reached(self, opening: SessionRequest, *, need: int = 1) -> str:
        """Return the message of the limit that allows fewer than *need* further sessions, or an empty string."""
        return reached(opening, *self._counts(opening), need=need)

    def book(self, owner: Owner, now: float, *, per_s: float, within_s: float) -> float:
        """Book a start as ``SessionStore.pace`` (generic cell rate algorithm with one time for each owner)."""
        while self._booked_until.pop(now) is not None:
            pass
        until = self._booked_until.at(owner) if owner in self._booked_until else now
        burst_s = (max(1.0, per_s) - 1) / per_s
        # Whole microseconds, because the sum of many intervals has a rounding error.
        wait_s = round(max(0.0, until - now - burst_s), 6)
        if wait_s > within_s:
            raise too_fast(owner, per_s, wait_s, within_s)
        self._booked_until.set(owner, until + 1 / per_s)
        return wait_s

    def _counts(self, opening: SessionRequest) -> tuple[int, int]:
        return self._held[opening.owner], self._held_here[opening.environment, opening.owner]

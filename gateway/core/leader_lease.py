"""The leader's lease: the time for which a replica may act as the leader of the control loop."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, Protocol

from gateway.core.errors import NotLeading

LEASE_S: Final = 3.0
"""Seconds that a lead lasts without renewal. If a leader dies, another replica replaces it after this time."""


class Follower(Protocol):
    """A part of the gateway that acts when its replica becomes the leader."""

    def leads(self) -> None:
        """Handle that this replica has become the leader."""


class LeaderLease:
    """Tracks whether this replica leads, and until when. `check` may be called in any thread.

    The store's fence refuses the writes of a former leader. A container engine has no fence. A leader that was frozen
    or disconnected must therefore send the engine no request after its lease has ended. By then its successor has given
    the places of its unfinished starts to other workers.
    """

    def __init__(self, lead: Lead | None = None) -> None:
        """Hold *lead* from now on, if it is given; by default this replica does not lead."""
        self.lead = Lead(0)
        self._ends_at = 0.0
        self._followers: list[Follower] = []
        if lead is not None:
            self.renew(lead, asked_at=time.monotonic())

    @property
    def fence(self) -> int:
        """The fence of the lead; 0 while another replica leads."""
        return self.lead.fence

    def follow(self, follower: Follower) -> None:
        """Notify *follower* each time that this replica becomes the leader."""
        self._followers.append(follower)

    def renew(self, lead: Lead, *, asked_at: float) -> bool:
        """Record the store's answer to a request for a lead of `LEASE_S`, sent at *asked_at* (s, monotonic clock).

        Returns:
            True if this replica has just become the leader.
        """
        before, self.lead = self.lead, lead
        # Counts from before the request, because the store's own period began after it.
        self._ends_at = asked_at + LEASE_S if lead.fence else 0.0
        is_new = bool(lead.fence) and lead.fence != before.fence
        for follower in self._followers if is_new else ():
            follower.leads()
        return is_new

    def check(self) -> None:
        """Raise ``NotLeading`` if the lease has ended, as far as this replica can know without querying the store."""
        if time.monotonic() > self._ends_at:
            raise NotLeading("the lease of this replica on the control loop has ended")


@dataclass(frozen=True, slots=True)
class Lead:
    """A replica's role in the control loop."""

    fence: int
    """0: another replica leads. Otherwise the number of this lead, which is higher for each new leader. The store
    refuses writes with an older number."""
    is_whole: bool = True
    """False after the store lost data. No decision may then rely on missing entries until the leader has rebuilt the
    store."""

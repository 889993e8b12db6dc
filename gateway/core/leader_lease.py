"""The time for which a replica may act as the leader of the control loop."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, Protocol

from gateway.core.errors import NotLeading

LEASE_S: Final = 3.0
"""How long a lead lasts unless it is renewed: a leader that died is replaced after this long."""


class Follower(Protocol):
    """A part of the gateway that has something to do when its replica begins to lead."""

    def leads(self) -> None:
        """This replica leads from now on."""


class LeaderLease:
    """Whether this replica leads, and until when. `check` may be called in any thread.

    The store's fence refuses the writes of a replica that leads no more. A container engine knows no fence, so a leader
    that was frozen or cut off must not ask it for anything once its lease has ended: its successor has given the place
    of what it was starting to another worker.
    """

    def __init__(self, lead: Lead | None = None) -> None:
        """*lead*: one that holds from now on; by default this replica does not lead."""
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
        """Notify *follower* from now on when this replica begins to lead."""
        self._followers.append(follower)

    def renew(self, lead: Lead, *, asked_at: float) -> bool:
        """Note the store's answer to a request of *asked_at* (s, monotonic clock) for a lead of `LEASE_S`.

        Returns True if this replica begins to lead.
        """
        before, self.lead = self.lead, lead
        # From before the request: the store's own period began after it.
        self._ends_at = asked_at + LEASE_S if lead.fence else 0.0
        is_new = bool(lead.fence) and lead.fence != before.fence
        for follower in self._followers if is_new else ():
            follower.leads()
        return is_new

    def check(self) -> None:
        """Raise ``NotLeading`` if the lease has ended, as far as this replica can know without asking the store."""
        if time.monotonic() > self._ends_at:
            raise NotLeading("the lease of this replica on the control loop has ended")


@dataclass(frozen=True, slots=True)
class Lead:
    """What a replica is to the control loop."""

    fence: int
    """0: another replica leads. Else the number of this lead: each new leader's is higher, and what an old one still
    wants to change is refused."""
    is_whole: bool = True
    """Whether the store holds everything. False after it lost data: nothing may be decided from what it lacks until
    the leader has rebuilt it."""

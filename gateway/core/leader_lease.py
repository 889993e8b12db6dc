"""The time for which a replica may act as the leader of the control loop."""

from __future__ import annotations

import time
from typing import Final

from gateway.core.errors import NotLeading
from gateway.core.model import Lead

LEASE_S: Final = 3.0
"""How long a lead lasts unless it is renewed: a leader that died is replaced after this long."""


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
        if lead is not None:
            self.renew(lead, asked_at=time.monotonic())

    @property
    def fence(self) -> int:
        """The fence of the lead; 0 while another replica leads."""
        return self.lead.fence

    def renew(self, lead: Lead, *, asked_at: float) -> None:
        """Note the store's answer to a request of *asked_at* (s, monotonic clock) for a lead of `LEASE_S`."""
        self.lead = lead
        # From before the request: the store's own period began after it.
        self._ends_at = asked_at + LEASE_S if lead.fence else 0.0

    def check(self) -> None:
        """Raise ``NotLeading`` if the lease has ended, as far as this replica can know without asking the store."""
        if time.monotonic() > self._ends_at:
            raise NotLeading("the lease of this replica on the control loop has ended")

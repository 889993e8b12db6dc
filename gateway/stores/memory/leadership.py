"""Who leads the control loop, and whether the store holds everything, where both are one process' own."""

from __future__ import annotations

from gateway.core.errors import NotLeading, StoreUnavailable
from gateway.core.leader_lease import Lead


class MemoryLeadership:
    """One leader at a time, by a number that grows with each new lead; and whether the store is whole."""

    def __init__(self, *, is_whole: bool) -> None:
        self.is_whole = is_whole
        self._replica = ""
        self._until = 0.0
        self._fence = 0
        self._owner = ""

    def own(self, owner: str, now: float, *, takes_over: bool) -> str:
        """Claim the store for *owner*, as the first one, or *takes_over* while nobody leads; returns whose it is."""
        if not self._owner or (takes_over and now >= self._until):
            self._owner = owner
        return self._owner

    def lead(self, replica: str, now: float, *, ttl_s: float) -> Lead:
        """Become or stay the leader until *now* + *ttl_s*, if no other replica is."""
        leads = now < self._until
        if leads and self._replica != replica:
            return Lead(fence=0, is_whole=self.is_whole)
        if not leads:
            self._fence += 1
        self._replica, self._until = replica, now + ttl_s
        return Lead(fence=self._fence, is_whole=self.is_whole)

    def resign(self, replica: str) -> None:
        """End *replica*'s lead, if it leads."""
        if self._replica == replica:
            self._until = 0.0

    def check(self, fence: int) -> None:
        """Raise ``NotLeading`` if *fence* is that of a lead that was followed by another; 0 never is."""
        if 0 < fence < self._fence:
            raise NotLeading("another replica leads the control loop by now")

    def check_whole(self) -> None:
        """Raise ``StoreUnavailable`` where "it is not there" can't be said."""
        if not self.is_whole:
            raise StoreUnavailable("the store is being rebuilt")

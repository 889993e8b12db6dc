"""Groups of openings that begin together, as one process remembers them.

The first of a group takes slots for all of them, or waits until there are as many; those that others have not come for
yet are reserved. Nothing here waits or reads a clock: the store calls it with the time (seconds).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gateway.core.ids import EnvironmentName, SessionId, WorkerId
from gateway.core.session import SessionRequest
from gateway.stores.memory.queue import Deadlines, QueueTicket
from gateway.stores.retry_after import GROUP_KEPT_S, LAST_CALL_S


@dataclass(slots=True)
class _Group:
    """What is known of one group."""

    environment: EnvironmentName
    granted: int = 0
    """Openings that were granted a slot."""
    reserved: int = 0
    """Free slots that are kept for openings that have not come yet."""
    home: WorkerId | None = None
    """The worker in which all of these are, if it is one."""
    kept_since: float | None = None
    """Since when slots are kept free while it waits for more of them."""
    is_parted: bool = False
    """Its time is over: whoever comes from now on is by itself."""
    tickets: OrderedDict[SessionId, QueueTicket] = field(default_factory=OrderedDict)
    """Those that wait, in order of arrival."""


class Groups:
    """All groups of all environments."""

    def __init__(self) -> None:
        self.by_id: dict[str, _Group] = {}
        """Those that are remembered, wait, or have slots reserved."""
        self._kept_until: Deadlines[str] = Deadlines()
        self.reserved: Counter[EnvironmentName] = Counter()
        """Slots that are kept for groups, by environment."""
        self._reserved_until: Deadlines[str] = Deadlines()
        self.reserved_in: Counter[WorkerId] = Counter()
        """The same by worker, of groups that begin in one."""

    def wanted(self, opening: SessionRequest) -> int:
        """How many of its group have no slot yet, by what its size says; at least itself."""
        group = self.by_id.get(opening.group)
        if group is not None and group.is_parted:
            return 1
        return max(1, opening.group_size - (group.granted if group else 0))

    def waiting(self, opening: SessionRequest) -> list[QueueTicket]:
        """Those of its group that wait."""
        group = self.by_id.get(opening.group)
        return list(group.tickets.values()) if group else []

    def to_come(self, environment: EnvironmentName, waiting: Sequence[QueueTicket]) -> int:
        """Count openings of groups that slots are reserved for, or that join the tickets that are *waiting*."""
        count = self.reserved[environment]
        # Reversed: the first opening of each group says how many it is.
        firsts = {ticket.opening.group: ticket.opening for ticket in reversed(waiting) if ticket.opening.group}
        for opening in firsts.values():
            count += max(0, self.wanted(opening) - len(self.waiting(opening)))
        return count

    def enter(self, ticket: QueueTicket) -> None:
        """*ticket*, if it is of a group, waits for as many slots as that needs, whatever was kept for it."""
        opening = ticket.opening
        if opening.group:
            group = self._of(opening)
            group.tickets[opening.id] = ticket
            self._reserve(opening.group, group, 0)

    def leave(self, ticket: QueueTicket) -> None:
        """*ticket* does not wait any more."""
        id = ticket.opening.group
        group = self.by_id.get(id)
        if group is not None and group.tickets.get(ticket.opening.id) is ticket:
            del group.tickets[ticket.opening.id]
            self._end(id, group)

    def take_reserved(self, opening: SessionRequest) -> tuple[bool, WorkerId | None]:
        """Whether a slot was reserved for *opening*, which then it is no more; and the worker it is in, if known."""
        group = self.by_id.get(opening.group)
        if group is None or not group.reserved:
            return False, None
        home = group.home
        self._reserve(opening.group, group, group.reserved - 1)
        return True, home

    def granted(self, opening: SessionRequest, now: float) -> None:
        """*opening* has a slot; no more stays reserved for its group than can still come."""
        group = self._remember(opening, now)
        group.granted += 1
        self._reserve(opening.group, group, min(group.reserved, max(0, opening.group_size - group.granted)))

    def reserve(self, opening: SessionRequest, count: int, now: float, home: WorkerId | None) -> None:
        """Keep *count* slots for those of the group of *opening* that have not come yet; *home*: all in that worker."""
        if count > 0:
            self._of(opening).home = home
            self._reserve(opening.group, self._of(opening), count)
            self._reserved_until.set(opening.group, now + opening.together_s)

    def is_impatient(self, opening: SessionRequest, last_call: float, now: float) -> bool:
        """Whether its group, first in the queue, has waited long enough for slots that others could have had.

        *last_call*: when the wait of one of them ends.
        """
        if last_call - now <= LAST_CALL_S:
            return True
        group = self._remember(opening, now)
        if group.kept_since is None:
            group.kept_since = now
        return now - group.kept_since >= opening.together_s

    def part(self, opening: SessionRequest, now: float) -> None:
        """Let those of its group that have no slot yet be by themselves."""
        self._remember(opening, now).is_parted = True

    def let_go(self, now: float) -> Iterator[EnvironmentName]:
        """Forget old groups, and what was reserved for those that did not come in time; the environments of that."""
        while (passed := self._reserved_until.pop(now)) is not None:
            group = self.by_id[passed[0]]
            group.is_parted = True
            self._kept_until.set(passed[0], now + GROUP_KEPT_S)
            self._reserve(passed[0], group, 0)
            yield group.environment
        while (passed := self._kept_until.pop(now)) is not None:
            group = self.by_id[passed[0]]
            group.granted, group.kept_since, group.is_parted = 0, None, False
            self._end(passed[0], group)

    def _of(self, opening: SessionRequest) -> _Group:
        return self.by_id.setdefault(opening.group, _Group(opening.environment))

    def _remember(self, opening: SessionRequest, now: float) -> _Group:
        self._kept_until.set(opening.group, now + GROUP_KEPT_S)
        return self._of(opening)

    def _reserve(self, id: str, group: _Group, count: int) -> None:
        self.reserved[group.environment] += count - group.reserved
        if group.home is not None:
            self.reserved_in[group.home] += count - group.reserved
        group.reserved = count
        if not count:
            if group.home is not None and not self.reserved_in[group.home]:
                del self.reserved_in[group.home]
            group.home = None
            self._reserved_until.discard(id)
            self._end(id, group)

    def _end(self, id: str, group: _Group) -> None:
        if not group.tickets and not group.reserved and id not in self._kept_until:
            self.by_id.pop(id, None)

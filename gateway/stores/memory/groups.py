"""Tracks groups of openings that start together, for the memory store.

The first opening of a group takes slots for all members, or waits until enough slots are free. Slots of members that
have not arrived yet are reserved. A key whose group kept slots from others, and of which less than half came, loses
this privilege for `UNFILLED_S`: its openings start individually. Nothing here waits or reads a clock: the store passes
the time (seconds).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.session import SessionRequest
from gateway.stores.memory.queue import Deadlines, QueueTicket
from gateway.stores.retry_after import GROUP_KEPT_S, LAST_CALL_S, UNFILLED_S


@dataclass(slots=True)
class _Group:
    """The grants, reservations and waiting tickets of one group."""

    environment: EnvironmentName
    owner: Owner
    granted: int = 0
    """Number of openings that were granted a slot."""
    reserved: int = 0
    """Number of free slots reserved for members that have not arrived yet."""
    home: WorkerId | None = None
    """The worker that holds all reserved slots; None if they are in several workers."""
    kept_since: float | None = None
    """The time since which slots stay free while the group waits for more."""
    is_parted: bool = False
    """True once the group's time is over. A later opening of the group gets its slot separately."""
    tickets: OrderedDict[SessionId, QueueTicket] = field(default_factory=OrderedDict)
    """The waiting members, in order of arrival."""
    came: int = 0
    """Largest number of members that had come at any time since ``kept_since``."""


class Groups:
    """All groups of all environments in one process."""

    def __init__(self) -> None:
        self.by_id: dict[str, _Group] = {}
        """The groups that had a recent grant, have waiting members, or have reserved slots."""
        self._kept_until: Deadlines[str] = Deadlines()
        self.reserved: Counter[EnvironmentName] = Counter()
        """Number of slots reserved for groups, by environment."""
        self._reserved_until: Deadlines[str] = Deadlines()
        self.reserved_in: Counter[WorkerId] = Counter()
        """Number of reserved slots by worker, for groups whose slots are all in one worker."""
        self._unfilled_until: dict[Owner, float] = {}
        """The time until which openings of a key start individually: less than half of a group of the key came."""

    def is_unprivileged(self, opening: SessionRequest, now: float) -> bool:
        """Return True if *opening*, the first of its group, starts individually."""
        return opening.group not in self.by_id and self._unfilled_until.get(opening.owner, now) > now

    def is_gathering(self, opening: SessionRequest) -> bool:
        """Return True while less than half of the opening's group has come. Other keys then take free slots."""
        group = self.by_id.get(opening.group)
        return group is not None and not group.is_parted and 2 * _come(group) < opening.group_size

    def wanted(self, opening: SessionRequest) -> int:
        """Return the number of slots that *opening* needs: those of its group's members without one, itself included.

        An opening without a group, of a parted group or of one with reserved slots needs 1.
        """
        group = self.by_id.get(opening.group)
        if not opening.group or (group is not None and (group.is_parted or group.reserved)):
            return 1
        return max(1, opening.group_size - (group.granted if group else 0))

    def waiting(self, opening: SessionRequest) -> list[QueueTicket]:
        """Return the waiting tickets of the opening's group, in order of arrival."""
        group = self.by_id.get(opening.group)
        return list(group.tickets.values()) if group else []

    def to_come(self, environment: EnvironmentName, waiting: Sequence[QueueTicket]) -> int:
        """Count group members that have not arrived: those with reserved slots, and those of the *waiting* groups."""
        return self.reserved[environment] + self.missing(waiting)

    def missing(self, waiting: Sequence[QueueTicket]) -> int:
        """Return the number of members that have not arrived, of the groups of the *waiting* tickets."""
        # Reversed, so that the first opening of each group sets its size.
        firsts = {ticket.opening.group: ticket.opening for ticket in reversed(waiting) if ticket.opening.group}
        return sum(max(0, self.wanted(opening) - len(self.waiting(opening))) for opening in firsts.values())

    def enter(self, ticket: QueueTicket) -> None:
        """Add *ticket* to its group, if it has one. The group waits for all its slots, so its reservation ends."""
        opening = ticket.opening
        if opening.group:
            group = self._of(opening)
            group.tickets[opening.id] = ticket
            if group.kept_since is not None:
                group.came = max(group.came, _come(group))
            self._reserve(opening.group, group, 0)

    def leave(self, ticket: QueueTicket) -> None:
        """Remove *ticket*, which no longer waits, from its group."""
        id = ticket.opening.group
        group = self.by_id.get(id)
        if group is not None and group.tickets.get(ticket.opening.id) is ticket:
            del group.tickets[ticket.opening.id]
            self._end(id, group)

    def abandon(self, ticket: QueueTicket, now: float) -> None:
        """Note that *ticket*, perhaps the last of its group, has left the queue without a slot.

        If less than half of the group came while it kept slots from others, the key loses its privilege.
        """
        opening = ticket.opening
        group = self.by_id.get(opening.group)
        if group is not None and not group.tickets and group.kept_since is not None and not group.is_parted:
            self._note_unfilled(opening.owner, 2 * group.came < opening.group_size, now)

    def take_reserved(self, opening: SessionRequest) -> tuple[bool, WorkerId | None]:
        """Use up a slot reserved for the group of *opening*. Return whether there was one, and its worker if known."""
        group = self.by_id.get(opening.group)
        if group is None or not group.reserved:
            return False, None
        home = group.home
        self._reserve(opening.group, group, group.reserved - 1)
        return True, home

    def granted(self, opening: SessionRequest, now: float) -> None:
        """Count the slot of *opening*, and reduce its group's reservation to the members that can still arrive."""
        group = self._remember(opening, now)
        group.granted += 1
        self._reserve(opening.group, group, min(group.reserved, max(0, opening.group_size - group.granted)))

    def reserve(self, opening: SessionRequest, count: int, now: float, home: WorkerId | None) -> None:
        """Reserve *count* slots for missing members of the group of *opening*, all in the worker *home* if given."""
        if count > 0:
            self._of(opening).home = home
            self._reserve(opening.group, self._of(opening), count)
            self._reserved_until.set(opening.group, now + opening.together_s)

    def is_impatient(self, opening: SessionRequest, last_call: float, now: float) -> bool:
        """Return True if the opening's group, first in the queue, has kept free slots from other openings long enough.

        *last_call*: the earliest end of a member's wait.
        """
        if last_call - now <= LAST_CALL_S:
            return True
        group = self._remember(opening, now)
        if group.kept_since is None:
            group.kept_since, group.came = now, _come(group)
        return now - group.kept_since >= opening.together_s

    def part(self, opening: SessionRequest, absent: int, now: float) -> None:
        """End the opening's group, of which *absent* members did not come. The others get their slots separately."""
        group = self._remember(opening, now)
        group.is_parted = True
        self._note_unfilled(opening.owner, absent > _come(group) and group.kept_since is not None, now)

    def let_go(self, now: float) -> Iterator[EnvironmentName]:
        """End expired reservations and forget old groups. Yield the environments whose reserved slots became free."""
        while (passed := self._reserved_until.pop(now)) is not None:
            group = self.by_id[passed[0]]
            group.is_parted = True
            self._note_unfilled(group.owner, group.reserved > _come(group), now)
            self._kept_until.set(passed[0], now + GROUP_KEPT_S)
            self._reserve(passed[0], group, 0)
            yield group.environment
        while (passed := self._kept_until.pop(now)) is not None:
            group = self.by_id[passed[0]]
            group.granted, group.came, group.kept_since, group.is_parted = 0, 0, None, False
            self._end(passed[0], group)

    def _of(self, opening: SessionRequest) -> _Group:
        return self.by_id.setdefault(opening.group, _Group(opening.environment, opening.owner))

    def _note_unfilled(self, owner: Owner, is_unfilled: bool, now: float) -> None:
        if is_unfilled:
            self._unfilled_until[owner] = now + UNFILLED_S

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


def _come(group: _Group) -> int:
    return group.granted + len(group.tickets)

"""The draws of one curriculum in a gateway that is one process: which handle stands for which, and who has a place.

No method awaits, so each is atomic on the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.ports.curricula import Drawn, Turn
from gateway.stores.memory.expiry_heap import Deadlines

_Member = tuple[int, str]
"""A handle, and the opening that has a place in one of its groups."""


@dataclass(frozen=True, slots=True)
class _Due:
    """A draw that is due, and the group that it is for as the last one to ask described it."""

    number: int
    group_size: int
    group_s: float


@dataclass(slots=True)
class _Group:
    """The newest group of a handle."""

    drawn: Drawn
    group_size: int
    until: float
    held: int = 0


class Draws:
    """All draws of one curriculum; moments are seconds of the caller's clock."""

    def __init__(self) -> None:
        self.number = 0
        """The next draw's."""
        self._due: dict[int, _Due] = {}
        self._groups: dict[int, _Group] = {}
        self._group_ends: Deadlines[int] = Deadlines()
        self._members: dict[_Member, Drawn] = {}
        self._member_ends: Deadlines[_Member] = Deadlines()

    def numbers(self, count: int) -> int:
        first, self.number = self.number, self.number + count
        return first

    def join(self, handle: int, member: str, *, group_size: int, group_s: float, now: float) -> Drawn | Turn:
        self._expire(now)
        if (had := self._members.get((handle, member))) is not None:
            return had
        group = self._groups.get(handle)
        if group is not None and group.held < group_size:
            return self._take(handle, member, group)
        due = self._due.get(handle)
        number = self.numbers(1) if due is None else due.number
        self._due[handle] = _Due(number, group_size, group_s)
        return Turn(number)

    def propose(self, handle: int, number: int, place: bytes, member: str, *, now: float) -> Drawn | None:
        self._expire(now)
        if (had := self._members.get((handle, member))) is not None:
            return had
        due = self._due.get(handle)
        if due is not None and due.number == number:
            del self._due[handle]
            group = _Group(Drawn(number, place), due.group_size, now + due.group_s)
            self._groups[handle] = group
            self._group_ends.set(handle, group.until)
            return self._take(handle, member, group)
        found = self._groups.get(handle)
        if found is None or found.drawn.number != number or found.held >= found.group_size:
            return None
        return self._take(handle, member, found)

    def leave(self, handle: int, member: str, *, now: float) -> None:
        self._expire(now)
        had = self._members.pop((handle, member), None)
        if had is None:
            return
        self._member_ends.discard((handle, member))
        group = self._groups.get(handle)
        if group is not None and group.drawn.number == had.number:
            group.held -= 1

    def _take(self, handle: int, member: str, group: _Group) -> Drawn:
        group.held += 1
        self._members[handle, member] = group.drawn
        self._member_ends.set((handle, member), group.until)
        return group.drawn

    def _expire(self, now: float) -> None:
        while (group := self._group_ends.pop(now)) is not None:
            del self._groups[group[0]]
        while (member := self._member_ends.pop(now)) is not None:
            del self._members[member[0]]

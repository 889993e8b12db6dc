"""Stores the curricula of a one-process gateway in dictionaries, which end with the process.

No method awaits between reading and writing, so each is atomic on the event loop.
"""

from __future__ import annotations

import math
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice, takewhile

from gateway.core.curriculum import Outcome, TaskRecord
from gateway.core.errors import InvalidRequest
from gateway.core.ids import EnvironmentName
from gateway.core.ports.curricula import (
    MAX_DEFINITION_BYTES,
    MAX_DEFINITIONS,
    MAX_DRAWN_BYTES,
    MAX_HANDLES,
    MAX_OUTCOMES,
    MAX_RECORDS,
    MAX_STATE_BYTES,
    TOLD_S,
    Drawn,
    RecordPage,
    Turn,
)
from gateway.stores.memory.queue import Deadlines

PAGE_RECORDS = 2_000
"""Maximum number of changes in one page."""
GONE_KEPT = 10_000
"""Maximum number of removed records' names kept per environment. A replica that missed more reads all records again."""
MAX_GROUP_S = 10 * 365 * 86_400.0
"""Maximum time of a group, in seconds (10 years). Longer times are cut to it."""

_VERSION = re.compile(r"(?P<epoch>[0-9a-f]+):(?P<known>[0-9]{1,15}):(?P<base>[0-9]{1,15})")


class _Book:
    """The records of one environment, with the number of the last change of each."""

    def __init__(self) -> None:
        self.epoch = uuid.uuid4().hex
        self.number = 0
        self.floor = 0
        """Number of the latest removal whose name is no longer kept."""
        self.records: dict[str, TaskRecord] = {}
        self.changed: dict[str, int] = {}
        """Number of the last change of each record, in ascending order, as in `gone`."""
        self.gone: dict[str, int] = {}

    def keep(self, record: TaskRecord) -> None:
        self.gone.pop(record.task, None)
        self.changed.pop(record.task, None)
        self.number += 1
        self.changed[record.task] = self.number
        self.records[record.task] = record

    def remove(self, task: str, *, gone_kept: int) -> bool:
        if self.records.pop(task, None) is None:
            return False
        del self.changed[task]
        self.number += 1
        self.gone[task] = self.number
        while len(self.gone) > gone_kept:
            self.floor = self.gone.pop(next(iter(self.gone)))
        return True

    def since(self, version: str, limit: int) -> RecordPage:
        reached = self._reached(version)
        known, base = reached or (0, self.number)
        live = [(number, task) for task, number in _after(self.changed, known)]
        gone = [(number, task) for task, number in _after(self.gone, max(known, base))]
        listed = list(islice(merge(live, gone), limit))
        is_last = len(listed) == len(live) + len(gone)
        known = self.number if is_last else listed[-1][0]
        return RecordPage(
            version=f"{self.epoch}:{known}:{max(known, base)}",
            is_whole=reached is None,
            is_last=is_last,
            records=[self.records[task] for _, task in listed if task in self.records],
            removed=[task for _, task in listed if task not in self.records],
        )

    def _reached(self, version: str) -> tuple[int, int] | None:
        """Return the last change that *version* includes, and the change after which its reader needs removals.

        Return None if the reader has to read all records again.
        """
        found = _VERSION.fullmatch(version)
        if found is None or found["epoch"] != self.epoch or int(found["base"]) < self.floor:
            return None
        return int(found["known"]), int(found["base"])


_Member = tuple[int, str]
"""A handle, and the name of the opening that has a place in one of the handle's groups."""


@dataclass(frozen=True, slots=True)
class _Due:
    """A draw that is due. The last opening that joined sets the size and time (s) of its group."""

    number: int
    group_size: int
    group_s: float


@dataclass(slots=True)
class _DrawGroup:
    """The newest group of a handle: its draw, its size, its end and its number of members."""

    drawn: Drawn
    group_size: int
    until: float
    held: int = 0


class _Draws:
    """All draws of one curriculum. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self.number = 0
        """Number of the next draw."""
        self._due: dict[int, _Due] = {}
        self._groups: dict[int, _DrawGroup] = {}
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
            group = _DrawGroup(Drawn(number, place), due.group_size, now + due.group_s)
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

    def _take(self, handle: int, member: str, group: _DrawGroup) -> Drawn:
        group.held += 1
        self._members[handle, member] = group.drawn
        self._member_ends.set((handle, member), group.until)
        return group.drawn

    def _expire(self, now: float) -> None:
        while (group := self._group_ends.pop(now)) is not None:
            del self._groups[group[0]]
        while (member := self._member_ends.pop(now)) is not None:
            del self._members[member[0]]


class MemoryCurriculumStore:
    """Curricula of one process; implements ``core.ports.curricula.CurriculumStore``."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] | None = None,
        max_records: int = MAX_RECORDS,
        max_handles: int = MAX_HANDLES,
        max_definitions: int = MAX_DEFINITIONS,
        page_records: int = PAGE_RECORDS,
        gone_kept: int = GONE_KEPT,
    ) -> None:
        """Create an empty store. Only tests set lower limits.

        *clock*: Unix time (s) that never goes back. The default is `steady_clock`.
        """
        self._clock = steady_clock() if clock is None else clock
        self._max_records = max_records
        self._max_handles = max_handles
        self._max_definitions = max_definitions
        self._page_records = page_records
        self._gone_kept = gone_kept
        self._books: dict[EnvironmentName, _Book] = {}
        self._told: Deadlines[str] = Deadlines()
        self._draws: dict[str, _Draws] = {}
        self._states: dict[str, tuple[int, bytes]] = {}
        self._definitions: dict[str, bytes] = {}
        self._definitions_version = ""

    # -- records --------------------------------------------------------------------------------------------------

    async def note(self, outcomes: Sequence[Outcome]) -> int:
        check_outcomes(outcomes)
        now = self._clock()
        while self._told.pop(now) is not None:
            pass
        counted = 0
        books: set[EnvironmentName] = set()
        for outcome in outcomes:
            if outcome.lease in self._told:
                continue
            if outcome.lease:
                self._told.set(outcome.lease, now + TOLD_S)
            book = self._books.setdefault(outcome.environment, _Book())
            before = book.records.get(outcome.task)
            if before is None:
                before = TaskRecord(environment=outcome.environment, task=outcome.task)
            book.keep(before.after(outcome, now))
            books.add(outcome.environment)
            counted += 1
        for environment in books:
            book = self._books[environment]
            for task in list(islice(book.changed, max(0, len(book.records) - self._max_records))):
                book.remove(task, gone_kept=self._gone_kept)
        return counted

    async def records(self, environment: EnvironmentName, since: str = "") -> RecordPage:
        book = self._books.get(environment)
        if book is None:
            return RecordPage(version="", is_whole=True, is_last=True, records=[], removed=[])
        return book.since(since, self._page_records)

    async def forget(self, environment: EnvironmentName, task: str = "") -> int:
        book = self._books.get(environment)
        if book is None:
            return 0
        if task:
            return int(book.remove(task, gone_kept=self._gone_kept))
        del self._books[environment]
        return len(book.records)

    # -- draws ----------------------------------------------------------------------------------------------------

    async def join(self, curriculum: str, handle: int, *, member: str, group_size: int, group_s: float) -> Drawn | Turn:
        check_handle(curriculum, handle, self._max_handles)
        group_s = check_group(group_size, group_s)
        draws = self._draws.setdefault(curriculum, _Draws())
        return draws.join(handle, member, group_size=group_size, group_s=group_s, now=self._clock())

    async def propose(self, curriculum: str, handle: int, turn: Turn, place: bytes, *, member: str) -> Drawn | None:
        check_handle(curriculum, handle, self._max_handles)
        check_bytes("a draw of", place, MAX_DRAWN_BYTES)
        draws = self._draws.get(curriculum)
        return None if draws is None else draws.propose(handle, turn.number, place, member, now=self._clock())

    async def leave(self, curriculum: str, handle: int, *, member: str) -> None:
        if (draws := self._draws.get(curriculum)) is not None:
            draws.leave(handle, member, now=self._clock())

    async def numbers(self, curriculum: str, count: int) -> int:
        check_count(count)
        return self._draws.setdefault(curriculum, _Draws()).numbers(count)

    # -- state ----------------------------------------------------------------------------------------------------

    async def state(self, curriculum: str) -> tuple[int, bytes]:
        return self._states.get(curriculum, (0, b""))

    async def set_state(self, curriculum: str, version: int, state: bytes) -> bool:
        check_bytes("a sampler's state of", state, MAX_STATE_BYTES)
        if self._states.get(curriculum, (0, b""))[0] != version:
            return False
        self._states[curriculum] = (version + 1, state)
        return True

    async def reset(self, curriculum: str) -> None:
        self._forget(curriculum)

    # -- definitions that came by the API -------------------------------------------------------------------------

    async def define(self, curriculum: str, body: bytes) -> None:
        check_bytes(f"the definition of {curriculum!r} has", body, MAX_DEFINITION_BYTES)
        if curriculum not in self._definitions and len(self._definitions) >= self._max_definitions:
            raise full_of_definitions(self._max_definitions)
        self._definitions[curriculum] = body
        self._definitions_version = uuid.uuid4().hex

    async def undefine(self, curriculum: str) -> bool:
        if self._definitions.pop(curriculum, None) is None:
            return False
        self._definitions_version = uuid.uuid4().hex
        self._forget(curriculum)
        return True

    async def definitions(self) -> tuple[str, dict[str, bytes]]:
        return self._definitions_version, dict(self._definitions)

    async def definitions_version(self) -> str:
        return self._definitions_version

    async def aclose(self) -> None:
        """Do nothing. The Redis store closes its connections here."""

    def _forget(self, curriculum: str) -> None:
        self._draws.pop(curriculum, None)
        self._states.pop(curriculum, None)


def steady_clock() -> Callable[[], float]:
    """Return a clock of Unix time (s) that does not jump when the machine's clock is set."""
    ahead_s = time.time() - time.monotonic()
    return lambda: time.monotonic() + ahead_s


def _after(changes: dict[str, int], known: int) -> list[tuple[str, int]]:
    """Return the *changes* with a number above *known*, lowest first. *changes* are sorted by number."""
    newest_first = takewhile(lambda change: change[1] > known, reversed(changes.items()))
    return list(newest_first)[::-1]


def check_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Raise ``InvalidRequest`` for outcomes that every store refuses: too many, without a task, or not finite."""
    if len(outcomes) > MAX_OUTCOMES:
        raise InvalidRequest(f"{len(outcomes)} outcomes in one request; the maximum is {MAX_OUTCOMES}")
    for outcome in outcomes:
        if not outcome.environment or not outcome.task:
            raise InvalidRequest(f"the outcome of lease {outcome.lease!r} names no environment, or no task")
        for name in ("reward", "steps", "seconds"):
            if not _is_finite(getattr(outcome, name)):
                raise InvalidRequest(f"the outcome of {outcome.task!r}: {name} is not a finite number")


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number with hundreds of digits
        return False


def check_handle(curriculum: str, handle: int, limit: int) -> None:
    if not 0 <= handle < limit:
        raise InvalidRequest(f"the curriculum {curriculum!r} has no handle {handle}: handles are 0 to {limit - 1}")


def check_group(group_size: int, group_s: float) -> float:
    """Return the group's time (s), cut to `MAX_GROUP_S`. Raise ``InvalidRequest`` if size or time is not positive."""
    if group_size < 1:
        raise InvalidRequest(f"a group of {group_size}; it has at least 1 member")
    if not group_s > 0:
        raise InvalidRequest(f"a group of {group_s} seconds; its time is positive")
    return min(group_s, MAX_GROUP_S)


def check_bytes(what: str, body: bytes, limit: int) -> None:
    if len(body) > limit:
        raise InvalidRequest(f"{what} {len(body)} bytes; the maximum is {limit}")


def check_count(count: int) -> None:
    if count < 0:
        raise InvalidRequest(f"{count} draw numbers; it is 0 or more")


def full_of_definitions(limit: int) -> InvalidRequest:
    return InvalidRequest(f"there would be more than {limit} curricula that came by the API")

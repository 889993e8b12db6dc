"""Calls to servers that keep no outcomes, of a gateway that is one process: in dictionaries, gone with it.

No method but `settled` awaits between reading and writing, so each is atomic on the event loop. The only replica is the
one that asks, so no call is ever lost.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gateway.core.errors import CallConflict
from gateway.core.ids import SessionId
from gateway.core.ports.calls import (
    KEYED_S,
    MARGIN_S,
    SESSION_BYTES,
    SESSION_MAX,
    TOTAL_BYTES,
    CallChange,
    CallRecord,
    CallState,
    Change,
    Tally,
)

_Place = tuple[SessionId, str]


@dataclass(slots=True, eq=False)
class _Call:
    state: CallState
    key: str
    digest: str
    ends_at: float
    outcome: bytes = b""


@dataclass(slots=True, eq=False)
class _Calls:
    """The calls of one session, the oldest news first."""

    calls: OrderedDict[str, _Call] = field(default_factory=OrderedDict)
    keys: dict[str, str] = field(default_factory=dict)
    """Key → task id."""

    @property
    def bytes(self) -> int:
        return sum(len(call.outcome) for call in self.calls.values())

    def remove(self, task_id: str) -> None:
        call = self.calls.pop(task_id, None)
        if call is not None and call.key and self.keys.get(call.key) == task_id:
            del self.keys[call.key]


class MemoryCallStore:
    """Calls of one process; the seam is ``core.call_ports.CallStore``."""

    is_shared = False

    def __init__(
        self,
        *,
        replica: str = "",
        clock: Callable[[], float] = time.monotonic,
        keyed_s: float = KEYED_S,
        session_max: int = SESSION_MAX,
        session_bytes: int = SESSION_BYTES,
        total_bytes: int = TOTAL_BYTES,
    ) -> None:
        """*clock*: seconds, monotonic. The limits are those of the seam; tests have smaller ones."""
        self.replica = replica
        self._clock = clock
        self._keyed_s = keyed_s
        self._session_max = session_max
        self._session_bytes = session_bytes
        self._total_bytes = total_bytes
        self._places: OrderedDict[_Place, _Calls] = OrderedDict()
        """The one that was heard of least recently first."""
        self._bytes = 0
        self._tallies: OrderedDict[_Place, dict[str, tuple[float, Tally]]] = OrderedDict()
        """Until when each replica's count is kept, and the count; the one that was told least recently first."""
        self._waiting: dict[str, set[asyncio.Event]] = {}

    async def begin(
        self, session: SessionId, lease: str, *, key: str, digest: str, task_id: str, within_s: float
    ) -> CallRecord | None:
        calls = self._of(session, lease)
        self._tidy(calls)
        known = calls.keys.get(key)
        if known is not None:
            if calls.calls[known].digest != digest:
                raise other_digest()
            return self._record(calls, known)
        ends_at = self._clock() + max(self._keyed_s, within_s + MARGIN_S)
        calls.calls[task_id] = _Call(CallState.RUNNING, key, digest, ends_at)
        calls.keys[key] = task_id
        return None

    async def write(self, changes: Sequence[CallChange]) -> str:
        for change in changes:
            self._apply(change)
        self._sweep()
        return ""

    async def look(self, session: SessionId, lease: str, task_id: str) -> CallRecord | None:
        calls = self._places.get((session, lease))
        if calls is None:
            return None
        self._tidy(calls)
        return self._record(calls, task_id)

    async def settled(self, session: SessionId, lease: str, task_id: str, *, within_s: float) -> CallRecord | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while True:
            record = await self.look(session, lease, task_id)
            left_s = deadline - loop.time()
            if record is None or record.state is not CallState.RUNNING or left_s <= 0:
                return record
            news = asyncio.Event()
            self._waiting.setdefault(task_id, set()).add(news)
            try:
                async with asyncio.timeout(left_s):
                    await news.wait()
            except TimeoutError:
                pass
            finally:
                self._waiting[task_id].discard(news)
                if not self._waiting[task_id]:
                    del self._waiting[task_id]

    async def tallies(self, session: SessionId, lease: str) -> Mapping[str, Tally]:
        told = self._tallies.get((session, lease), {})
        return {replica: tally for replica, (ends_at, tally) in told.items() if ends_at > self._clock()}

    async def aclose(self) -> None:
        """Do nothing; the Redis store lets go of its connections here."""

    # -- inside ---------------------------------------------------------------------------------------------------

    def _of(self, session: SessionId, lease: str) -> _Calls:
        calls = self._places.setdefault((session, lease), _Calls())
        self._places.move_to_end((session, lease))
        return calls

    def _record(self, calls: _Calls, task_id: str) -> CallRecord | None:
        call = calls.calls.get(task_id)
        if call is None:
            return None
        return CallRecord(task_id=task_id, state=call.state, replica=self.replica, outcome=call.outcome)

    def _apply(self, change: CallChange) -> None:
        place = change.session, change.lease
        if change.kind is Change.TALLIED:
            told = self._tallies.setdefault(place, {})
            _, known = told.get(self.replica, (0.0, None))
            is_same = known is not None and known.number == change.tally.number
            is_late = known is not None and is_same and known.version > change.tally.version
            if not is_late and (known is not None or not change.tally.told_in):
                is_whole = known is None or (known.is_whole and is_same)
                told[self.replica] = self._clock() + change.keep_s, replace(change.tally, is_whole=is_whole)
                self._tallies.move_to_end(place)
            if not told:
                del self._tallies[place]
            return
        if change.kind is Change.FORGOTTEN:
            self._tallies.pop(place, None)
            if (gone := self._places.pop(place, None)) is not None:
                self._bytes -= gone.bytes
                self._wake(*gone.calls)
            return
        calls = self._of(*place)
        before = calls.calls.get(change.task_id)
        ends_at = self._clock() + change.keep_s
        if change.kind is Change.RUNNING:
            if before is None:
                self._put(calls, change, CallState.RUNNING, ends_at)
        else:
            self._bytes -= len(before.outcome) if before is not None else 0
            calls.remove(change.task_id)
            is_kept = change.kind is Change.DONE and self._bytes + len(change.outcome) <= self._total_bytes
            if is_kept:
                self._put(calls, change, CallState.DONE, ends_at)
            elif change.key and change.kind is not Change.UNDONE:
                self._put(calls, change, CallState.DROPPED, ends_at)
            self._wake(change.task_id)
        self._tidy(calls)

    def _put(self, calls: _Calls, change: CallChange, state: CallState, ends_at: float) -> None:
        outcome = change.outcome if state is CallState.DONE else b""
        calls.calls[change.task_id] = _Call(state, change.key, change.digest, ends_at, outcome)
        self._bytes += len(outcome)
        if change.key:
            calls.keys[change.key] = change.task_id

    def _tidy(self, calls: _Calls) -> None:
        before = calls.bytes
        now = self._clock()
        for task_id in [task_id for task_id, call in calls.calls.items() if call.ends_at <= now]:
            calls.remove(task_id)
        is_too_much = len(calls.calls) > self._session_max or calls.bytes > self._session_bytes
        by_end = sorted(calls.calls.items(), key=lambda entry: entry[1].ends_at) if is_too_much else ()
        for task_id, call in by_end:
            is_full = len(calls.calls) > self._session_max
            if is_full and call.state is not CallState.RUNNING:
                calls.remove(task_id)
            elif calls.bytes > self._session_bytes and call.state is CallState.DONE:
                if call.key:  # its key stays: a refusal is better than a second run
                    call.state, call.outcome = CallState.DROPPED, b""
                else:
                    calls.remove(task_id)
        self._bytes += calls.bytes - before

    def _sweep(self) -> None:
        """Forget sessions that nobody ended."""
        while self._tallies:
            place, told = next(iter(self._tallies.items()))
            if any(ends_at > self._clock() for ends_at, _ in told.values()):
                break
            del self._tallies[place]
        while self._places:
            place, calls = next(iter(self._places.items()))
            self._tidy(calls)
            if calls.calls:
                return
            del self._places[place]

    def _wake(self, *task_ids: str) -> None:
        for task_id in task_ids:
            for news in self._waiting.get(task_id, ()):
                news.set()


def other_digest() -> CallConflict:
    return CallConflict("Idempotency-Key was used with another body")

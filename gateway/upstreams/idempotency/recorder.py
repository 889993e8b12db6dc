"""Records this replica's calls and their outcomes in the store, so that other replicas can return the outcomes.

The recorder writes a call with a key before it runs and after it ends: two round trips. A call without a key costs its
trainer no round trip, because the recorder writes all such calls once a second. Their records are lost if there are too
many of them, or if the store does not answer.

The recorder writes this replica's count of a session (`Tally`) in the same way. A change that affects the episode's
summary is written before the step's response is sent. For a call with a key, the write of the outcome contains it.

If the store lost its data, the recorder writes all calls with a key again, because an unknown call would run twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from gateway.core.errors import CallConflict, GatewayError, StoreUnavailable
from gateway.core.ids import SessionId
from gateway.core.ports.calls import TALLY_S, CallChange, CallRecord, CallState, CallStore, Change, Tally
from gateway.core.session import Session

logger = logging.getLogger(__name__)

TICK_S: Final = 1.0
"""Seconds between two background writes."""
WRITE_S: Final = 1.0
"""Seconds for which an outcome is held back until it is recorded. After that, the outcome goes out unrecorded."""
UNSENT_MAX: Final = 4096
"""Largest number of changes that wait for an unavailable store."""
UNSENT_BYTES: Final = 64 * 2**20
"""Largest size of waiting outcomes, in bytes. Further calls are recorded as ended, without an outcome."""
NOTES_MAX: Final = 1024
"""Largest number of ends of calls without a key that are recorded in one second."""
NOTES_BYTES: Final = 4 * 2**20
"""Largest size of their outcomes, in bytes. The write takes some milliseconds of the store's time."""
KEPT_BYTES: Final = 64 * 2**20
"""Bytes of outcomes that can be written again. Of older calls only the end is written again."""
BATCH_MAX: Final = 512
"""Largest number of changes in one write."""
BATCH_BYTES: Final = 4 * 2**20
"""Largest size of the outcomes in one write, in bytes. The write takes some milliseconds of the store's time."""
CLOSE_S: Final = 5.0
"""Seconds that `Recorder.aclose` waits for each of its steps."""
TALLIES_MAX: Final = 50_000
"""Largest number of known counts. Counts of sessions that other replicas ended are dropped first."""
_ENDED: Final = (CallState.DONE, CallState.DROPPED)

_Place = tuple[SessionId, str]
_Id = tuple[str, str]
"""A session's lease and a call's task id. The task id is empty for a change of the session."""


class Recorder:
    """Writes the calls of this replica to the store."""

    def __init__(
        self,
        store: CallStore,
        *,
        tick_s: float = TICK_S,
        write_s: float = WRITE_S,
        unsent_bytes: int = UNSENT_BYTES,
        notes_bytes: int = NOTES_BYTES,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """Write changes that can wait to *store* every *tick_s* seconds. Tests set smaller limits."""
        self.store = store
        self._tick_s = tick_s
        self._write_s = write_s
        self._unsent_limit = unsent_bytes
        self._notes_limit = notes_bytes
        self._kept_limit = kept_bytes
        self._running: dict[str, CallChange] = {}
        """Task id → call, for calls that the store knows (or may know) as running here, until their end is written."""
        self._ended: OrderedDict[str, tuple[float, CallChange]] = OrderedDict()
        """Task id → time until which the store keeps the call, and its end. Only calls with a key, oldest first."""
        self._ended_bytes = 0
        self._unwritten: OrderedDict[_Id, CallChange] = OrderedDict()
        """Changes that the next tick writes, in order."""
        self._unwritten_bytes = 0
        self._notes = self._notes_bytes = 0
        """Number and bytes of ends of calls without a key since the last tick."""
        self._tallies: OrderedDict[_Place, CallChange] = OrderedDict()
        """The newest count of each session."""
        self._untold: dict[_Place, None] = {}
        """Sessions whose newest count the store does not know."""
        self._run = ""
        """The run of the store that answered last."""
        self._is_away = False
        """True if the store did not answer the last write in time."""
        self._ticking: asyncio.Task[None] | None = None
        self._work: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Return True if nothing is left to write, and no call runs that other replicas wait for."""
        return not (self._running or self._unwritten or self._untold or self._work)

    @property
    def _has_news(self) -> bool:
        return bool(self._running or self._unwritten or self._untold or self._ended)

    # -- calls with a key -----------------------------------------------------------------------------------------

    async def begin(self, call: CallChange) -> CallRecord | None:
        """Record that *call* runs here, and return None. If its key is known, return the existing record.

        Raises:
            CallConflict: The key belongs to a call with another digest.
            StoreUnavailable: The store does not answer. The call must not run.
        """
        self._running[call.task_id] = call
        self._tick()
        beginning = self._detach(self._begin(call))
        try:
            record: CallRecord | None = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(lambda _: self.never_ran(call))
            raise
        except StoreUnavailable:  # the store may have recorded the call nevertheless
            self.never_ran(call)
            raise
        except CallConflict:
            self._running.pop(call.task_id, None)
            raise
        if record is not None:
            self._running.pop(call.task_id, None)
        return record

    async def _begin(self, call: CallChange) -> CallRecord | None:
        while True:
            record = await self.store.begin(call)
            if record is None or record.task_id == call.task_id:  # a store without its data received this call already
                return None
            if record.replica != self.store.replica or record.state in _ENDED:
                return record
            if record.task_id in self._running:
                return record
            # The store's response to the start was lost, and this replica gave the call up. It never ran.
            await self.store.write([replace(call, kind=Change.UNDONE, task_id=record.task_id)])

    def never_ran(self, call: CallChange) -> None:
        """Drop a call that certainly did not run, so that its key may be tried again."""
        self._running.pop(call.task_id, None)
        self._take(_id(call))
        self._detach(self._write([replace(call, kind=Change.UNDONE)]))

    async def ended(self, call: CallChange) -> None:
        """Record the end of a call with a key. Wait for the store up to `WRITE_S`, then finish in the background."""
        self._ended[call.task_id] = time.monotonic() + call.keep_s, call
        self._ended_bytes += len(call.outcome)
        for older, (until, one) in self._ended.items():
            if self._ended_bytes <= self._kept_limit:
                break
            self._ended_bytes -= len(one.outcome)
            self._ended[older] = until, _dropped(one)
        if len(self._ended) > UNSENT_MAX:
            self._forget_ended(next(iter(self._ended)))
        self._take(_id(call))
        self._tick()
        await asyncio.wait({self._detach(self._write([call], [call.place]))}, timeout=self._write_s)

    # -- calls without a key --------------------------------------------------------------------------------------

    def runs(self, call: CallChange) -> None:
        """Note that a call without a key runs. A trainer knows its task id."""
        self._put(call)
        self._tick()

    def noted(self, call: CallChange) -> None:
        """Note the end of a call without a key."""
        is_fresh = self._take(_id(call)) is not None  # the store does not know the call yet
        self._running.pop(call.task_id, None)
        has_room = self._notes < NOTES_MAX and self._notes_bytes + len(call.outcome) <= self._notes_limit
        if not has_room and not is_fresh:
            call = _dropped(call)  # the store knows the call as running, and has to learn that it ended
        elif not has_room or (is_fresh and call.kind is not Change.DONE):
            return
        self._notes += 1
        self._notes_bytes += len(call.outcome)
        self._put(call)
        self._tick()

    # -- counts of sessions ---------------------------------------------------------------------------------------

    def counted(self, session: Session, tally: Tally) -> None:
        """Note this replica's count of a session. The next write contains it."""
        place = session.id, session.lease
        before = self._tallies.get(place)
        tally = replace(tally, told_in=before.tally.told_in if before is not None else "")
        self._tallies[place] = CallChange(
            kind=Change.TALLIED, session=session.id, lease=session.lease, keep_s=TALLY_S, tally=tally
        )
        self._tallies.move_to_end(place)
        self._untold[place] = None
        if len(self._tallies) > TALLIES_MAX:
            oldest, _ = self._tallies.popitem(last=False)
            self._untold.pop(oldest, None)
        self._tick()

    def telling(self, session: Session) -> asyncio.Task[None] | None:
        """Start to write the count of a session. Return None if the store knows the newest count."""
        place = session.id, session.lease
        return self._detach(self._write([], [place])) if place in self._untold else None

    async def tell(self, session: Session) -> None:
        """Write the count of a session, and wait up to `WRITE_S`. Do nothing if the last write was not answered."""
        if not self._is_away and (telling := self.telling(session)) is not None:
            await asyncio.wait({telling}, timeout=self._write_s)
            self._is_away = self._is_away or not telling.done()

    async def tallies(self, session: Session) -> Mapping[str, Tally] | None:
        """Return the other replicas' counts of a session, by replica name, or None if a part is missing."""
        asking = self._detach(self.store.tallies(session.id, session.lease))
        await asyncio.wait({asking}, timeout=self._write_s)
        if not asking.done() or asking.exception() is not None:
            return None
        found, own = asking.result(), self._tallies.get((session.id, session.lease))
        is_lost = own is not None and own.tally.told_in and self.store.replica not in found
        if is_lost or not all(tally.is_whole for tally in found.values()):
            return None
        return {replica: tally for replica, tally in found.items() if replica != self.store.replica}

    # -- sessions -------------------------------------------------------------------------------------------------

    def forget(self, session: Session) -> None:
        """Drop the calls and counts of a session that has ended, here and in the store."""
        place = session.id, session.lease
        self._tallies.pop(place, None)
        self._untold.pop(place, None)
        for task_id in [one.task_id for one in self._running.values() if one.place == place]:
            del self._running[task_id]
        for task_id in [one.task_id for _, one in self._ended.values() if one.place == place]:
            self._forget_ended(task_id)
        for id in [id for id, one in self._unwritten.items() if one.place == place]:
            self._take(id)
        self._put(CallChange(kind=Change.FORGOTTEN, session=session.id, lease=session.lease))
        self._tick()

    async def aclose(self) -> None:
        """Write the remaining changes, if the store answers."""
        self._is_closed = True
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait({self._ticking}, timeout=CLOSE_S)
        if self._work:
            await asyncio.wait(self._work, timeout=CLOSE_S)
        if self._has_news:
            await asyncio.wait({self._flush()}, timeout=CLOSE_S)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self._ticking is None and not self._is_closed:
            self._ticking = asyncio.get_running_loop().create_task(self._ticks())

    async def _ticks(self) -> None:
        """Write once a second while there are changes, running calls, or ended calls that the store could lose.

        Each write also shows the store that this replica is alive.
        """
        while self._has_news or self._work:
            await asyncio.sleep(self._tick_s)
            while self._ended and next(iter(self._ended.values()))[0] <= time.monotonic():
                self._forget_ended(next(iter(self._ended)))
            if self._has_news:
                await asyncio.wait({self._flush()})
        self._ticking = None

    def _flush(self) -> asyncio.Task[None]:
        changes = list(self._unwritten.values())
        self._unwritten.clear()
        self._unwritten_bytes = self._notes = self._notes_bytes = 0
        self._running |= {one.task_id: one for one in changes if one.kind is Change.RUNNING and not one.key}
        return self._detach(self._write(changes, list(self._untold)))

    async def _write(self, changes: Sequence[CallChange], places: Sequence[_Place] = ()) -> None:
        """Write *changes*, and the counts of the sessions *places*.

        If the store does not answer, all changes are written later, except changes of calls without a key. Other
        replicas then do not know these calls.
        """
        tallies = [self._tallies[place] for place in places if place in self._untold]
        is_written = False
        try:
            for batch in _batches([*changes, *tallies]):
                run = await self.store.write(batch)
            is_written = True
        except StoreUnavailable:
            self._is_away = True
        finally:
            if not is_written:
                self._write_later(changes)
        if is_written:
            self._written(changes, tallies, run)

    def _written(self, changes: Sequence[CallChange], tallies: Sequence[CallChange], run: str) -> None:
        self._is_away = False
        for change in changes:
            if change.kind is not Change.RUNNING:
                self._running.pop(change.task_id, None)
        for told in tallies:
            newest = self._tallies.get(told.place)
            if newest is told:
                self._untold.pop(told.place, None)
            if newest is not None and not newest.tally.told_in:
                self._tallies[told.place] = replace(newest, tally=replace(newest.tally, told_in=run))
        before, self._run = self._run, run
        if before not in ("", run):  # the store may have lost all data, and a call with an unknown key would run again
            self._write_later([*(call for _, call in self._ended.values()), *self._running.values()])

    def _write_later(self, changes: Sequence[CallChange]) -> None:
        """Write *changes* at the next tick, except changes of calls without a key and outdated changes."""
        for change in changes:
            newer = self._unwritten.get(_id(change))
            is_late = newer is not None and (newer.kind is not Change.RUNNING or change.kind is Change.RUNNING)
            is_over = change.kind is Change.RUNNING and change.task_id not in self._running
            if (change.task_id and not change.key) or is_late or is_over:
                continue
            if self._unwritten_bytes + len(change.outcome) > self._unsent_limit:
                change = _dropped(change)
            if len(self._unwritten) >= UNSENT_MAX:
                lost = self._take(next(iter(self._unwritten)))
                self._running.pop(lost.task_id if lost is not None else "", None)
                logger.warning("call_record_lost changes=1")
            self._put(change)
        self._tick()

    def _put(self, change: CallChange) -> None:
        self._take(_id(change))
        self._unwritten[_id(change)] = change
        self._unwritten_bytes += len(change.outcome)

    def _take(self, id: _Id) -> CallChange | None:
        change = self._unwritten.pop(id, None)
        self._unwritten_bytes -= len(change.outcome) if change is not None else 0
        return change

    def _forget_ended(self, task_id: str) -> None:
        _, call = self._ended.pop(task_id)
        self._ended_bytes -= len(call.outcome)

    def _detach(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._worked)
        return task

    def _worked(self, task: asyncio.Task[Any]) -> None:
        self._work.discard(task)
        if task.cancelled():
            return
        error = task.exception()  # the caller may have left
        if error is not None and not isinstance(error, GatewayError):
            logger.error("call_record_failed", exc_info=error)


def _batches(changes: Sequence[CallChange]) -> Iterator[Sequence[CallChange]]:
    """Split *changes* into short writes. Without changes, yield one empty write."""
    batch: list[CallChange] = []
    size = 0
    for change in changes:
        if batch and (len(batch) == BATCH_MAX or size + len(change.outcome) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(change)
        size += len(change.outcome)
    yield batch


def _id(change: CallChange) -> _Id:
    return change.lease, change.task_id


def _dropped(call: CallChange) -> CallChange:
    """Return the end of the same call, without its outcome."""
    return replace(call, kind=Change.DROPPED, outcome=b"")

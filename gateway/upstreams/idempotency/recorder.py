"""Writes to the store which calls this replica runs and how they end, so that other replicas can answer for them.

A call with a key is recorded before it runs and when it has ended: two round trips. A call without a key costs its
trainer none: the recorder writes it once a second with all others. It is lost if there are too many of them, or if the
store does not answer.

The recorder writes what this replica saw of a session (`Tally`) in the same way. A change of how the episode ends is
written before the step's answer goes out: with a key in the write of its outcome, else in a write of its own.

The recorder repeats all calls with a key to a store that lost its data: a call that the store does not know would run
once more.
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
WRITE_S: Final = 1.0
"""How long an outcome is held back until it is recorded: with a store that hangs it is told before."""
UNSENT_MAX: Final = 4096
"""Changes that wait for a store which is away."""
UNSENT_BYTES: Final = 64 * 2**20
"""Their outcomes; beyond it calls are recorded as ended, without an outcome."""
NOTES_MAX: Final = 1024
NOTES_BYTES: Final = 4 * 2**20
"""Of calls without a key, in one second: some milliseconds of the store's time."""
KEPT_BYTES: Final = 64 * 2**20
"""Outcomes that can be told again; of older ones only that they ended."""
BATCH_MAX: Final = 512
BATCH_BYTES: Final = 4 * 2**20
"""In one write: some milliseconds of the store's time."""
CLOSE_S: Final = 5.0
TALLIES_MAX: Final = 50_000
"""Counts of sessions that are remembered; those of sessions that other replicas ended are the first to go."""
_ENDED: Final = (CallState.DONE, CallState.DROPPED)

_Place = tuple[SessionId, str]
_Id = tuple[str, str]
"""A session's lease, and a call's task id; its task id is empty for a change of the session."""


class Recorder:
    """The calls of this replica, towards the store."""

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
        """Write to *store* every *tick_s* seconds what need not be written at once. Tests set smaller limits."""
        self.store = store
        self._tick_s = tick_s
        self._write_s = write_s
        self._unsent_limit = unsent_bytes
        self._notes_limit = notes_bytes
        self._kept_limit = kept_bytes
        self._running: dict[str, CallChange] = {}
        """Calls that the store knows as running here, or may, by task id; each stays until its end is written."""
        self._ended: OrderedDict[str, tuple[float, CallChange]] = OrderedDict()
        """Calls with a key that ended here, and the end of the time for which the store keeps them; oldest first."""
        self._ended_bytes = 0
        self._unwritten: OrderedDict[_Id, CallChange] = OrderedDict()
        """Changes that the next tick writes, in order."""
        self._unwritten_bytes = 0
        self._notes = self._notes_bytes = 0
        """Ends of calls without a key that were noted since the last tick."""
        self._tallies: OrderedDict[_Place, CallChange] = OrderedDict()
        """The newest count of each session."""
        self._untold: dict[_Place, None] = {}
        """Sessions whose newest count the store does not know."""
        self._run = ""
        """The run of the store that answered last."""
        self._is_away = False
        """True if the store did not answer the last write, or not in time."""
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
        """Record that *call* runs here, and return None; if its key is known, return what is known of it.

        Raises:
            CallConflict: the key is known with another digest.
            StoreUnavailable: nothing may run.
        """
        self._running[call.task_id] = call
        self._tick()
        beginning = self._detach(self._begin(call))
        try:
            record: CallRecord | None = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(lambda _: self.never_ran(call))
            raise
        except StoreUnavailable:  # the store may have recorded it all the same
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
            if record is None or record.task_id == call.task_id:  # a store that lost its data was told of it already
                return None
            if record.replica != self.store.replica or record.state in _ENDED:
                return record
            if record.task_id in self._running:
                return record
            # The answer to its beginning was lost, and the replica gave it up: it never ran.
            await self.store.write([replace(call, kind=Change.UNDONE, task_id=record.task_id)])

    def never_ran(self, call: CallChange) -> None:
        """Forget a call that is sure not to have run: its key may be tried again."""
        self._running.pop(call.task_id, None)
        self._take(_id(call))
        self._detach(self._write([replace(call, kind=Change.UNDONE)]))

    async def ended(self, call: CallChange) -> None:
        """Record the end of a call that was begun; wait up to `WRITE_S` for the store, which hears of it later else."""
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
        """Note that a call runs whose task id is known to a trainer."""
        self._put(call)
        self._tick()

    def noted(self, call: CallChange) -> None:
        """Note the end of such a call."""
        is_fresh = self._take(_id(call)) is not None  # the store has not heard of the call
        self._running.pop(call.task_id, None)
        has_room = self._notes < NOTES_MAX and self._notes_bytes + len(call.outcome) <= self._notes_limit
        if not has_room and not is_fresh:
            call = _dropped(call)  # the store takes it for one that runs
        elif not has_room or (is_fresh and call.kind is not Change.DONE):
            return
        self._notes += 1
        self._notes_bytes += len(call.outcome)
        self._put(call)
        self._tick()

    # -- counts of sessions ---------------------------------------------------------------------------------------

    def counted(self, session: Session, tally: Tally) -> None:
        """Note what was seen here of a session so far; the next write contains it."""
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
        """Begin to write what was noted of a session; return None if there is nothing."""
        place = session.id, session.lease
        return self._detach(self._write([], [place])) if place in self._untold else None

    async def tell(self, session: Session) -> None:
        """Write what was noted, and wait up to `WRITE_S`; do not wait again for a store that did not answer."""
        if not self._is_away and (telling := self.telling(session)) is not None:
            await asyncio.wait({telling}, timeout=self._write_s)
            self._is_away = self._is_away or not telling.done()

    async def tallies(self, session: Session) -> Mapping[str, Tally] | None:
        """Return what the other replicas saw of a session, by their names; None if a part of it is missing."""
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
        """Forget all calls of a session that has ended, here and in the store."""
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
        """Write what is left, if the store takes it."""
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
        """Write once a second while a call runs, or the store may lose one that has ended.

        Each write also says that this replica lives.
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

        If the store does not answer, all are written later, but those of calls without a key: other replicas do not
        know these calls then.
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
        if before not in ("", run):  # the store may have lost all data: a key that it does not know would run again
            self._write_later([*(call for _, call in self._ended.values()), *self._running.values()])

    def _write_later(self, changes: Sequence[CallChange]) -> None:
        """Write *changes* with the next tick, but those of calls without a key, and those that are out of date."""
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
        error = task.exception()  # its caller may have left
        if error is not None and not isinstance(error, GatewayError):
            logger.error("call_record_failed", exc_info=error)


def _batches(changes: Sequence[CallChange]) -> Iterator[Sequence[CallChange]]:
    """Cut *changes* into writes that do not take long; yield an empty one if there are none."""
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

"""What this replica tells the store of the calls that it runs, so that others can answer for them.

A call with a key is recorded before it runs and when it has ended: two round trips. One without a key costs its caller
none: what is worth knowing of it is written once a second with all others', and lost where that is too much, or where
the store is away.

So it is with what this replica saw of a session (`Tally`), but that what changes how the episode ends is written before
the step's answer goes out: with a key in the write that its outcome takes anyway, else in one of its own.

What a store has lost is told again, as far as it has a key: a call that it does not know of would be run once more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*tick_s*: between two writes of what need not be written at once. Tests have smaller limits."""
        self._store = store
        self._tick_s = tick_s
        self._write_s = write_s
        self._unsent_limit = unsent_bytes
        self._notes_limit = notes_bytes
        self._kept_limit = kept_bytes
        self._clock = clock
        self._live: dict[str, CallChange] = {}
        """Calls that the store knows as running here, or may: until their end is written."""
        self._fresh: dict[str, CallChange] = {}
        """Calls without a key that run, and of which the store is still to hear."""
        self._unsent: OrderedDict[tuple[str, str], CallChange] = OrderedDict()
        """What has to be written when the store answers again, in order."""
        self._unsent_bytes = 0
        self._kept: OrderedDict[tuple[str, str], tuple[float, CallChange]] = OrderedDict()
        """Calls with a key that ended here, and until when they are to be known; the oldest first."""
        self._kept_bytes = 0
        self._run = ""
        """The store's, as it last told."""
        self._tallies: OrderedDict[_Place, CallChange] = OrderedDict()
        """What was seen here of each session so far."""
        self._untold: dict[_Place, None] = {}
        """Those of which the store does not know the newest."""
        self._is_away = False
        """Whether the store did not answer, or not in time, when it was last told of a count."""
        self._notes: list[CallChange] = []
        self._notes_bytes = 0
        self._ticking: asyncio.Task[None] | None = None
        self._work: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    @property
    def store(self) -> CallStore:
        """Where calls are looked up."""
        return self._store

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to write, and no call runs that others wait for."""
        return not (self._live or self._fresh or self._unsent or self._notes or self._untold)

    # -- calls with a key -----------------------------------------------------------------------------------------

    async def begin(self, call: CallChange, *, within_s: float) -> CallRecord | None:
        """Record that *call* runs here. None: it does; else its key is known, and this is what is known of it.

        Raises:
            CallConflict: the key is known with another digest.
            StoreUnavailable: nothing may run.
        """
        self._live[call.task_id] = call
        self._tick()
        beginning = self._detach(self._begin(call, within_s))
        try:
            record: CallRecord | None = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(lambda _: self.never_ran(call))
            raise
        except StoreUnavailable:  # it may be recorded all the same
            self.never_ran(call)
            raise
        except CallConflict:
            self._live.pop(call.task_id, None)
            raise
        if record is not None:
            self._live.pop(call.task_id, None)
        return record

    async def _begin(self, call: CallChange, within_s: float) -> CallRecord | None:
        while True:
            record = await self._store.begin(
                call.session,
                call.lease,
                key=call.key,
                digest=call.digest,
                task_id=call.task_id,
                within_s=within_s,
            )
            if record is None or record.replica != self._store.replica or record.state in _ENDED:
                return record
            if record.task_id in self._live:
                return record
            # The answer to its beginning was lost, and it was given up: it never ran.
            await self._store.write([_of(call, Change.UNDONE, task_id=record.task_id)])

    def never_ran(self, call: CallChange) -> None:
        """Forget a call that is sure not to have run: its key may be tried again."""
        self._live.pop(call.task_id, None)
        self._send(_of(call, Change.UNDONE))

    async def ended(self, call: CallChange) -> None:
        """Record the end of a call that was begun; waits for it, but not for ever: it is written when it can be."""
        self._remember(call)
        await asyncio.wait({self._send(call)}, timeout=self._write_s)

    # -- calls without a key --------------------------------------------------------------------------------------

    def runs(self, call: CallChange) -> None:
        """Note that a call runs whose task id is known to somebody."""
        self._fresh[call.task_id] = call
        self._tick()

    def noted(self, call: CallChange) -> None:
        """Note the end of such a call."""
        is_fresh = self._fresh.pop(call.task_id, None) is not None
        self._live.pop(call.task_id, None)
        has_room = len(self._notes) < NOTES_MAX and self._notes_bytes + len(call.outcome) <= self._notes_limit
        if not has_room and not is_fresh:
            call = _of(call, Change.DROPPED)  # the store holds it for one that runs
        elif not has_room or (is_fresh and call.kind is not Change.DONE):
            return
        self._notes.append(call)
        self._notes_bytes += len(call.outcome)
        self._tick()

    # -- counts of sessions ---------------------------------------------------------------------------------------

    def counted(self, session: Session, tally: Tally) -> None:
        """Note what was seen here of a session so far; it is written with what is written next."""
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
        """Begin to write what was noted; None: there is nothing."""
        place = session.id, session.lease
        return self._detach(self._write_or_keep(place)) if place in self._untold else None

    async def tell(self, session: Session) -> None:
        """Write what was noted, and wait for it, but not for ever, nor again for a store that did not answer."""
        if not self._is_away and (telling := self.telling(session)) is not None:
            await asyncio.wait({telling}, timeout=self._write_s)
            self._is_away = self._is_away or not telling.done()

    async def tallies(self, session: Session) -> Mapping[str, Tally] | None:
        """What the other replicas saw of a session, by their names. None: that can't be had, or a part is missing."""
        asking = self._detach(self._store.tallies(session.id, session.lease))
        await asyncio.wait({asking}, timeout=self._write_s)
        if not asking.done() or asking.exception() is not None:
            return None
        found, own = asking.result(), self._tallies.get((session.id, session.lease))
        is_lost = own is not None and own.tally.told_in and self._store.replica not in found
        if is_lost or not all(tally.is_whole for tally in found.values()):
            return None
        return {replica: tally for replica, tally in found.items() if replica != self._store.replica}

    # -- sessions -------------------------------------------------------------------------------------------------

    def forget(self, session: CallChange) -> None:
        """Forget all calls of a session that has ended, in the store."""
        place = session.session, session.lease
        self._tallies.pop(place, None)
        self._untold.pop(place, None)
        for known in (self._live, self._fresh):
            for task_id in [one.task_id for one in known.values() if (one.session, one.lease) == place]:
                del known[task_id]
        self._notes = [one for one in self._notes if (one.session, one.lease) != place]
        for kept in [kept for kept, (_, one) in self._kept.items() if (one.session, one.lease) == place]:
            self._let_go(kept)
        self._keep(session)
        self._tick()

    async def aclose(self) -> None:
        """Write what is left, if the store takes it."""
        self._is_closed = True
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait({self._ticking}, timeout=CLOSE_S)
        if self._work:
            await asyncio.wait(self._work, timeout=CLOSE_S)
        writing = self._detach(self._flush())
        await asyncio.wait({writing}, timeout=CLOSE_S)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _send(self, change: CallChange) -> asyncio.Task[None]:
        return self._detach(self._write_or_keep((change.session, change.lease), change))

    async def _write_or_keep(self, place: _Place, *changes: CallChange) -> None:
        """Write *changes*, and the count of the session with them."""
        tallies = [self._tallies[place]] if place in self._untold else []
        try:
            run = await self._store.write([*changes, *tallies])
        except StoreUnavailable:
            self._is_away = True
            for change in changes:
                self._keep(change)
            self._tick()
        else:
            for change in changes:
                self._live.pop(change.task_id, None)
            self._has_told(tallies, run)
            self._heard(run)

    def _has_told(self, tallies: Sequence[CallChange], run: str) -> None:
        self._is_away = False
        for told in tallies:
            place = told.session, told.lease
            newest = self._tallies.get(place)
            if newest is told:
                self._untold.pop(place, None)
            if newest is not None and not newest.tally.told_in:
                self._tallies[place] = replace(newest, tally=replace(newest.tally, told_in=run))

    def _keep(self, change: CallChange) -> None:
        place = change.lease, change.task_id
        if place in self._unsent:
            self._take(place)
        if self._unsent_bytes + len(change.outcome) > self._unsent_limit:
            change = _of(change, Change.DROPPED)
        if len(self._unsent) >= UNSENT_MAX:
            self._take(next(iter(self._unsent)))
            logger.warning("call_record_lost changes=1")
        self._unsent[place] = change
        self._unsent_bytes += len(change.outcome)

    def _take(self, place: tuple[str, str]) -> None:
        change = self._unsent.pop(place)
        self._unsent_bytes -= len(change.outcome)
        self._live.pop(change.task_id, None)

    def _tick(self) -> None:
        if self._ticking is None and not self._is_closed:
            self._ticking = asyncio.get_running_loop().create_task(self._ticks())

    async def _ticks(self) -> None:
        """Write once a second, as long as there is something to write, or the store holds a call for running here."""
        while not self.is_idle or self._kept:
            await asyncio.sleep(self._tick_s)
            try:
                await self._flush()
            except Exception:
                # Without this loop other replicas would take this one for dead.
                logger.exception("call_records_failed")
        self._ticking = None

    async def _flush(self) -> None:
        while self._kept and next(iter(self._kept.values()))[0] <= self._clock():
            self._let_go(next(iter(self._kept)))
        unsent = list(self._unsent.items())
        fresh, self._fresh = self._fresh, {}
        notes, self._notes, self._notes_bytes = self._notes, [], 0
        self._live |= fresh
        tallies = [self._tallies[place] for place in self._untold]
        changes = [*(change for _, change in unsent), *fresh.values(), *notes, *tallies]
        if not changes and not (self._live or self._kept):
            return
        try:
            for batch in _batches(changes):
                run = await self._store.write(batch)
        except StoreUnavailable:
            return  # of calls without a key nothing is kept: others find them unknown, as they did before
        for place, change in unsent:
            if self._unsent.get(place) is change:
                self._take(place)
        self._has_told(tallies, run)
        self._heard(run)

    def _heard(self, run: str) -> None:
        """Tell everything again that has a key, if this is another run of the store."""
        before, self._run = self._run, run
        if before in ("", run):
            return
        again = [call for call in self._live.values() if call.key and (call.lease, call.task_id) not in self._unsent]
        for change in (*again, *(call for _, call in self._kept.values())):
            self._keep(change)
        self._tick()

    def _remember(self, call: CallChange) -> None:
        place = call.lease, call.task_id
        self._kept[place] = self._clock() + call.keep_s, call
        self._kept_bytes += len(call.outcome)
        for older, (until, one) in self._kept.items():
            if self._kept_bytes <= self._kept_limit:
                break
            self._kept_bytes -= len(one.outcome)
            self._kept[older] = until, _of(one, Change.DROPPED)
        if len(self._kept) > UNSENT_MAX:
            self._let_go(next(iter(self._kept)))
        self._tick()

    def _let_go(self, place: tuple[str, str]) -> None:
        _, call = self._kept.pop(place)
        self._kept_bytes -= len(call.outcome)

    def _detach(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._worked)
        return task

    def _worked(self, task: asyncio.Task[Any]) -> None:
        self._work.discard(task)
        if task.cancelled():
            return
        error = task.exception()  # who waited may have left
        if error is not None and not isinstance(error, GatewayError):
            logger.error("call_record_failed", exc_info=error)


def _batches(changes: Sequence[CallChange]) -> Iterator[Sequence[CallChange]]:
    """Cut *changes* into writes that do not take long; an empty one if there are none."""
    batch: list[CallChange] = []
    size = 0
    for change in changes:
        if batch and (len(batch) == BATCH_MAX or size + len(change.outcome) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(change)
        size += len(change.outcome)
    yield batch


def _of(call: CallChange, kind: Change, *, task_id: str = "") -> CallChange:
    """The same call, with no outcome."""
    return CallChange(
        kind=kind,
        session=call.session,
        lease=call.lease,
        task_id=task_id or call.task_id,
        key=call.key,
        digest=call.digest,
        keep_s=call.keep_s,
    )

"""Records the calls of one upstream in the store, and interprets the records of other replicas.

A replica never runs a call that another replica recorded. If that replica is gone, the store does not know whether the
call ran. Each trainer that requests the call gets an error that says so.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from gateway.core.errors import CallConflict, UpstreamGone, UpstreamTimeout
from gateway.core.ports.calls import (
    KEYED_S,
    MARGIN_S,
    OUTCOME_BYTES,
    UNKEYED_S,
    CallChange,
    CallRecord,
    CallState,
    Change,
)
from gateway.core.session import Session
from gateway.upstreams.idempotency.call import Call, never_ran, weight
from gateway.upstreams.idempotency.codec import Codec
from gateway.upstreams.idempotency.recorder import Recorder

T = TypeVar("T")

NOTED_BYTES: Final = 256 * 2**10
"""Largest recorded outcome of a call without a key, in bytes."""
WEIGHT_FACTOR: Final = 4
"""Ratio of estimated memory to the size limit above which an outcome is dropped without encoding it.

The estimate is imprecise. Smaller outcomes are therefore encoded and measured.
"""
_TASK_ID: Final = re.compile(r"[0-9a-f]{32}")


class Records(Generic[T]):
    """The records of calls whose outcomes *codec* encodes."""

    def __init__(self, recorder: Recorder, codec: Codec[T]) -> None:
        self._recorder = recorder
        self._codec = codec

    async def once(self, session: Session, call: Call[T], run: Callable[[], Awaitable[T]], *, within_s: float) -> T:
        """Run *call*, which has a key, unless a replica has run it. Else wait for the outcome.

        Raises:
            CallConflict: The key belongs to another call, or its outcome is not kept.
            StoreUnavailable: The store does not answer. Nothing ran.
            GatewayError: The error that the call ended with.
        """
        begun = _change(session, call, Change.RUNNING, keep_s=max(KEYED_S, within_s + MARGIN_S))
        while (record := await self._recorder.begin(begun)) is not None:
            call.is_elsewhere = True
            call.admit()
            outcome = await self._outcome(session, record, within_s)
            if outcome is not None:
                return outcome
        call.is_elsewhere = False  # the call never ran in another replica
        call.admit()
        try:
            value = await run()
        except asyncio.CancelledError:
            call.fail(UpstreamGone("the call was cancelled", sent=True))
            if not call.is_forgotten:
                await self._recorder.ended(self._end(session, call, call.result, OUTCOME_BYTES))
            raise
        except Exception as error:
            if never_ran(error):
                self._recorder.never_ran(begun)
            else:
                call.stop_timer()
                await self._recorder.ended(self._end(session, call, error, OUTCOME_BYTES))
            raise
        call.stop_timer()  # the call ended in time, and only its record remains to be written
        await self._recorder.ended(self._end(session, call, value, OUTCOME_BYTES))
        return value

    def runs(self, session: Session, call: Call[T], *, within_s: float) -> None:
        """Record, in the background, that this replica runs a call without a key."""
        self._recorder.runs(_change(session, call, Change.RUNNING, keep_s=within_s + MARGIN_S))

    def noted(self, session: Session, call: Call[T]) -> None:
        """Record, in the background, the end of a call without a key."""
        self._recorder.noted(self._end(session, call, call.result, NOTED_BYTES))

    async def look(self, session: Session, task_id: str) -> CallRecord | None:
        """Return the store's record of a call, or None if there is no record. Raises ``StoreUnavailable``."""
        if _TASK_ID.fullmatch(task_id) is None:
            return None
        return await self._recorder.store.look(session.id, session.lease, task_id)

    async def found(self, session: Session, record: CallRecord, *, within_s: float) -> T:
        """Wait for the outcome of another replica's call, for at most *within_s* seconds.

        Raises:
            UpstreamGone: The replica was lost, or the record is gone. The call may have run.
            CallConflict: The outcome is not kept.
            UpstreamTimeout: The call still runs.
            GatewayError: The error that the call ended with.
        """
        outcome = await self._outcome(session, record, within_s)
        if outcome is None:
            raise UpstreamGone("the outcome of the call is no longer known", sent=True)
        return outcome

    def forget(self, session: Session) -> None:
        """Drop the records of a session that has ended, here and in the store."""
        self._recorder.forget(session)

    async def _outcome(self, session: Session, record: CallRecord, within_s: float) -> T | None:
        """Wait as `found` does. Return None if the store has no record of the call (any more)."""
        found: CallRecord | None = record
        if record.state in (CallState.RUNNING, CallState.LOST):
            found = await self._recorder.store.settled(session.id, session.lease, record.task_id, within_s=within_s)
        if found is None:
            return None
        if found.state is CallState.LOST:
            raise UpstreamGone("the call may have run: the gateway that ran it was lost", sent=True)
        if found.state is CallState.RUNNING:
            raise UpstreamTimeout(f"the call still runs in another gateway after {within_s:g} s")
        if found.state is CallState.DROPPED:
            raise CallConflict("the outcome of this call is not kept")
        outcome = self._codec.read(found.outcome)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _end(self, session: Session, call: Call[T], outcome: T | Exception, limit: int) -> CallChange:
        """Return the end of *call*. The outcome is left out if it exceeds *limit* bytes or can't be encoded."""
        keep_s = UNKEYED_S if call.key is None else KEYED_S
        if isinstance(outcome, Exception) or weight(outcome) <= WEIGHT_FACTOR * limit:
            try:
                written = self._codec.write(outcome)
            except (ValueError, TypeError, RecursionError):
                pass
            else:
                if len(written) <= limit:
                    return _change(session, call, Change.DONE, keep_s=keep_s, outcome=written)
        return _change(session, call, Change.DROPPED, keep_s=keep_s)


def _change(session: Session, call: Call[T], kind: Change, *, keep_s: float, outcome: bytes = b"") -> CallChange:
    return CallChange(
        kind=kind,
        session=session.id,
        lease=session.lease,
        task_id=call.task_id,
        key=call.key or "",
        digest=call.digest if call.key else "",
        keep_s=keep_s,
        outcome=outcome,
    )

"""One upstream's calls towards the store: what is recorded of them, and what the records of other replicas mean.

A replica never runs a call that another one recorded. If that replica is gone, the store can't say whether the call
ran, and each trainer that asks for it gets this answer.
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
"""The largest outcome that is written of a call without a key."""
WEIGHT_FACTOR: Final = 4
"""Memory is no measure of bytes; what weighs so much more than the limit is not even written to be measured."""
_TASK_ID: Final = re.compile(r"[0-9a-f]{32}")


class Records(Generic[T]):
    """Calls whose outcomes are written by *codec*."""

    def __init__(self, recorder: Recorder, codec: Codec[T]) -> None:
        self._recorder = recorder
        self._codec = codec

    async def once(self, session: Session, call: Call[T], run: Callable[[], Awaitable[T]], *, within_s: float) -> T:
        """Run *call*, which has a key, if no replica has; else wait for its outcome.

        Raises:
            CallConflict: the key stands for another call, or its outcome is not kept.
            StoreUnavailable: nothing ran.
            GatewayError: the error that the call ended with.
        """
        begun = _change(session, call, Change.RUNNING, keep_s=max(KEYED_S, within_s + MARGIN_S))
        while (record := await self._recorder.begin(begun)) is not None:
            call.is_elsewhere = True
            call.admit()
            outcome = await self._outcome(session, record, within_s)
            if outcome is not None:
                return outcome
        call.is_elsewhere = False  # it never ran there
        call.admit()
        try:
            value = await run()
        except asyncio.CancelledError:
            call.fail(UpstreamGone("the call was broken off", sent=True))
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
        call.stop_timer()  # it has run in time: what is left is to say so
        await self._recorder.ended(self._end(session, call, value, OUTCOME_BYTES))
        return value

    def runs(self, session: Session, call: Call[T], *, within_s: float) -> None:
        """Note that a call without a key runs here."""
        self._recorder.runs(_change(session, call, Change.RUNNING, keep_s=within_s + MARGIN_S))

    def noted(self, session: Session, call: Call[T]) -> None:
        """Note the end of a call without a key."""
        self._recorder.noted(self._end(session, call, call.result, NOTED_BYTES))

    async def look(self, session: Session, task_id: str) -> CallRecord | None:
        """Return what another replica recorded of a call. Raises ``StoreUnavailable``."""
        if _TASK_ID.fullmatch(task_id) is None:
            return None
        return await self._recorder.store.look(session.id, session.lease, task_id)

    async def found(self, session: Session, record: CallRecord, *, within_s: float) -> T:
        """Wait for the outcome of a call of another replica.

        Raises:
            UpstreamGone: its replica was lost; it may have run.
            CallConflict: its outcome is not kept.
            UpstreamTimeout: it still runs.
            GatewayError: the error that it ended with.
        """
        outcome = await self._outcome(session, record, within_s)
        if outcome is None:
            raise UpstreamGone("the outcome of the call is no longer known", sent=True)
        return outcome

    def forget(self, session: Session) -> None:
        """Forget all calls of a session that has ended."""
        self._recorder.forget(session)

    async def _outcome(self, session: Session, record: CallRecord, within_s: float) -> T | None:
        """Wait as `found` does; return None if the call is sure not to have run."""
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
        """Return the end of *call*, without its outcome if that takes more than *limit* bytes or is no JSON."""
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

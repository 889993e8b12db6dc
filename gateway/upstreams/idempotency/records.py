"""One upstream's calls towards the store: what is recorded of them, and what others' records mean.

A call that another replica recorded is never run here. If that replica is gone, nobody can tell whether the call ran,
and whoever asks for it is told so.
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

    # -- calls with a key -----------------------------------------------------------------------------------------

    async def once(
        self, session: Session, call: Call[T], key: str, run: Callable[[], Awaitable[T]], *, within_s: float
    ) -> T:
        """Run *call* if no replica has, else wait for its outcome.

        Raises:
            CallConflict: *key* stands for something else, or its outcome is not kept.
            StoreUnavailable: nothing ran.
            GatewayError: what the call ended with.
        """
        digest = call.digest
        known_s = max(KEYED_S, within_s + MARGIN_S)
        begun = self._change(Change.RUNNING, session, call.task_id, key=key, digest=digest, keep_s=known_s)
        while (record := await self._recorder.begin(begun, within_s=within_s)) is not None:
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
                await self._ended(session, call, key, call.result)
            raise
        except Exception as error:
            if never_ran(error):
                self._recorder.never_ran(begun)
            else:
                call.stop_timer()
                await self._ended(session, call, key, error)
            raise
        call.stop_timer()  # it has run in time: what is left is to say so
        await self._ended(session, call, key, value)
        return value

    async def _ended(self, session: Session, call: Call[T], key: str, outcome: T | Exception) -> None:
        written = self._written(outcome, OUTCOME_BYTES)
        kind = Change.DROPPED if written is None else Change.DONE
        await self._recorder.ended(
            self._change(kind, session, call.task_id, key=key, digest=call.digest, outcome=written or b"")
        )

    # -- calls without a key --------------------------------------------------------------------------------------

    def runs(self, session: Session, task_id: str, *, within_s: float) -> None:
        """Note that a call runs here."""
        self._recorder.runs(self._change(Change.RUNNING, session, task_id, keep_s=within_s + MARGIN_S))

    def noted(self, session: Session, task_id: str, outcome: T | Exception) -> None:
        """Note what came of it."""
        written = self._written(outcome, NOTED_BYTES)
        kind = Change.DROPPED if written is None else Change.DONE
        self._recorder.noted(self._change(kind, session, task_id, keep_s=UNKEYED_S, outcome=written or b""))

    # -- calls of others ------------------------------------------------------------------------------------------

    async def look(self, session: Session, task_id: str) -> CallRecord | None:
        """What another replica recorded of a call. Raises ``StoreUnavailable``."""
        if _TASK_ID.fullmatch(task_id) is None:
            return None
        return await self._recorder.store.look(session.id, session.lease, task_id)

    async def found(self, session: Session, record: CallRecord, *, within_s: float) -> T:
        """What came of a call of another replica, which is waited for.

        Raises:
            UpstreamGone: its replica was lost; it may have run.
            CallConflict: its outcome is not kept.
            UpstreamTimeout: it still runs.
            GatewayError: what it ended with.
        """
        outcome = await self._outcome(session, record, within_s)
        if outcome is None:
            raise UpstreamGone("the outcome of the call is no longer known", sent=True)
        return outcome

    def forget(self, session: Session) -> None:
        """Forget all calls of a session that has ended."""
        self._recorder.forget(self._change(Change.FORGOTTEN, session, ""))

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _outcome(self, session: Session, record: CallRecord, within_s: float) -> T | None:
        """As `found`; None: it is sure not to have run."""
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

    def _written(self, outcome: T | Exception, limit: int) -> bytes | None:
        if not isinstance(outcome, Exception) and weight(outcome) > WEIGHT_FACTOR * limit:
            return None
        try:
            written = self._codec.write(outcome)
        except (ValueError, TypeError, RecursionError):  # a value that is no JSON
            return None
        return written if len(written) <= limit else None

    @staticmethod
    def _change(
        kind: Change,
        session: Session,
        task_id: str,
        *,
        key: str = "",
        digest: str = "",
        keep_s: float = KEYED_S,
        outcome: bytes = b"",
    ) -> CallChange:
        return CallChange(
            kind=kind,
            session=session.id,
            lease=session.lease,
            task_id=task_id,
            key=key,
            digest=digest,
            keep_s=keep_s,
            outcome=outcome,
        )

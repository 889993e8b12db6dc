"""Stores calls to servers that keep no outcomes, in Redis. Each operation is one Lua script (``lua/calls/``).

One short-lived key shows that a replica lives; `begin` and `write` renew it. Its cost does not depend on the number of
calls, whereas a lease per call would need one renewal per call.

A replica that waits for another replica's call checks it every 0.25 s. A wake-up would need a subscription, and a list
of waiting replicas in each call. The wait is rare: it occurs only when a trainer repeats a call that still runs.

``docs/design/store.md`` lists the keys.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.errors import CallConflict, StoreUnavailable
from gateway.core.faults import FaultKind
from gateway.core.ids import SessionId
from gateway.core.ports.calls import (
    SESSION_BYTES,
    SESSION_MAX,
    TOTAL_BYTES,
    CallChange,
    CallRecord,
    CallState,
    Change,
    Tally,
)
from gateway.stores.redis.client import RedisClient
from gateway.stores.redis.records import text

SIGN_S = 5.0
"""Seconds without a sign of life after which a replica no longer counts as alive."""
LOST_S = 2.0
"""Seconds that a replica must lack its sign before its calls count as lost. All signs expire while Redis is away."""
LOOK_S = 0.25
"""Seconds between two checks of a call that a trainer waits for: at most 4 scripts of 20 us per second and trainer."""


class RedisCallStore:
    """Calls of all replicas; implements ``core.ports.calls.CallStore``."""

    def __init__(
        self,
        *,
        url: str,
        replica: str,
        prefix: str = "gateway",
        sign_s: float = SIGN_S,
        lost_s: float = LOST_S,
        session_max: int = SESSION_MAX,
        session_bytes: int = SESSION_BYTES,
        total_bytes: int = TOTAL_BYTES,
    ) -> None:
        """Create a store without a connection. Connections are opened when they are needed.

        Args:
            url: URL as for `RedisStore`. It is never logged.
            replica: Name of this process. No other process ever has the same name.
            prefix: Prefix of every key, the same as in `RedisStore`, which corrects the clock.
            sign_s, lost_s: `SIGN_S` and `LOST_S`; shorter in tests.
            session_max, session_bytes, total_bytes: Limits of ``core.ports.calls``; lower in tests.
        """
        self.replica = replica
        self._sign_s = sign_s
        self._lost_s = lost_s
        self._limits = session_max, session_bytes
        self._total_bytes = total_bytes
        self._link = RedisClient(url, root=f"{{{prefix}}}", family="calls")

    async def begin(self, call: CallChange) -> CallRecord | None:
        known = call.session, call.lease, hashed(call.key), call.digest, call.task_id
        answer = await self._link.run("begin", *known, self.replica, self._sign_s, call.keep_s, *self._limits)
        if not answer:
            return None
        if text(answer[0]) != call.digest:
            raise CallConflict("Idempotency-Key was used with another body")
        return _record(answer[1])

    async def write(self, changes: Sequence[CallChange]) -> str:
        values = [value for change in changes for value in _values(change)]
        limits = *self._limits, self._total_bytes
        return text(await self._link.run("write", self.replica, self._sign_s, *limits, *values))

    async def look(self, session: SessionId, lease: str, task_id: str) -> CallRecord | None:
        answer = await self._link.run("look", session, lease, task_id)
        return _record(answer) if answer else None

    async def settled(self, session: SessionId, lease: str, task_id: str, *, within_s: float) -> CallRecord | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        lost_at: float | None = None
        while True:
            try:
                record = await self.look(session, lease, task_id)
            except StoreUnavailable:
                if loop.time() >= deadline:
                    raise
                lost_at = None  # signs of life expire while Redis is away
            else:
                if record is None or record.state not in (CallState.RUNNING, CallState.LOST):
                    return record
                now = loop.time()
                lost_at = (lost_at or now) if record.state is CallState.LOST else None
                if now >= deadline or (lost_at is not None and now - lost_at >= self._lost_s):
                    return record
            await asyncio.sleep(min(LOOK_S, self._lost_s, max(0.01, deadline - loop.time())))

    async def tallies(self, session: SessionId, lease: str) -> Mapping[str, Tally]:
        rows = await self._link.run("tallies", session, lease)
        return {
            text(replica): _tally(text(is_whole), text(age_ms), text(told)) for replica, is_whole, age_ms, told in rows
        }

    async def aclose(self) -> None:
        await self._link.aclose()


def hashed(key: str) -> str:
    """Return the 32-digit hash under which the store keeps a trainer's key of any length."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _values(change: CallChange) -> tuple[str | float | bytes, ...]:
    place = change.session, change.lease, change.task_id
    if change.kind is Change.TALLIED:
        tally = change.tally
        # The age, because the time itself is from this machine's clock.
        age_ms = "-" if tally.ended_at is None else round(1000 * (time.monotonic() - tally.ended_at))
        return change.kind, *place, tally.told_in or "-", age_ms, change.keep_s, _told(tally)
    key = hashed(change.key) if change.key else "-"
    return change.kind, *place, key, change.digest or "-", change.keep_s, change.outcome


def _told(tally: Tally) -> str:
    head = f"{tally.number} {tally.version} {int(tally.is_opener)} {tally.steps} {tally.seconds!r}"
    fault = tally.fault.value if tally.fault is not None else "-"
    notes = f" {json.dumps(tally.notes)}" if tally.notes else ""  # older replicas can read counts without notes
    return f"{head} {tally.reward!r} {int(tally.is_rewarded)} {int(tally.finished)} {fault}{notes}"


def _tally(is_whole: str, age_ms: str, told: str) -> Tally:
    """Decode the tally that `_told` encoded, with the values that the store adds."""
    number, version, is_opener, steps, seconds, reward, is_rewarded, finished, fault, *notes = told.split(" ", 9)
    return Tally(
        number=int(number),
        version=int(version),
        seconds=float(seconds),
        is_opener=is_opener == "1",
        steps=int(steps),
        reward=float(reward),
        is_rewarded=is_rewarded == "1",
        finished=finished == "1",
        fault=None if fault == "-" else FaultKind(fault),
        notes=tuple(json.loads(notes[0])) if notes else (),
        ended_at=None if age_ms == "-" else time.monotonic() - int(age_ms) / 1000,
        is_whole=is_whole == "1",
    )


def _record(answer: Sequence[Any]) -> CallRecord:
    task_id, state, replica, lives, outcome = answer
    found = CallState(text(state))
    if found is CallState.RUNNING and not lives:
        found = CallState.LOST
    return CallRecord(task_id=text(task_id), state=found, replica=text(replica), outcome=outcome)

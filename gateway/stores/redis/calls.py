"""Calls to servers that keep no outcomes, in Redis: each operation is one Lua script (``lua/calls/``).

That a replica lives is one key of a short life, which `begin` and `write` renew: the price is the same whatever number
of calls it runs, where a lease of each call would have to be renewed call by call.

The keys are in ``docs/design/store.md``.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.errors import StoreUnavailable
from gateway.core.faults import FaultKind
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
from gateway.stores.memory.calls import other_digest
from gateway.stores.redis.client import Listener, RedisClient, happened
from gateway.stores.redis.records import packed, text

SIGN_S = 5.0
"""How long a replica counts as alive that says nothing."""
LOST_S = 2.0
"""How long it has to be without a sign before its calls count as lost: while Redis was away, all signs ran out."""
LOOK_S = 1.0
"""Between two looks at a call that is waited for, if nothing wakes the waiting."""


class _CallLink(RedisClient):
    """A link whose operations are those on calls, and which takes bytes, too."""

    def __init__(self, url: str, *, root: str) -> None:
        super().__init__(url, root=root, family="calls")

    async def run(self, name: str, *arguments: str | float | bytes, urgent: bool = False) -> Any:
        given = [value if isinstance(value, bytes) else packed(value) for value in arguments]
        return await asyncio.shield(self.detach(self._evaluate(self._scripts[name], given, urgent=urgent)))


class RedisCallStore:
    """Calls of all replicas; the seam is ``core.call_ports.CallStore``."""

    is_shared = True

    def __init__(
        self,
        *,
        url: str,
        replica: str,
        prefix: str = "gateway",
        keyed_s: float = KEYED_S,
        sign_s: float = SIGN_S,
        lost_s: float = LOST_S,
        session_max: int = SESSION_MAX,
        session_bytes: int = SESSION_BYTES,
        total_bytes: int = TOTAL_BYTES,
    ) -> None:
        """Connect to nothing yet: connections are made as they are needed.

        Args:
            url: as `stores.redis.RedisStore`; never logged.
            replica: the name of this process, which no other one ever has.
            prefix: of every key; the same as the other store's, which keeps the clock right.
            keyed_s: how long a key is known at least, whatever becomes of its call.
            sign_s, lost_s: those above; tests have smaller ones.
            session_max, session_bytes, total_bytes: the limits of the seam, also.
        """
        root = f"{{{prefix}}}"
        self.replica = replica
        self._keyed_s = keyed_s
        self._sign_s = sign_s
        self._lost_s = lost_s
        self._session_max = session_max
        self._session_bytes = session_bytes
        self._total_bytes = total_bytes
        self._link = _CallLink(url, root=root)
        # Begun with the first wait: most replicas never need it.
        self._listener: Listener | None = None
        self._channel = f"{root}:calls_ended:{replica}"
        self._waiting: dict[str, set[asyncio.Event]] = {}

    async def begin(
        self, session: SessionId, lease: str, *, key: str, digest: str, task_id: str, within_s: float
    ) -> CallRecord | None:
        known_s = max(self._keyed_s, within_s + MARGIN_S)
        limits = self._session_max, self._session_bytes
        answer = await self._link.run(
            "begin", session, lease, hashed(key), digest, task_id, self.replica, self._sign_s, known_s, *limits
        )
        if not answer:
            return None
        if text(answer[0]) != digest:
            raise other_digest()
        return _record(answer[1])

    async def write(self, changes: Sequence[CallChange]) -> str:
        values = [value for change in changes for value in _values(change)]
        limits = self._session_max, self._session_bytes, self._total_bytes
        return text(await self._link.run("write", self.replica, self._sign_s, *limits, *values))

    async def look(self, session: SessionId, lease: str, task_id: str) -> CallRecord | None:
        answer = await self._link.run("look", session, lease, task_id, "")
        return _record(answer) if answer else None

    async def settled(self, session: SessionId, lease: str, task_id: str, *, within_s: float) -> CallRecord | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        lost_at: float | None = None
        news = asyncio.Event()
        self._waiting.setdefault(task_id, set()).add(news)
        try:
            self._listen()
            while True:
                news.clear()
                try:
                    answer = await self._link.run("look", session, lease, task_id, self.replica)
                except StoreUnavailable:
                    if loop.time() >= deadline:
                        raise
                    lost_at = None  # signs run out while it is away
                else:
                    record = _record(answer) if answer else None
                    if record is None or record.state not in (CallState.RUNNING, CallState.LOST):
                        return record
                    now = loop.time()
                    lost_at = (lost_at or now) if record.state is CallState.LOST else None
                    if now >= deadline or (lost_at is not None and now - lost_at >= self._lost_s):
                        return record
                pause_s = min(LOOK_S, self._lost_s) if lost_at is not None else LOOK_S
                await happened(news, timeout_s=min(pause_s, max(0.01, deadline - loop.time())))
        finally:
            waiting = self._waiting[task_id]
            waiting.discard(news)
            if not waiting:
                del self._waiting[task_id]

    async def tallies(self, session: SessionId, lease: str) -> Mapping[str, Tally]:
        rows = await self._link.run("tallies", session, lease)
        return {
            text(replica): _tally(text(is_whole), text(age_ms), text(told)) for replica, is_whole, age_ms, told in rows
        }

    async def aclose(self) -> None:
        if self._listener is not None:
            await self._listener.aclose()
        await self._link.aclose()

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = Listener(
                self._link.client, [self._channel], heard=self._heard, subscribed=self._look_again
            )
            self._listener.start()

    def _heard(self, channel: str, task_id: str) -> None:
        for news in self._waiting.get(task_id, ()):
            news.set()

    def _look_again(self) -> None:
        for waiting in self._waiting.values():
            for news in waiting:
                news.set()


def hashed(key: str) -> str:
    """What stands for a trainer's key, whatever its length."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _values(change: CallChange) -> tuple[str | float | bytes, ...]:
    place = change.session, change.lease, change.task_id
    if change.kind is Change.TALLIED:
        tally = change.tally
        # Not the moment, which is one of this machine's clock.
        age_ms = "-" if tally.ended_at is None else round(1000 * (time.monotonic() - tally.ended_at))
        return change.kind, *place, tally.told_in or "-", age_ms, change.keep_s, _told(tally)
    key = hashed(change.key) if change.key else "-"
    return change.kind, *place, key, change.digest or "-", change.keep_s, change.outcome


def _told(tally: Tally) -> str:
    head = f"{tally.number} {tally.version} {int(tally.is_opener)} {tally.steps} {tally.seconds!r}"
    fault = tally.fault.value if tally.fault is not None else "-"
    return f"{head} {tally.reward!r} {int(tally.is_rewarded)} {int(tally.finished)} {fault}"


def _tally(is_whole: str, age_ms: str, told: str) -> Tally:
    """Read what `_told` wrote, and what the store adds to it."""
    number, version, is_opener, steps, seconds, reward, is_rewarded, finished, fault = told.split(" ")
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
        ended_at=None if age_ms == "-" else time.monotonic() - int(age_ms) / 1000,
        is_whole=is_whole == "1",
    )


def _record(answer: Sequence[Any]) -> CallRecord:
    task_id, state, replica, lives, outcome = answer
    found = CallState(text(state))
    if found is CallState.RUNNING and not lives:
        found = CallState.LOST
    return CallRecord(task_id=text(task_id), state=found, replica=text(replica), outcome=outcome)

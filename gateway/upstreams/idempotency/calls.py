"""Runs each call once, in its own task, and keeps the outcome for repeated requests.

A call continues when its trainer disconnects. A repeated request gets the outcome of the first run. The request
contains the call's task id or idempotency key, or repeats a call whose stream broke before its end.

With *records*, this holds across all replicas. A call with a key is recorded in the store before it runs and after it
ends. A call without a key is recorded in the background, so other replicas usually know its id too.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, TypeVar

from gateway.core.errors import (
    CallConflict,
    PoolExhausted,
    UpstreamGone,
    UpstreamTimeout,
)
from gateway.core.ids import SessionId, WorkerId
from gateway.core.ports.calls import KEYED_S, UNKEYED_S
from gateway.core.session import Session
from gateway.upstreams.idempotency.call import Call, never_ran
from gateway.upstreams.idempotency.records import Records

T = TypeVar("T")

SESSION_MAX: Final = 256
"""Largest number of calls in progress, and of kept outcomes, in one session."""
SESSION_BYTES: Final = 128 * 2**20
"""Largest estimated size of the kept outcomes of one session."""
TOTAL_MAX: Final = 20_000
"""Largest number of kept outcomes of all sessions."""
TOTAL_BYTES: Final = 256 * 2**20
"""Largest estimated size of the kept outcomes of all sessions."""
KEYS_MAX: Final = 1024
"""Largest number of known keys of one session, including keys whose outcome was dropped."""
CUT_MAX: Final = 64
"""Largest number of known calls of one session whose stream broke."""
QUIET_S: Final = 7200.0
"""Seconds without a call after which a session is dropped, because another replica has closed it."""

_Key = tuple[SessionId, str]


def digest_of(value: Any) -> str:
    """Return a hash of a JSON *value* that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()


@dataclass(slots=True, eq=False)
class _Episode(Generic[T]):
    """The calls of one session."""

    session: Session
    used_at: float
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    calls: OrderedDict[str, Call[T]] = field(default_factory=OrderedDict)
    """Task id → call, for calls in progress and kept calls, in the order of their start."""
    keys: OrderedDict[str, tuple[str, Call[T] | None]] = field(default_factory=OrderedDict)
    """Key → digest and call. The call is None if its outcome was dropped."""
    cut: OrderedDict[str, str] = field(default_factory=OrderedDict)
    """Task id → digest, for calls whose last listener left before the outcome was delivered."""
    bytes: int = 0
    kept: int = 0


class OnceOnlyCalls(Generic[T]):
    """The calls of all sessions that this replica runs for one upstream."""

    def __init__(
        self,
        records: Records[T] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        session_bytes: int = SESSION_BYTES,
        session_max: int = SESSION_MAX,
        total_bytes: int = TOTAL_BYTES,
        total_max: int = TOTAL_MAX,
    ) -> None:
        """Start without calls. *records* shares them with other replicas. With None, this process alone knows them."""
        self._records = records
        self._clock = clock
        self._session_bytes = session_bytes
        self._session_max = session_max
        self._total_bytes = total_bytes
        self._total_max = total_max
        self._episodes: OrderedDict[_Key, _Episode[T]] = OrderedDict()
        # Kept calls that have ended, oldest first. Calls with a key (True) are kept longer than calls without (False).
        self._ended: dict[bool, OrderedDict[str, _Episode[T]]] = {False: OrderedDict(), True: OrderedDict()}
        self._bytes = 0

    def __repr__(self) -> str:
        kept = len(self._ended[False]) + len(self._ended[True])
        return f"<Calls of {len(self._episodes)} sessions, {kept} kept, {self._bytes} bytes>"

    # -- begin and find -------------------------------------------------------------------------------------------

    async def run(
        self,
        session: Session,
        what: Any,
        run: Callable[[], Awaitable[T]],
        *,
        within_s: float,
        key: str | None = None,
        is_asked: bool = False,
    ) -> T:
        """Run a call once and return its outcome, as `begin` does. Without a *key*, the outcome is not kept."""
        call = self.begin(session, what, run, within_s=within_s, key=key, is_resumable=False, is_asked=is_asked)
        return await call.outcome()

    def begin(
        self,
        session: Session,
        what: Any,
        run: Callable[[], Awaitable[T]],
        *,
        within_s: float,
        key: str | None = None,
        is_resumable: bool = True,
        is_asked: bool = False,
    ) -> Call[T]:
        """Start *run*, or return the earlier call that this one repeats. Must be called from a task.

        With a *key* and records, an unavailable store ends the call with ``StoreUnavailable``. Nothing ran then.

        Args:
            what: JSON that describes the call. An equal value is a repetition.
            within_s: Seconds after which the call is cancelled with ``UpstreamTimeout`` as its outcome.
            is_resumable: True if a trainer receives the task id, and may request the outcome again.
            is_asked: True if another replica requests the call and has recorded it.

        Raises:
            CallConflict: *key* belongs to another call, or its outcome is no longer kept.
            PoolExhausted: Too many calls are in progress in the session. Nothing ran.
        """
        self._sweep()
        episode = self._episode(session)
        is_kept = is_resumable or key is not None
        digest = digest_of(what) if is_kept else ""
        if key is not None:
            known = _known(episode, key, digest, is_asked=is_asked)
        else:
            known = self._same(episode, digest) if is_resumable else None
        if known is not None:
            return known
        call: Call[T] = Call(digest=digest, key=key, is_kept=is_kept, is_recorded=is_kept and not is_asked)
        self._start(episode, call, partial(self._worked, episode, call, run, within_s), within_s)
        if key is not None:
            episode.keys[key] = digest, call
            _forget_old_keys(episode)
        if key is None and call.is_recorded and self._records is not None:
            self._records.runs(session, call, within_s=within_s)
        return call

    async def seek(self, session: Session, task_id: str, *, within_s: float) -> Call[T] | None:
        """Return a call as `find` does, also if another replica runs it. Raises ``StoreUnavailable``."""
        call = self.find(session, task_id)
        if self._records is None or (call is not None and not call.was_in_vain):
            return call
        record = await self._records.look(session, task_id)
        episode = self._episode(session)
        call = episode.calls.get(task_id)
        if record is None or (call is not None and not call.was_in_vain):
            return call
        call = Call(digest="", key=None, is_kept=True, task_id=task_id)
        call.is_elsewhere = True
        self._start(episode, call, partial(self._records.found, session, record, within_s=within_s), within_s)
        return call

    def find(self, session: Session, task_id: str) -> Call[T] | None:
        """Return the call of *session* with this task id, or None if this replica does not know it (any more)."""
        self._sweep()
        episode = self._episodes.get((session.id, session.lease))
        return None if episode is None else episode.calls.get(task_id)

    @contextmanager
    def listening(self, session: Session, call: Call[T]) -> Iterator[Call[T]]:
        """Register a listener of *call*. The listener sets ``was_delivered`` after it delivered the complete outcome.

        If all listeners leave before that, `begin` finds the call again by an equal description.
        """
        call.listeners += 1
        try:
            yield call
        finally:
            call.listeners -= 1
            episode = self._episodes.get((session.id, session.lease))
            if episode is not None and call.task_id in episode.calls:
                if call.was_delivered:
                    episode.cut.pop(call.task_id, None)
                elif not call.listeners:
                    episode.cut[call.task_id] = call.digest
                    if len(episode.cut) > CUT_MAX:
                        episode.cut.popitem(last=False)

    def running(self, session: Session) -> int:
        """Return the number of calls in progress in *session*."""
        episode = self._episodes.get((session.id, session.lease))
        return 0 if episode is None else len(episode.running)

    def busy(self, worker: WorkerId) -> list[Session]:
        """Return the sessions of *worker* that have a call in progress."""
        return [one.session for one in self._episodes.values() if one.running and one.session.worker == worker]

    # -- end ------------------------------------------------------------------------------------------------------

    async def settle(self, session: Session, *, within_s: float) -> bool:
        """Wait for the calls of *session*, for at most *within_s* seconds. Return True if no call is in progress."""
        episode = self._episodes.get((session.id, session.lease))
        if episode is not None and episode.running:
            await asyncio.wait(set(episode.running.values()), timeout=within_s)
        return episode is None or not episode.running

    def forget(self, session: Session) -> None:
        """Drop the calls of a session that has ended, here and in the store. Calls in progress are cancelled."""
        if self._records is not None:
            self._records.forget(session)
        episode = self._episodes.pop((session.id, session.lease), None)
        if episode is not None:
            self._break_off(episode, "the session was ended while the call ran", is_forgotten=True)

    def _break_off(self, episode: _Episode[T], why: str, *, is_forgotten: bool = False) -> None:
        for task_id, task in list(episode.running.items()):
            call = episode.calls[task_id]
            # Not `SessionNotFound`, which would mean that nothing ran.
            call.fail(UpstreamGone(why, sent=True))
            call.is_forgotten = is_forgotten
            task.cancel()
        for call in [call for call in episode.calls.values() if call.ended_at is not None]:
            self._drop(episode, call)

    async def aclose(self) -> None:
        """Cancel all calls."""
        tasks = [task for episode in self._episodes.values() for task in episode.running.values()]
        episodes, self._episodes = list(self._episodes.values()), OrderedDict()
        for episode in episodes:  # the store keeps its records for other replicas
            self._break_off(episode, "the gateway went away while the call ran")
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _episode(self, session: Session) -> _Episode[T]:
        place = session.id, session.lease
        episode = self._episodes.get(place)
        if episode is None:
            episode = self._episodes[place] = _Episode(session, self._clock())
        episode.used_at = self._clock()
        self._episodes.move_to_end(place)
        return episode

    def _same(self, episode: _Episode[T], digest: str) -> Call[T] | None:
        for task_id, cut in list(episode.cut.items()):
            call = episode.calls.get(task_id)
            if call is None:  # the outcome is no longer kept
                del episode.cut[task_id]
            elif cut == digest and not call.listeners:
                return call
        return None

    def _start(self, episode: _Episode[T], call: Call[T], work: Callable[[], Awaitable[T]], within_s: float) -> None:
        if len(episode.running) >= self._session_max:
            raise PoolExhausted("too many calls wait in this session")
        episode.calls[call.task_id] = call
        # A timer instead of a timeout scope: callers get the error in time, even if the call reacts slowly to `cancel`.
        late = UpstreamTimeout(f"the call took longer than {within_s:g} s")
        call.timer = asyncio.get_running_loop().call_later(within_s, self._expire, episode, call, late)
        episode.running[call.task_id] = asyncio.ensure_future(self._run(episode, call, work))

    async def _run(self, episode: _Episode[T], call: Call[T], work: Callable[[], Awaitable[T]]) -> None:
        try:
            call.succeed(await work())
        except asyncio.CancelledError:
            call.fail(UpstreamGone("the call was cancelled", sent=True))
        except Exception as error:  # noqa: BLE001  # the error is the outcome, raised in the waiting callers
            call.fail(error)
            if never_ran(error) and call.key is not None:
                _unlearn(episode, call.key, call)
        finally:
            call.admit()
            call.stop_timer()
            if episode.running.get(call.task_id) is asyncio.current_task():
                del episode.running[call.task_id]
            self._keep(episode, call)

    async def _worked(self, episode: _Episode[T], call: Call[T], run: Callable[[], Awaitable[T]], within_s: float) -> T:
        if self._records is None or call.key is None or not call.is_recorded:
            call.admit()
            return await run()
        return await self._records.once(episode.session, call, run, within_s=within_s)

    def _expire(self, episode: _Episode[T], call: Call[T], error: UpstreamTimeout) -> None:
        call.fail(error)
        if (task := episode.running.get(call.task_id)) is not None:
            task.cancel()

    def _keep(self, episode: _Episode[T], call: Call[T]) -> None:
        place = episode.session.id, episode.session.lease
        if not call.is_kept or call.was_in_vain or self._episodes.get(place) is not episode:
            if episode.calls.get(call.task_id) is call:
                del episode.calls[call.task_id]
            return
        if call.is_recorded and call.key is None and self._records is not None:
            self._records.noted(episode.session, call)
        call.ended_at = episode.used_at = self._clock()
        call.weight = call.outcome_weight()
        self._ended[call.key is not None][call.task_id] = episode
        self._bytes += call.weight
        episode.bytes += call.weight
        episode.kept += 1
        while episode.bytes > self._session_bytes or episode.kept > self._session_max:
            self._drop(episode, next(old for old in episode.calls.values() if old.ended_at is not None))
        self._sweep()

    def _drop(self, episode: _Episode[T], call: Call[T]) -> None:
        """Drop an outcome. Its key stays, because a refusal is better than a second run."""
        del self._ended[call.key is not None][call.task_id]
        del episode.calls[call.task_id]
        episode.cut.pop(call.task_id, None)
        if call.key is not None and call.key in episode.keys:
            episode.keys[call.key] = call.digest, None
        self._bytes -= call.weight
        episode.bytes -= call.weight
        episode.kept -= 1

    def _sweep(self) -> None:
        now = self._clock()
        for ended, kept_s in ((self._ended[False], UNKEYED_S), (self._ended[True], KEYED_S)):
            while ended and _age(oldest := self._oldest(ended)) + kept_s < now:
                self._drop(*oldest)
        while self._bytes > self._total_bytes or sum(map(len, self._ended.values())) > self._total_max:
            self._drop(*min((self._oldest(ended) for ended in self._ended.values() if ended), key=_age))
        while self._episodes:
            episode = next(iter(self._episodes.values()))
            if episode.used_at + QUIET_S > now or episode.running:
                break
            self._break_off(self._episodes.pop((episode.session.id, episode.session.lease)), "the session is quiet")

    @staticmethod
    def _oldest(ended: OrderedDict[str, _Episode[T]]) -> tuple[_Episode[T], Call[T]]:
        task_id, episode = next(iter(ended.items()))
        return episode, episode.calls[task_id]


def _age(ended: tuple[Any, Call[Any]]) -> float:
    return float(ended[1].ended_at or 0.0)


def _known(episode: _Episode[T], key: str, digest: str, *, is_asked: bool) -> Call[T] | None:
    if key not in episode.keys:
        return None
    known_digest, call = episode.keys[key]
    if known_digest != digest:
        raise CallConflict("Idempotency-Key was used with another body")
    if call is None:
        raise CallConflict("the outcome of this Idempotency-Key is no longer kept")
    # The known call may itself wait for the asking replica, or be about to. Returning it would make both wait forever.
    waits = is_asked and (call.is_elsewhere or call.is_undecided)
    return None if waits or call.was_in_vain else call


def _unlearn(episode: _Episode[T], key: str, call: Call[T]) -> None:
    known = episode.keys.get(key)
    if known is not None and known[1] is call:
        del episode.keys[key]


def _forget_old_keys(episode: _Episode[T]) -> None:
    if len(episode.keys) > KEYS_MAX:
        oldest = next((key for key, (_, call) in episode.keys.items() if call is None or call.is_over), None)
        if oldest is not None:
            del episode.keys[oldest]

"""Calls: each runs once, as a task of its own, and what came of it is kept for those who ask again.

A trainer that hangs up does not end the call that it began. Whoever asks again gets the outcome of the first run: by
the task id that it was told, by its idempotency key, or by repeating a call whose stream was cut before its end.

With *records* that holds for all replicas: a call with a key is recorded in the store before it runs and when it has
ended; of one without, the store hears in the background, so that its id is mostly known to others, too.
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
"""Calls under way in one session; and outcomes that are kept of one."""
SESSION_BYTES: Final = 128 * 2**20
TOTAL_MAX: Final = 20_000
"""Outcomes that are kept in all."""
TOTAL_BYTES: Final = 256 * 2**20
KEYS_MAX: Final = 1024
"""Keys that are remembered of one session, those without an outcome included."""
CUT_MAX: Final = 64
"""Cut calls that are remembered of one session."""
QUIET_S: Final = 7200.0
"""A session without a call for so long is forgotten: it was closed in another replica."""

_Key = tuple[SessionId, str]


def digest_of(value: Any) -> str:
    """Name a JSON *value*, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()


@dataclass(slots=True, eq=False)
class _Episode(Generic[T]):
    """What is known of one session's calls."""

    session: Session
    used_at: float
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    calls: OrderedDict[str, Call[T]] = field(default_factory=OrderedDict)
    """By task id: under way, and kept; in the order in which they were begun."""
    keys: OrderedDict[str, tuple[str, Call[T] | None]] = field(default_factory=OrderedDict)
    """Key → digest, and the call unless its outcome was dropped."""
    cut: OrderedDict[str, str] = field(default_factory=OrderedDict)
    """Calls that everybody left before their outcome was delivered: task id → digest."""
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
        """*records*: where other replicas find them; None: there are no others, and nothing outlives this one."""
        self._records = records
        self._clock = clock
        self._session_bytes = session_bytes
        self._session_max = session_max
        self._total_bytes = total_bytes
        self._total_max = total_max
        self._episodes: OrderedDict[_Key, _Episode[T]] = OrderedDict()
        # Ended and kept, oldest first: those with a key are kept for longer.
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
        """Run something once and return its outcome; without a *key* it is not kept. As `begin`."""
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
        """Begin *run*, or find the call that this one is a repetition of. Must be called from a task.

        Args:
            what: JSON that says what is run: the same again is a repetition.
            within_s: The longest run; then its outcome is ``UpstreamTimeout``, and it is cancelled.
            is_resumable: Whether its task id is told to somebody, who may ask again.
            is_asked: Whether another replica asks for it, which has recorded it.

        With a *key* and records the call ends with ``StoreUnavailable``, and nothing ran, where the store is away.

        Raises:
            CallConflict: *key* stands for something else, or its outcome is no longer kept.
            PoolExhausted: too many calls are under way in the session; nothing ran.
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
        """As `find`, and among the calls of other replicas, too. Raises ``StoreUnavailable``."""
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
        """The call of *session* that was given this id; None if there is none (any more)."""
        self._sweep()
        episode = self._episodes.get((session.id, session.lease))
        return None if episode is None else episode.calls.get(task_id)

    @contextmanager
    def listening(self, session: Session, call: Call[T]) -> Iterator[Call[T]]:
        """Be somebody who waits for *call*; set ``was_delivered`` once its outcome was handed over whole.

        A call that everybody left without its outcome is found again by beginning the same.
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
        """How many calls are under way in *session*."""
        episode = self._episodes.get((session.id, session.lease))
        return 0 if episode is None else len(episode.running)

    def busy(self, worker: WorkerId) -> list[Session]:
        """The sessions in *worker* in which a call is under way."""
        return [one.session for one in self._episodes.values() if one.running and one.session.worker == worker]

    # -- end ------------------------------------------------------------------------------------------------------

    async def settle(self, session: Session, *, within_s: float) -> bool:
        """Wait until no call is under way in *session*, at most so long; whether none is."""
        episode = self._episodes.get((session.id, session.lease))
        if episode is not None and episode.running:
            await asyncio.wait(set(episode.running.values()), timeout=within_s)
        return episode is None or not episode.running

    def forget(self, session: Session) -> None:
        """Drop what is known of a session that has ended, here and in the store; calls under way are broken off."""
        if self._records is not None:
            self._records.forget(session)
        episode = self._episodes.pop((session.id, session.lease), None)
        if episode is not None:
            self._break_off(episode, "the session was ended while the call ran", is_forgotten=True)

    def _break_off(self, episode: _Episode[T], why: str, *, is_forgotten: bool = False) -> None:
        for task_id, task in list(episode.running.items()):
            call = episode.calls[task_id]
            # Never "not found", which would say that nothing ran.
            call.fail(UpstreamGone(why, sent=True))
            call.is_forgotten = is_forgotten
            task.cancel()
        for call in [call for call in episode.calls.values() if call.ended_at is not None]:
            self._drop(episode, call)

    async def aclose(self) -> None:
        """Break off all calls."""
        tasks = [task for episode in self._episodes.values() for task in episode.running.values()]
        episodes, self._episodes = list(self._episodes.values()), OrderedDict()
        for episode in episodes:  # the store keeps what it knows, for other replicas
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
            if call is None:  # its outcome is no longer kept
                del episode.cut[task_id]
            elif cut == digest and not call.listeners:
                return call
        return None

    def _start(self, episode: _Episode[T], call: Call[T], work: Callable[[], Awaitable[T]], within_s: float) -> None:
        if len(episode.running) >= self._session_max:
            raise PoolExhausted("too many calls wait in this session")
        episode.calls[call.task_id] = call
        # A timer and not a scope: whoever waits learns in time, also where what runs is slow to take its cancellation.
        late = UpstreamTimeout(f"the call took longer than {within_s:g} s")
        call.timer = asyncio.get_running_loop().call_later(within_s, self._expire, episode, call, late)
        episode.running[call.task_id] = asyncio.ensure_future(self._run(episode, call, work))

    async def _run(self, episode: _Episode[T], call: Call[T], work: Callable[[], Awaitable[T]]) -> None:
        try:
            call.succeed(await work())
        except asyncio.CancelledError:
            call.fail(UpstreamGone("the call was broken off", sent=True))
        except Exception as error:  # noqa: BLE001  # it is the outcome: raised where somebody waits
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
        """Forget an outcome. Its key stays: a refusal is better than a second run."""
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
    # A call that waits for the replica that asks, or is about to, is not what it asks for: both would wait for ever.
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

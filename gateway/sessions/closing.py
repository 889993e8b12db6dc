"""The end of a session: mark it ``CLOSING``, tell the worker, then free the slot.

Both the request path (a trainer's delete, an opening that failed) and the control loop (expiry) end sessions this way.
What is to be given back goes on behind a request that ends early, and is patient with a store that does not answer:
a slot that nobody gives back is held until a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import anyio

from gateway.core.environment import Environment, UpstreamKind
from gateway.core.episode import Summary
from gateway.core.errors import (
    GatewayError,
    SessionClosed,
    SessionExists,
    SessionNotFound,
    UpstreamGone,
    UpstreamTimeout,
)
from gateway.core.faults import Fault, FaultKind
from gateway.core.ids import SessionId
from gateway.core.outcomes import EpisodeOutcome, is_without_reward, outcome_of, reward_of
from gateway.core.ports.store import Store
from gateway.core.ports.upstream import SessionUpstream
from gateway.core.retry import STORE_PATIENCE_S, patiently
from gateway.core.session import CloseReason, Session, SessionRequest, SessionState
from gateway.metrics import Metrics

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLEANUP_S: Final = 30.0
"""How long a request waits for what it gives back; the rest goes on behind it."""

TOLD_S: Final = 600.0
"""How long a worker that does not answer is told again of the end of a session."""
TOLD_PAUSE_S: Final = 1.0
Missed = Callable[[], None]
"""Is called when the store did not answer."""


class EpisodeRecords(Protocol):
    """Keeps what came of the episodes on each task: `gateway.tasks.curricula.stats.TaskStats`."""

    def note(self, session: Session, environment: Environment, summary: Summary, reward: float) -> None:
        """Note how an episode went whose *reward* the agent earned. Returns at once."""


class SessionCloser:
    """Ends sessions at their workers and in the store."""

    def __init__(
        self,
        *,
        store: Store,
        upstreams: Mapping[UpstreamKind, SessionUpstream],
        metrics: Metrics,
        patience_s: float = STORE_PATIENCE_S,
        records: EpisodeRecords | None = None,
    ) -> None:
        """
        Args:
            patience_s: How long a store that does not answer is asked again, in each step of an end.
            records: Note each session that ended with a reward; None: nobody keeps records.
        """
        self._store = store
        self._upstreams = upstreams
        self._metrics = metrics
        self._patience_s = patience_s
        self._records = records
        # The state: what goes on behind requests.
        self._cleanups: set[asyncio.Task[Any]] = set()
        self._telling: set[asyncio.Task[None]] = set()

    async def begin(
        self,
        id: SessionId,
        reason: CloseReason,
        *,
        lease: str = "",
        patience_s: float | None = None,
        missed: Missed | None = None,
    ) -> Session | None:
        """Let the store begin the end of a session, patiently; None if there is none whose end is to be begun.

        A try of ours whose answer was lost may have begun it. Nobody else goes on with it then, until it is due.
        """
        tries = 0

        async def begun() -> Session | None:
            nonlocal tries
            tries += 1
            session = await self._store.begin_close(id, reason, lease=lease)
            if session is None and tries > 1:
                found = await self._found(id)
                if found is not None and found.state is SessionState.CLOSING and found.reason is reason:
                    return found if lease in ("", found.lease) else None
            return session

        for_s = self._patience_s if patience_s is None else patience_s
        return await patiently(begun, for_s=for_s, missed=missed)

    async def finish(
        self, session: Session, environment: Environment, *, counted: bool = True, missed: Missed | None = None
    ) -> Summary | None:
        """End a session that is ``CLOSING``, and give its slot back. Returns how the episode went, if known.

        *counted* False leaves logs and metrics alone: the session was never one of a trainer.

        A worker that does not take the end of a session is drained: its slot can't be trusted, and giving it to
        somebody else would put a session beside one that still runs.
        """
        summary, is_answered = await self._end_in_worker(session, environment, missed=missed)
        if await self._released(session, missed=missed) and counted:
            self._count(session, environment, summary, is_answered=is_answered)
        return summary

    async def hand_over(
        self, session: Session, environment: Environment, successor: SessionRequest, *, is_wanted: Callable[[], bool]
    ) -> Session | None:
        """End a session that is ``CLOSING``, and give its slot to *successor*, which gets no other one.

        Returns the successor's session, or None where the slot can't be used again, or is not wanted when the session
        has ended in its worker: then it was given back.

        Raises:
            SessionExists: another session has the successor's id; the slot was given back.
        """
        summary, is_answered = await self._end_in_worker(session, environment, keeps=True)
        try:
            begun = await self._handed_over(session, successor) if is_wanted() else None
        except SessionExists:
            await self._end_in_worker(session, environment)
            await self._released(session)
            raise
        if begun is None:
            await self._end_in_worker(session, environment)  # what was kept for the successor takes the slot still
        if begun is not None or await self._released(session):
            self._count(session, environment, summary, is_answered=is_answered)
        return begun

    # -- giving back ----------------------------------------------------------------------------------------------

    async def give_back(
        self, session: Session, environment: Environment, reason: CloseReason, *, counted: bool = True
    ) -> None:
        """End a session that this caller holds, and give its slot back; see `through`. Raises nothing of ours."""
        await self.through(session.id, partial(self._given_back, session, environment, reason, counted))

    async def taken_back(
        self, session: Session, environment: Environment, reason: CloseReason, *, counted: bool, missed: Missed
    ) -> bool:
        """Do what `give_back` lets go through; False: the session was ended by somebody else, or has no slot any more.

        Raises:
            StoreUnavailable: the slot is held until a deadline of the session.
        """
        closing = await self.begin(session.id, reason, lease=session.lease, missed=missed)
        if closing is None:
            return False
        # The store has no handle yet of a session that was just being opened.
        closing = replace(closing, handle=closing.handle or session.handle)
        await self.finish(closing, environment, counted=counted, missed=missed)
        return True

    async def abandon(self, session: Session, environment: Environment, *, missed: Missed) -> None:
        """Give an opening's slot back although its worker, which is suspect, answers nothing; it ends in there later.

        It is told behind the caller until it answers, by the session's lease: a successor elsewhere, or in that worker,
        is not meant.
        """
        closing = await self.begin(session.id, CloseReason.OPEN_FAILED, lease=session.lease, missed=missed)
        if closing is None:
            return  # who ended it meanwhile tells the worker
        task = asyncio.create_task(self._tell_end(closing, environment))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)
        await self._released(closing, missed=missed)

    async def _tell_end(self, session: Session, environment: Environment) -> None:
        deadline = time.monotonic() + TOLD_S
        while time.monotonic() < deadline:
            try:
                async with asyncio.timeout(environment.timeouts.close_s):
                    await self._upstreams[environment.wire].close(session, environment)
                return
            except (UpstreamGone, UpstreamTimeout, TimeoutError):
                with contextlib.suppress(GatewayError):
                    if await self._store.worker(session.worker) is None:
                        return
            except GatewayError as error:
                logger.warning("session_close_failed session=%s worker=%s error=%s", session.id, session.worker, error)
                with contextlib.suppress(GatewayError):
                    await self._store.drain_worker(session.worker)
                return
            await asyncio.sleep(TOLD_PAUSE_S)

    async def _given_back(
        self, session: Session, environment: Environment, reason: CloseReason, counted: bool, missed: Missed
    ) -> None:
        await self.taken_back(session, environment, reason, counted=counted, missed=missed)

    async def through(self, id: SessionId, cleanup: Callable[[Missed], Coroutine[Any, Any, None]]) -> None:
        """Run *cleanup* to its end, whatever becomes of its caller; it is handed what to call when the store is away.

        The caller waits for it, also when its trainer hung up, so that who asks next finds the slot free. But not
        longer than `CLEANUP_S`, and not for a store that is away: then it goes on behind.
        """
        is_away = asyncio.get_running_loop().create_future()

        def missed() -> None:
            if not is_away.done():
                is_away.set_result(None)

        going = self.go_on(id, cleanup(missed))
        # Unshielded, an anyio scope that was cancelled would end this wait at once.
        with anyio.CancelScope(shield=True):
            await asyncio.wait({going, is_away}, timeout=CLEANUP_S, return_when=asyncio.FIRST_COMPLETED)

    def go_on(self, id: SessionId, cleanup: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin what is to run to its end, whatever becomes of who waits for it; *id* is what the log says of it."""
        task = asyncio.create_task(cleanup, name=id)
        self._cleanups.add(task)  # a bare task may be garbage-collected
        task.add_done_callback(self._gone_on)
        return task

    def _gone_on(self, task: asyncio.Task[Any]) -> None:
        self._cleanups.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A deadline of the session does it.
            logger.warning("session_not_given_back session=%s error=%s", task.get_name(), error)

    async def settle(self, timeout_s: float) -> None:
        """Wait for what goes on behind requests, and for what comes of that, at most *timeout_s*."""
        deadline = time.monotonic() + timeout_s
        while self._cleanups and (left_s := deadline - time.monotonic()) > 0:
            await asyncio.wait(self._cleanups, timeout=left_s)

    # -- the steps of an end --------------------------------------------------------------------------------------

    async def _end_in_worker(
        self, session: Session, environment: Environment, *, keeps: bool = False, missed: Missed | None = None
    ) -> tuple[Summary | None, bool]:
        """What the worker tells of the episode, if anything; and whether it took the session's end."""
        try:
            # No Redis in here: the timeout's cancellation reaches the worker's connection only.
            async with asyncio.timeout(environment.timeouts.close_s):
                return await self._upstreams[environment.wire].close(session, environment, keeps=keeps), True
        except (GatewayError, TimeoutError) as error:
            logger.warning("session_close_failed session=%s worker=%s error=%s", session.id, session.worker, error)
            if not environment.server.url:  # that server would not be replaced, and says itself when it is full
                drain = partial(self._store.drain_worker, session.worker)
                await patiently(drain, for_s=self._patience_s, missed=missed)
            return None, False

    async def _released(self, session: Session, *, missed: Missed | None = None) -> bool:
        """Free the slot of a session that is ``CLOSING``; whether it was this caller who did."""
        tries = 0

        async def release() -> bool:
            nonlocal tries
            tries += 1
            # An answer that was lost was a yes, but for a worker that died in just that moment.
            return await self._store.release(session.id, session.lease) or tries > 1

        return await patiently(release, for_s=self._patience_s, missed=missed)

    async def _handed_over(self, session: Session, successor: SessionRequest) -> Session | None:
        tries = 0

        async def hand_over() -> Session | None:
            nonlocal tries
            tries += 1
            begun = await self._store.hand_over(session.id, session.lease, successor)
            if begun is None and tries > 1:  # a try whose answer was lost may have done it
                found = await self._found(successor.id)
                if found is not None and found.lease == successor.lease and found.state is SessionState.OPENING:
                    return found
            return begun

        return await patiently(hand_over, for_s=self._patience_s)

    async def _found(self, id: SessionId) -> Session | None:
        with contextlib.suppress(SessionNotFound, SessionClosed):
            return await self._store.find(id)
        return None

    def _count(self, session: Session, environment: Environment, summary: Summary | None, *, is_answered: bool) -> None:
        reason = session.reason or CloseReason.DELETED
        outcome = outcome_of(reason, summary, is_answered=is_answered)
        reward = reward_of(outcome, summary)
        self._metrics.session_closed(environment.name, reason.value, outcome, reward)
        if summary is not None:
            log_faults(session, summary.faults)
            if outcome is EpisodeOutcome.AUTHOR_FAULT and reason is not CloseReason.AUTHOR_FAULT:
                log_faults(session, _lacks(summary))
            if not summary.is_whole:
                told = (session.environment, session.task, session.id)
                logger.warning("episode_incomplete environment=%s task=%r session=%s", *told)
            if reward is not None and self._records is not None:
                self._records.note(session, environment, summary, reward)
        logger.info(
            "session_closed session=%s name=%r environment=%s worker=%s reason=%s outcome=%s reward=%s steps=%s",
            session.id,
            session.name,
            session.environment,
            session.worker,
            reason.value,
            outcome.value,
            reward,
            summary.steps if summary else None,
        )


def _lacks(summary: Summary) -> tuple[Fault, ...]:
    """What operators are told of an episode without any reward: no call failed in it, so that nothing else says so."""
    if not is_without_reward(summary) or summary.fault is not None:
        return ()
    message = (
        f"the environment ended the episode, and gave no reward in any of its {summary.steps} steps (null, or NaN)"
    )
    return (Fault(FaultKind.AUTHOR, "reward", message),)


def log_faults(session: Session, faults: Iterable[Fault]) -> None:
    """Log *faults* in *session* for operators: a line each, with the traceback as a Python literal.

    A literal is on one line, in characters that every terminal and file takes, whatever an exception's text holds.
    """
    for fault in faults:
        told = (session.environment, session.task, session.id, fault.place, fault.error, fault.traceback)
        if fault.kind is FaultKind.AUTHOR:
            logger.error("author_fault environment=%s task=%r session=%s place=%r error=%r traceback=%r", *told)
        else:
            logger.warning(
                "infrastructure_fault environment=%s task=%r session=%s place=%r error=%r traceback=%r", *told
            )

"""Ends sessions: marks the session ``CLOSING``, closes it in its worker, then frees its slot.

The request path (a trainer's delete, a failed opening) and the control loop (expiry) both end sessions this way.
Cleanup continues in the background if its request ends early, and retries while the store does not answer. A slot
that is not released stays held until a deadline of the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
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
from gateway.core.ids import GATEWAYS_OWN, SessionId
from gateway.core.outcomes import EpisodeOutcome, is_without_reward, kept_result, outcome_of, reward_of
from gateway.core.ports.step_log import EpisodeEnd, StepLog
from gateway.core.ports.store import Store
from gateway.core.ports.upstream import SessionUpstream
from gateway.core.retry import STORE_PATIENCE_S, patiently
from gateway.core.session import CloseReason, Session, SessionRequest, SessionState
from gateway.metrics import Metrics

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLEANUP_S: Final = 30.0
"""Seconds that a request waits for its cleanup, which then continues in the background."""

ENDED_AT_ONCE: Final = 64
"""Number of sessions that `SessionCloser.end_all` ends at the same time."""
TOLD_S: Final = 600.0
"""Seconds for which a close request to a worker that does not answer is retried."""
TOLD_PAUSE_S: Final = 1.0
Missed = Callable[[], None]
"""A callback for each time that the store does not answer."""


class EpisodeRecords(Protocol):
    """Keeps the results of episodes per task; implemented by `gateway.tasks.curricula.stats.TaskStats`."""

    def note(self, session: Session, environment: Environment, summary: Summary, reward: float) -> None:
        """Record the result of an episode in which the agent earned *reward*. Returns immediately."""


class SessionCloser:
    """Ends sessions in their workers and in the store."""

    def __init__(
        self,
        *,
        store: Store,
        upstreams: Mapping[UpstreamKind, SessionUpstream],
        metrics: Metrics,
        log: StepLog,
        patience_s: float = STORE_PATIENCE_S,
        records: EpisodeRecords | None = None,
    ) -> None:
        """
        Args:
            patience_s: Seconds for which each step of an end retries a store that does not answer.
            records: Receives the result of each session that ended with a reward; None keeps no records.
        """
        self._store = store
        self._upstreams = upstreams
        self._metrics = metrics
        self._log = log
        self._patience_s = patience_s
        self._records = records
        # The state: tasks that continue in the background.
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
        """Mark a session ``CLOSING`` in the store, with retries, and return it; None if there is no session to end.

        An earlier try whose answer was lost may have marked it. This call then returns it too, because otherwise the
        session would stay ``CLOSING`` until it is due.
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
        self,
        session: Session,
        environment: Environment,
        *,
        counted: bool = True,
        missed: Missed | None = None,
        told: Callable[[Summary | None], Awaitable[None]] | None = None,
    ) -> Summary | None:
        """Close a ``CLOSING`` session in its worker and release its slot. Return the episode's summary, if known.

        With *counted* False, logs and metrics leave the session out: no trainer ever had it. *told* gets the summary
        before the slot is released.

        A worker that fails to close a session is drained. Its slot can't be trusted: a new session in it could run next
        to the old one.
        """
        summary, is_answered = await self._end_in_worker(session, environment, missed=missed)
        if told is not None:
            await told(summary)
        if await self._released(session, missed=missed) and counted:
            self._count(session, environment, summary, is_answered=is_answered)
        return summary

    async def hand_over(
        self, session: Session, environment: Environment, successor: SessionRequest, *, is_wanted: Callable[[], bool]
    ) -> Session | None:
        """Close a ``CLOSING`` session in its worker and transfer its slot to *successor*.

        Returns:
            The successor's session. None if the slot can't be reused, or if `is_wanted` returns False after the worker
            has closed the session; the slot is then released.

        Raises:
            SessionExists: Another session has the successor's id. The slot is released.
        """
        summary, is_answered = await self._end_in_worker(session, environment, keeps=True)
        try:
            begun = await self._handed_over(session, successor) if is_wanted() else None
        except SessionExists:
            await self._end_in_worker(session, environment)
            await self._released(session)
            raise
        if begun is None:
            await self._end_in_worker(session, environment)  # frees what the worker kept in the slot for the successor
        if begun is not None or await self._released(session):
            self._count(session, environment, summary, is_answered=is_answered)
        return begun

    # -- releasing ------------------------------------------------------------------------------------------------

    async def give_back(
        self, session: Session, environment: Environment, reason: CloseReason, *, counted: bool = True
    ) -> None:
        """End a session that the caller holds and release its slot; see `through`. Raises no ``GatewayError``."""
        await self.through(session.id, partial(self._given_back, session, environment, reason, counted))

    async def end_all(
        self, sessions: Iterable[tuple[Session, Environment]], reason: CloseReason, *, within_s: float
    ) -> None:
        """End sessions as `give_back` does, a few at once. Begin no further end after *within_s* seconds."""
        limiter = anyio.CapacityLimiter(ENDED_AT_ONCE)

        async def end(session: Session, environment: Environment) -> None:
            async with limiter:
                await self.give_back(session, environment, reason)

        with anyio.move_on_after(within_s):
            async with anyio.create_task_group() as group:
                for session, environment in sessions:
                    group.start_soon(end, session, environment)

    async def taken_back(
        self, session: Session, environment: Environment, reason: CloseReason, *, counted: bool, missed: Missed
    ) -> bool:
        """End a session as `give_back` does, in the caller's task.

        Return False if another caller ended the session, or if it has no slot any more.

        Raises:
            StoreUnavailable: The store does not answer. The slot stays held until a deadline of the session.
        """
        closing = await self.begin(session.id, reason, lease=session.lease, missed=missed)
        if closing is None:
            return False
        # The store has no handle yet if the session was still opening.
        closing = replace(closing, handle=closing.handle or session.handle)
        await self.finish(closing, environment, counted=counted, missed=missed)
        return True

    async def abandon(self, session: Session, environment: Environment, *, missed: Missed) -> None:
        """Release the slot of an opening whose suspect worker does not answer.

        A background task retries the close request until the worker answers. The request names the session's lease, so
        it cannot end a successor of the same id, in this worker or in another.
        """
        closing = await self.begin(session.id, CloseReason.OPEN_FAILED, lease=session.lease, missed=missed)
        if closing is None:
            return  # the caller that ended it closes it in the worker
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
        """Run *cleanup* to its end, even if its caller is cancelled.

        The caller waits for it even if its trainer disconnected, so that the next request finds the slot free. The wait
        ends after `CLEANUP_S`, or when *cleanup* calls its argument because the store does not answer. Then *cleanup*
        continues in the background.
        """
        is_away = asyncio.get_running_loop().create_future()

        def missed() -> None:
            if not is_away.done():
                is_away.set_result(None)

        going = self.go_on(id, cleanup(missed))
        # Without the shield, a cancelled anyio scope would end this wait immediately.
        with anyio.CancelScope(shield=True):
            await asyncio.wait({going, is_away}, timeout=CLEANUP_S, return_when=asyncio.FIRST_COMPLETED)

    def go_on(self, id: SessionId, cleanup: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start *cleanup* as a task that outlives its caller. Logs name the task by *id*."""
        task = asyncio.create_task(cleanup, name=id)
        self._cleanups.add(task)  # a bare task may be garbage-collected
        task.add_done_callback(self._gone_on)
        return task

    def _gone_on(self, task: asyncio.Task[Any]) -> None:
        self._cleanups.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The slot is released when a deadline of the session passes.
            logger.warning("session_not_given_back session=%s error=%s", task.get_name(), error)

    async def settle(self, timeout_s: float) -> None:
        """Wait at most *timeout_s* seconds for background cleanups and for the cleanups that they start."""
        deadline = time.monotonic() + timeout_s
        while self._cleanups and (left_s := deadline - time.monotonic()) > 0:
            await asyncio.wait(self._cleanups, timeout=left_s)

    # -- the steps of an end --------------------------------------------------------------------------------------

    async def _end_in_worker(
        self, session: Session, environment: Environment, *, keeps: bool = False, missed: Missed | None = None
    ) -> tuple[Summary | None, bool]:
        """Close the session in its worker.

        Return the worker's summary, or the kept result of an episode that was over, if any; and whether the episode's
        course is known.
        """
        try:
            # No Redis in here: the timeout's cancellation reaches the worker's connection only.
            async with asyncio.timeout(environment.timeouts.close_s):
                summary = await self._upstreams[environment.wire].close(session, environment, keeps=keeps)
            return summary or kept_result(_reason(session), None, session.result), True
        except (GatewayError, TimeoutError) as error:
            logger.warning("session_close_failed session=%s worker=%s error=%s", session.id, session.worker, error)
            if not environment.server.url:  # an external server is not replaced, and reports itself when it is full
                drain = partial(self._store.drain_worker, session.worker)
                await patiently(drain, for_s=self._patience_s, missed=missed)
            kept = kept_result(_reason(session), None, session.result)
            return kept, kept is not None

    async def _released(self, session: Session, *, missed: Missed | None = None) -> bool:
        """Free the slot of a ``CLOSING`` session. Return True if this caller freed it."""
        tries = 0

        async def release() -> bool:
            nonlocal tries
            tries += 1
            # A lost answer means success, unless the worker died at that moment.
            return await self._store.release(session.id, session.lease) or tries > 1

        return await patiently(release, for_s=self._patience_s, missed=missed)

    async def _handed_over(self, session: Session, successor: SessionRequest) -> Session | None:
        tries = 0

        async def hand_over() -> Session | None:
            nonlocal tries
            tries += 1
            begun = await self._store.hand_over(session.id, session.lease, successor)
            if begun is None and tries > 1:  # an earlier try may have succeeded although its answer was lost
                found = await self._found(successor.id)
                if found is not None and found.lease == successor.lease and found.state is SessionState.OPENING:
                    return found
            return begun

        return await patiently(hand_over, for_s=self._patience_s)

    async def _found(self, id: SessionId) -> Session | None:
        with contextlib.suppress(SessionNotFound, SessionClosed):
            return await self._store.find(id)
        return None

    def count_lost(self, session: Session, environment: Environment) -> None:
        """Log and count the end of a session whose worker is gone."""
        self._count(session, environment, None, is_answered=False)

    def _count(self, session: Session, environment: Environment, summary: Summary | None, *, is_answered: bool) -> None:
        reason = _reason(session)
        late = session.steps_before_late
        kept = kept_result(reason, summary, session.result)
        if kept is not None:
            summary, outcome = kept, outcome_of(CloseReason.DELETED, kept)
        else:
            outcome = outcome_of(reason, summary, is_answered=is_answered, steps_before_late=late)
        reward = reward_of(outcome, summary)
        is_trainers = session.owner not in GATEWAYS_OWN
        self._metrics.session_closed(environment.name, reason.value, outcome, reward if is_trainers else None)
        end = EpisodeEnd(reason=reason, outcome=outcome, reward=reward, summary=summary)
        self._log.closed(session, environment, end)
        if summary is not None:
            log_faults(session, summary.faults)
            if outcome is EpisodeOutcome.AUTHOR_FAULT and reason is not CloseReason.AUTHOR_FAULT:
                log_faults(session, _lacks(summary))
            if not summary.is_whole:
                told = (session.environment, session.task, session.id)
                logger.warning("episode_incomplete environment=%s task=%r session=%s", *told)
            if summary.unexpected_error:
                self._metrics.episode_marked(environment.name)
                told = (session.environment, session.task, session.id)
                logger.warning(
                    "episode_marked environment=%s task=%r session=%s error=%r", *told, summary.unexpected_error
                )
            elif reward is not None and is_trainers and self._records is not None:
                self._records.note(session, environment, summary, reward)
        logger.info(
            "session_closed session=%s name=%r environment=%s task=%r worker=%s reason=%s outcome=%s reward=%s "
            "steps=%s",
            session.id,
            session.name,
            session.environment,
            session.task,
            session.worker,
            reason.value,
            outcome.value,
            reward,
            summary.steps if summary else None,
        )


def _reason(session: Session) -> CloseReason:
    return session.reason or CloseReason.DELETED


def _lacks(summary: Summary) -> tuple[Fault, ...]:
    """Return the fault of an episode without any reward. No call failed in it, so no other log entry reports it."""
    if not is_without_reward(summary) or summary.fault is not None:
        return ()
    message = (
        f"the environment ended the episode, and gave no reward in any of its {summary.steps} steps (null, or NaN)"
    )
    return (Fault(FaultKind.AUTHOR, "reward", message),)


def log_faults(session: Session, faults: Iterable[Fault]) -> None:
    """Log each of *faults* in *session* on one line for operators, with the traceback as a Python literal.

    A literal stays on one line and uses characters that every terminal and file accepts, for any exception text.
    """
    for fault in faults:
        told = (session.environment, session.task, session.id, fault.place, fault.error, fault.traceback)
        if fault.kind is FaultKind.AUTHOR:
            logger.error("author_fault environment=%s task=%r session=%s place=%r error=%r traceback=%r", *told)
        else:
            logger.warning(
                "infrastructure_fault environment=%s task=%r session=%s place=%r error=%r traceback=%r", *told
            )

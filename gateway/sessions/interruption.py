"""Interrupts calls at their session's end or deadline, waits for a slot at this process's end, and openings in a worker
that does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Final, Literal, Protocol

from gateway.core.environment import Environment, UpstreamKind
from gateway.core.errors import PoolExhausted
from gateway.core.ports.upstream import WorkerUpstream
from gateway.core.session import Session
from gateway.core.worker import worker_of
from gateway.sessions.liveness import answers

Cause = Literal["ended", "late"]


class Interrupted(Exception):
    """The awaited work was cancelled because of *cause*."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause)
        self.cause = cause


class Watcher(Protocol):
    """Receives a notification when a session ends."""

    def end(self) -> None:
        """Handle the session's end."""


class SessionEndEvent:
    """Waits for the end of a session without cancelling work."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def end(self) -> None:
        """Note the session's end."""
        self._event.set()

    async def within(self, seconds: float) -> bool:
        """Wait at most *seconds* for the session's end. Return True if it has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()
        return self._event.is_set()


class CallScope:
    """A context that cancels its task's work for either of two causes, as ``asyncio.timeout`` does.

    A separate task for each call would cost more than the gateway's own work for the call.
    """

    __slots__ = ("_cancelling", "_cause", "_task", "_timer", "_watchers")

    def __init__(self, watchers: set[Watcher], within_s: float | None) -> None:
        """
        Args:
            watchers: The session's watchers, to which this scope belongs from `__enter__` to `__exit__`.
            within_s: Seconds until the deadline; None sets no deadline.
        """
        self._watchers = watchers
        self._timer: asyncio.TimerHandle | None = None
        if within_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, within_s), self._break_off, "late")
        self._task: asyncio.Task[object] | None = None
        self._cause: Cause | None = None
        self._cancelling = 0

    def __enter__(self) -> CallScope:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._watchers.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._watchers.discard(self)
        task, self._task = self._task, None
        assert task is not None
        # If another caller has cancelled the task too, that cancellation continues.
        if self._cause is not None and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise Interrupted(self._cause) from error

    def end(self) -> None:
        """Cancel the task's work because the session has ended."""
        self._break_off("ended")

    def _break_off(self, cause: Cause) -> None:
        if self._cause is None and self._task is not None:
            self._cause = cause
            self._task.cancel()


class AdmissionGate:
    """Refuses waiting openings when this process ends, because another replica may serve them."""

    def __init__(self) -> None:
        self._watchers: set[Watcher] = set()
        self._is_over = False

    def end(self) -> None:
        """Refuse all waiting and all later openings."""
        self._is_over = True
        for watcher in list(self._watchers):
            watcher.end()

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Return a context in which an opening waits for a slot.

        Raises:
            PoolExhausted: This process ends.
        """
        if self._is_over:
            raise _stopping()
        try:
            with CallScope(self._watchers, None):
                yield
        except Interrupted:
            raise _stopping() from None


SUSPECT_S: Final = 3.0
"""Seconds that an opening may take before a liveness query to its worker, and between two such queries."""


class SuspectReports(Protocol):
    """Receives reports of workers that do not answer."""

    def suspected(self, session: Session, environment: Environment) -> None:
        """Stop granting slots in the worker of *session*, whose opening continues. Returns immediately."""


class OpeningWatch:
    """A context around a session's opening in its worker. If the opening takes long, it queries the worker's liveness.

    Args:
        limit: The opening's timeout. It expires early if a worker of the gateway's own images does not answer.
        reports: Receives one report if a third-party worker does not answer. The opening then continues.
    """

    def __init__(
        self,
        limit: asyncio.Timeout,
        session: Session,
        environment: Environment,
        upstream: WorkerUpstream,
        *,
        reports: SuspectReports,
    ) -> None:
        self.is_silent = False
        self._limit = limit
        self._reports = reports
        self._session = session
        self._environment = environment
        self._upstream = upstream
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> OpeningWatch:
        # A timer, because a task would cost every opening.
        self._timer = asyncio.get_running_loop().call_later(SUSPECT_S, self._begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        if await answers(worker_of(self._session), self._environment, self._upstream):
            self._timer = asyncio.get_running_loop().call_later(SUSPECT_S, self._begin)
        elif self._environment.wire is not UpstreamKind.OWN:
            self._reports.suspected(self._session, self._environment)
        elif not self._limit.expired():
            self.is_silent = True
            self._limit.reschedule(asyncio.get_running_loop().time())


def _stopping() -> PoolExhausted:
    message = "this replica of the gateway is about to stop: try again, another one may take it"
    return PoolExhausted(message, retry_after_s=1.0)

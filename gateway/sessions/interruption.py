"""What interrupts a call: the end of its session, or its deadline. What interrupts a wait for a slot: the end of this
process. What interrupts an opening: the silence of its worker.
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
from gateway.sessions.liveness import answers, worker_of

Cause = Literal["ended", "late"]


class Interrupted(Exception):
    """What was awaited was broken off, for *cause*."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause)
        self.cause = cause


class Watcher(Protocol):
    """Who is told when a session ends."""

    def end(self) -> None:
        """The session has ended."""


class SessionEndEvent:
    """Waits for the end of a session, and breaks nothing off."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def end(self) -> None:
        """The session has ended."""
        self._event.set()

    async def within(self, seconds: float) -> bool:
        """Wait for it, at most so long; whether it came."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()
        return self._event.is_set()


class CallScope:
    """Breaks off what its task awaits inside, as ``asyncio.timeout`` does, for either of two causes.

    One more task for each call, to be waited for beside them, would cost more than the call's own share.
    """

    __slots__ = ("_cancelling", "_cause", "_task", "_timer", "_watchers")

    def __init__(self, watchers: set[Watcher], within_s: float | None) -> None:
        """Join *watchers*, all of which are told when the session ends, from `__enter__` to `__exit__`.

        *within_s* None: as long as it takes.
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
        # Somebody else may have cancelled the task, too: then that goes on.
        if self._cause is not None and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise Interrupted(self._cause) from error

    def end(self) -> None:
        """The session has ended."""
        self._break_off("ended")

    def _break_off(self, cause: Cause) -> None:
        if self._cause is None and self._task is not None:
            self._cause = cause
            self._task.cancel()


class AdmissionGate:
    """Who waits for a slot here: refused when this process ends, as another replica may serve them."""

    def __init__(self) -> None:
        self._watchers: set[Watcher] = set()
        self._is_over = False

    def end(self) -> None:
        """Refuse those who wait, and all to come."""
        self._is_over = True
        for watcher in list(self._watchers):
            watcher.end()

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """What is awaited inside waits for a slot.

        Raises:
            PoolExhausted: this process ends.
        """
        if self._is_over:
            raise _stopping()
        try:
            with CallScope(self._watchers, None):
                yield
        except Interrupted:
            raise _stopping() from None


SUSPECT_S: Final = 3.0
"""How long a worker may take to open a session before it is asked whether it answers, and again after each answer."""


class SuspectReports(Protocol):
    """Takes note of workers that answer nothing."""

    def suspected(self, session: Session, environment: Environment) -> None:
        """Let nobody get another slot in the worker of *session*, whose opening goes on. Returns at once."""


class OpeningWatch:
    """A context in which a session is opened in its worker, which is asked for a sign of life where that takes long.

    Args:
        limit: Ended early where a worker of our own images answers nothing.
        reports: Told once where a worker of somebody else's image answers nothing; the opening goes on.
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
        # A timer: a task would cost each opening.
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

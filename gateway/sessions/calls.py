"""What breaks off a call: the end of its session, or of its time. Who waits for a slot: the end of this process.

Answers under way, wrapped: one that keeps its session busy, and one that was read already.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from types import TracebackType
from typing import Literal, Protocol

from gateway.core.errors import PoolExhausted, SessionClosed, UpstreamError, UpstreamGone, UpstreamTimeout
from gateway.core.faults import FAULT_HEADERS, Fault
from gateway.core.ports.transport import Exchange, Headers
from gateway.metrics import call_outcome, faults_outcome

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
        over = PoolExhausted("this replica of the gateway ends: ask again, another one may take it", retry_after_s=1.0)
        if self._is_over:
            raise over
        try:
            with CallScope(self._watchers, None):
                yield
        except Interrupted:
            raise over from None


class TrackedResponse:
    """An exchange during which its session is busy."""

    def __init__(
        self,
        exchange: Exchange,
        *,
        explain: Callable[[UpstreamGone], Awaitable[None]],
        told: Callable[[Sequence[Fault]], None],
        ended: Callable[[str], None],
    ) -> None:
        """Wrap *exchange*.

        Args:
            explain: told of a break; raises what explains it better.
            told: told of the faults that the answer tells of.
            ended: told once how it ended, in one of the words of ``metrics.CALLS``.
        """
        self._exchange = exchange
        self._explain = explain
        self._told = told
        self._ended = ended
        self._chunks: AsyncIterator[bytes] | None = None
        self._outcome = "left"
        self._is_closed = False
        self.status = exchange.status
        # Those of faults are for operators, and not for trainers.
        self.headers: Headers = [pair for pair in exchange.headers if not pair[0].startswith(FAULT_HEADERS)]

    @property
    def faults(self) -> tuple[Fault, ...]:
        """See ``Exchange.faults``."""
        return self._exchange.faults

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes; if the session was ended meanwhile, the break says so."""
        return self

    def __aiter__(self) -> TrackedResponse:
        return self

    async def __anext__(self) -> bytes:
        if self._chunks is None:
            self._chunks = self._exchange.chunks()
        try:
            return await anext(self._chunks)
        except StopAsyncIteration:
            self._read()
            raise
        except UpstreamError as error:
            await self._broken(error)
            raise

    def overran(self) -> None:
        """Who reads has given up: it took longer than the environment allows."""
        self._outcome = call_outcome(UpstreamTimeout())

    async def read(self, limit_bytes: int) -> bytes:
        """Read the whole body; a break is told as by `chunks`."""
        try:
            body = await self._exchange.read(limit_bytes)
        except UpstreamError as error:
            await self._broken(error)
            raise
        self._read()
        return body

    def _read(self) -> None:
        """Note that the answer has come whole, and what it tells of faults."""
        faults = self._exchange.faults
        self._outcome = faults_outcome(faults, other="ok")
        if faults:
            self._told(faults)

    async def _broken(self, error: UpstreamError) -> None:
        """Note how it ended; raises what explains it better."""
        self._outcome = call_outcome(error)
        try:
            if isinstance(error, UpstreamGone):
                await self._explain(error)
        except SessionClosed as better:
            self._outcome = call_outcome(better)
            raise

    async def aclose(self) -> None:
        """End the exchange and the busy time. A worker goes on with a call whose trainer hung up; it is asked
        before the session may expire."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await self._exchange.aclose()
        finally:
            self._ended(self._outcome)


class BufferedResponse:
    """An exchange whose body was read already."""

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self._body = body

    @property
    def faults(self) -> tuple[Fault, ...]:
        """None: it is a refusal."""
        return ()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body."""
        yield self._body

    async def read(self, limit_bytes: int) -> bytes:
        """Return the body; it was bounded when it was read."""
        return self._body[:limit_bytes]

    async def aclose(self) -> None:
        """Nothing is held any more."""

"""Answers under way, wrapped: one that keeps its session busy, and one that was read already."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from gateway.core.errors import SessionClosed, UpstreamError, UpstreamGone, UpstreamTimeout
from gateway.core.faults import FAULT_HEADERS, Fault
from gateway.core.ports.transport import Exchange, Headers
from gateway.metrics import call_outcome, faults_outcome


class BusyExchange:
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

    def __aiter__(self) -> BusyExchange:
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


class ReadExchange:
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

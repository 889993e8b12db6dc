"""The interface of the transport, which carries HTTP requests to workers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from gateway.core.addresses import Address
from gateway.core.faults import Fault
from gateway.core.ids import WorkerId

Headers = Sequence[tuple[bytes, bytes]]
P = TypeVar("P", bound=asyncio.Protocol)
TRACE: Final[ContextVar[Headers]] = ContextVar("gateway_trace", default=())
"""The W3C trace context of the trainer's request that runs: headers that every request to a worker gets."""


def header(headers: Headers, name: bytes) -> str:
    """Return the value of a header, decoded as HTTP does; return "" if it is missing."""
    return next((value.decode("latin-1") for key, value in headers if key == name), "")


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP/1.1 request to a worker, for any protocol that uses HTTP."""

    method: bytes
    target: bytes
    """Percent-encoded path and query."""
    headers: Headers = ()
    body: bytes = b""


class Exchange(Protocol):
    """A sent request and its incoming response. It must be closed, even after it was read to the end."""

    status: int
    headers: Headers
    """As received, with names in lower case, without framing and connection headers."""
    is_whole: bool
    """True if the whole body arrived together with the head, so that `read` neither waits nor fails."""

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Faults of the author's code that the response reports, for operators; complete once the body was read."""

    @property
    def result(self) -> bytes:
        """The summary of an episode that ended, as the worker wrote it; empty: none, or the body was not read yet."""

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises ``UpstreamGone`` or ``UpstreamTimeout`` if it is interrupted."""

    async def read(self, limit_bytes: int) -> bytes:
        """Read the whole body. Raises ``UpstreamError`` when it exceeds *limit_bytes*."""

    async def aclose(self) -> None:
        """Release the connection for reuse, or drop it if the body was not read to its end."""


class Dial(Protocol):
    """Opens connections to workers on other machines, at ``node:`` addresses."""

    async def __call__(self, address: Address, factory: Callable[[], P]) -> tuple[asyncio.BaseTransport, P]:
        """Connect to *address*; the protocol that *factory* creates receives all data directly.

        Raises:
            OSError: There is no connection, for the given reason, and nothing reached the worker. ``TimeoutError`` is
                included.
        """


class DialSocket(Protocol):
    """Like `Dial`, for clients that need a socket."""

    async def __call__(self, address: Address) -> socket.socket:
        """Return a connected Unix socket, which the caller owns. Raises ``OSError``."""


class Transport(Protocol):
    """Carries requests to workers; keeps connections per worker and never repeats a request."""

    async def send(self, worker: WorkerId, address: str, request: Request, *, silence_s: float) -> Exchange:
        """Send *request* and return once the response's head has arrived.

        Args:
            worker: The worker that the connection belongs to; a later worker may use the same address.
            address: The worker's address.
            request: The request to send.
            silence_s: Maximum seconds without data, before the head and between two pieces of the body.

        Raises:
            UpstreamGone: There is no connection, or it broke; ``sent`` is True if the request may have run.
            UpstreamTimeout: No data arrived for *silence_s*.
        """

    def forget(self, worker: WorkerId) -> None:
        """Drop a worker's connections; running requests fail with ``UpstreamGone``."""

"""The transport, which carries HTTP requests to workers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gateway.core.addresses import Address
from gateway.core.faults import Fault
from gateway.core.ids import WorkerId

Headers = Sequence[tuple[bytes, bytes]]
P = TypeVar("P", bound=asyncio.Protocol)


def header(headers: Headers, name: bytes) -> str:
    """Return the value of a header, decoded as HTTP does; an empty string if it is not there."""
    return next((value.decode("latin-1") for key, value in headers if key == name), "")


@dataclass(frozen=True, slots=True)
class Request:
    """One request to a worker: HTTP/1.1 in the words of any protocol that is carried by it."""

    method: bytes
    target: bytes
    """Path and query, percent-encoded."""
    headers: Headers = ()
    body: bytes = b""


class Exchange(Protocol):
    """A request that was sent and whose answer is coming in. Must be closed, also when it was read to the end."""

    status: int
    headers: Headers
    """As received, names in lower case; framing and connection headers are left out."""

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What the answer tells of the author's code besides, for operators; whole once the body was read."""

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises ``UpstreamGone`` or ``UpstreamTimeout`` when it breaks off."""

    async def read(self, limit_bytes: int) -> bytes:
        """Read the whole body. Raises ``UpstreamError`` when it exceeds *limit_bytes*."""

    async def aclose(self) -> None:
        """Give the connection back, or drop it if the body was not read to its end."""


class Dial(Protocol):
    """Opens connections to workers on other machines: to ``node:`` addresses."""

    async def __call__(self, address: Address, factory: Callable[[], P]) -> tuple[asyncio.BaseTransport, P]:
        """Connect to *address*; the protocol that *factory* makes gets all that comes, and nothing stands between.

        Raises:
            OSError: no connection, with the reason; nothing reached the worker. ``TimeoutError`` is one.
        """


class DialSocket(Protocol):
    """As `Dial`, for clients that want a socket."""

    async def __call__(self, address: Address) -> socket.socket:
        """A connected Unix socket, which belongs to the caller. Raises ``OSError``."""


class Transport(Protocol):
    """Carries requests to workers; keeps connections per worker and never repeats a request."""

    async def send(self, worker: WorkerId, address: str, request: Request, *, silence_s: float) -> Exchange:
        """Send *request* and return when the head of the answer is there.

        Args:
            worker: The life that a connection belongs to: an address may be used again by another worker.
            silence_s: The longest wait for the head, and between two pieces of the body.

        Raises:
            UpstreamGone: no connection, or it broke; ``sent`` tells whether anything may have run.
            UpstreamTimeout: nothing came for *silence_s*.
        """

    def forget(self, worker: WorkerId) -> None:
        """Drop a worker's connections; requests under way fail with ``UpstreamGone``."""

"""An HTTP/1.1 connection to a worker that carries one request at a time and passes bodies as bytes.

`gateway.upstreams.transport` keeps the connections and decides which of them to reuse.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, cast

import httptools

from gateway.core.addresses import NODE_LEAVES, Address
from gateway.core.errors import UpstreamError, UpstreamGone, UpstreamTimeout
from gateway.core.faults import FAULTS_HEADER, RESULT_HEADER
from gateway.core.ports.transport import TRACE, Request

HIGH_WATER_BYTES: Final = 256 * 1024
"""Bytes of an unread body after which the gateway stops reading from the worker.

The limit protects the gateway's memory from a trainer that reads slowly.
"""
MAX_HEAD_BYTES: Final = 256 * 1024
"""Largest head of a response, in bytes: four times the limit for the head of a client's request."""

_HOP_BY_HOP: Final = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"transfer-encoding",
        b"content-length",
        b"upgrade",
        b"te",
        b"trailer",
    )
)


class NodeLeft(Exception):
    """The process of the worker's node ended before it took the request, so nothing reached the worker."""


class Http1Connection(asyncio.Protocol):
    """A connection to a worker that carries one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, is_on_node: bool = False) -> None:
        self._loop = loop
        self._is_on_node = is_on_node
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._silence_s = 0.0
        self._heard_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._chunks: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._head_bytes = 0
        self._paused = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._error: Exception | None = None
        self._bounded = False
        self._is_kept = False
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.has_head = False
        self.is_complete = True
        self.idle_since = 0.0

    # -- callbacks of the event loop -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are not a subclass

    def connection_lost(self, exc: Exception | None) -> None:
        if self.has_head and not self._bounded and exc is None:
            self.is_complete = True  # without a length or chunks, the end of the connection ends the body
        self._fail(UpstreamGone("the worker closed the connection", sent=True))
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        if self._is_on_node and data == NODE_LEAVES and (self.is_complete or not self._head_bytes):
            self.break_off(NodeLeft())
            return
        if self.is_complete:
            self.abort()  # unrequested bytes must not become part of the next response
            return
        if not self.has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(UpstreamError(f"the worker's answer is not HTTP: {error}"))
            self.abort()
            return
        # Check the size after parsing: the last piece of a head may contain a large part of the body.
        if not self.has_head and self._head_bytes > MAX_HEAD_BYTES:
            self._fail(UpstreamError("the worker's answer has too large a head"))
            self.abort()
            return
        self._wake()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # -- callbacks of the parser -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.has_head and self.is_complete:
            raise ValueError("bytes behind the answer")  # ends the parsing; the response itself is complete

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in _HOP_BY_HOP:
            if name in (b"content-length", b"transfer-encoding"):
                self._bounded = True
            return
        if not self.has_head or name in (FAULTS_HEADER, RESULT_HEADER):  # the only trailers that the gateway uses
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:  # an interim response; the final response follows
            self.headers = []
            return
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._buffered_bytes += len(body)
        if self._buffered_bytes > HIGH_WATER_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.has_head:
            self.is_complete = True
            self._is_kept = bool(self._parser.should_keep_alive())  # the parser drops this value after the callback

    # -- one exchange ----------------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Return True if the connection can carry another request."""
        return (
            self._error is None
            and self.is_complete
            and self._transport is not None
            and not self._transport.is_closing()
        )

    @property
    def may_be_kept(self) -> bool:
        """Return True if the gateway read the whole response, and the worker keeps the connection open.

        A connection is not kept after a 500. Most third-party servers run uvicorn, which answers an exception with 500
        and then closes the connection without an announcement. The next request would be lost.
        """
        return self.is_usable and not self._chunks and self._is_kept and self._bounded and self.status != 500

    @property
    def has_more(self) -> bool:
        """Return True if received bytes of the body are still unread."""
        return bool(self._chunks)

    async def ask(self, request: Request, place: Target, silence_s: float) -> None:
        """Write *request* and wait for the head of the response.

        Args:
            place: The address that the request goes to.
            silence_s: Seconds without a byte from the worker after which the request fails.

        Raises:
            NodeLeft: The worker's node ends, and the worker got nothing of the request.
            UpstreamGone: The connection broke; the request may run.
            UpstreamTimeout: The worker was silent for *silence_s*.
            UpstreamError: The response is not HTTP, or its head is too large.
        """
        if self._error is not None:
            raise self._error
        self._parser = httptools.HttpResponseParser(self)
        self.headers, self.status, self.has_head, self.is_complete, self._bounded = [], 0, False, False, False
        self._head_bytes, self._is_kept = 0, False
        self._silence_s = silence_s
        self._heard_at = self._loop.time()
        self._arm(silence_s)
        assert self._transport is not None
        self._transport.write(_encode(request, place))
        if not self._writable.is_set():
            await self._writable.wait()  # connection_lost also sets it; the timer handles a worker that does not read
        while not self.has_head:
            await self._wait()

    async def next_chunk(self) -> bytes:
        """Wait for bytes of the body and return all that have arrived. ``b""`` marks the end."""
        while not self._chunks:
            if self.is_complete:
                return b""
            await self._wait()
        chunk = self._chunks.popleft() if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered_bytes = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._heard_at = self._loop.time()
            self._transport.resume_reading()
        return chunk

    def rest(self) -> None:
        """Stop the timer, because no request is in progress."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.idle_since = self._loop.time()

    def abort(self) -> None:
        """Drop the connection."""
        self.rest()
        if self._transport is not None:
            self._transport.abort()

    def break_off(self, error: Exception) -> None:
        """Drop the connection, and fail a request in progress with *error*."""
        self._fail(error)
        self.abort()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    def _arm(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        # One timer serves the whole exchange instead of one for each wait: it checks when the last bytes arrived.
        # While reading is paused, the trainer is slow, not the worker.
        quiet_s = 0.0 if self._paused else self._loop.time() - self._heard_at
        if quiet_s < self._silence_s:
            self._arm(max(self._silence_s - quiet_s, 0.01))
            return
        self._timer = None
        self._fail(UpstreamTimeout(f"the worker was silent for {self._silence_s:g} s"))
        self._writable.set()
        if self._transport is not None:
            self._transport.abort()


class Target:
    """The parts of a request that depend on the address only, encoded once."""

    __slots__ = ("address", "prefix", "version_and_host")

    def __init__(self, address: Address) -> None:
        self.address = address
        self.prefix = address.prefix.encode("ascii")
        self.version_and_host = b" HTTP/1.1\r\nhost: " + address.authority.encode("ascii") + b"\r\n"


def _encode(request: Request, place: Target) -> bytes:
    head = [request.method, b" ", place.prefix, request.target, place.version_and_host]
    for name, value in (*request.headers, *TRACE.get()):
        head += (name, b": ", value, b"\r\n")
    if request.body or request.method != b"GET":
        head += (b"content-length: ", str(len(request.body)).encode(), b"\r\n")
    head += (b"\r\n", request.body)
    return b"".join(head)

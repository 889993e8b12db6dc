"""Extends uvicorn's HTTP connections with bounds: the number of connections, the size and time of heads, and the pauses
and slowness of bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

HEAD_MAX_BYTES: Final = 128 * 1024
"""Maximum size of request line and headers; secrets in a header may take 64 KiB. Enforced to within one read of the
socket (256 KiB)."""
HEADS_MAX_BYTES: Final = 64 * 2**20
"""Maximum size of all heads together that have begun and are not complete. They come before the key is known."""
HEAD_S: Final = 60.0
"""Maximum seconds from a connection's or a request's first byte to the end of its headers."""
BODY_S: Final = 20.0
"""Maximum seconds that a client may send nothing in the middle of a body. Time in which the gateway itself reads slowly
does not count."""
BODY_LEAST_S: Final = 60.0
"""Seconds that any body may take, however slowly it arrives."""
BODY_RATE: Final = 32 * 1024
"""Minimum average rate of a body that takes longer, in bytes per second: 256 kbit/s, the slowest line of an honest
client. The largest body by default, 32 MiB, has 18 minutes. A body that arrives in drips has one minute."""
STALL_S: Final = 20.0
"""Seconds that a client may leave a full write buffer (64 KiB) unread."""


class State(ServerState):
    """The server's state that all its connections share."""

    def __init__(self, max_connections: int | None) -> None:
        super().__init__()
        self.max_connections = max_connections
        self.is_leaving = False
        self.head_bytes = 0
        """Number of bytes of the heads that have begun and are not complete."""


class Stall:
    """Aborts a connection whose client does not read. Otherwise writes to it, and its session, would wait forever.

    The kernel detects a client that is gone. A client that is stopped, or has forgotten the connection, acknowledges
    data but reads nothing.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, transport: asyncio.BaseTransport | None) -> None:
        """Start the timer, because the write buffer is full."""
        if self._timer is None and transport is not None:
            abort = cast(asyncio.WriteTransport, transport).abort  # uvloop's transports are not a subclass
            self._timer = asyncio.get_running_loop().call_later(STALL_S, abort)

    def end(self) -> None:
        """Stop the timer, because the buffer has room again or the connection is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class BoundedHttp(HttpToolsProtocol):
    """One HTTP connection of a client."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stall = Stall()
        self._in_head = False
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._in_body = False
        self._body_at = 0.0
        self._body_until = 0.0
        self._body_timer: asyncio.TimerHandle | None = None
        self.is_lost = False
        self.on_lost: Callable[[], None] | None = None
        """Callback for the loss of the client; see `gateway.frontends.asgi.Attended`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Start the timer for the first request of a new connection, or refuse it if there are too many."""
        super().connection_made(transport)
        most = self.server_state.max_connections if isinstance(self.server_state, State) else None
        if most is not None and len(self.connections) > most:
            self._refuse(b"503 Service Unavailable", f"this replica has {most} connections already: try again later")
            return
        self._head_timer = self.loop.call_later(HEAD_S, self._on_slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, and notify the request that works for this client."""
        self._stop_clock()
        self._stall.end()
        self._count_head(0)
        super().connection_lost(exc)
        self.is_lost = True
        if self.on_lost is not None:
            self.on_lost()

    def pause_writing(self) -> None:
        """Start the stall timer: the client reads more slowly than the gateway writes."""
        self._stall.begin(self.transport)
        super().pause_writing()

    def resume_writing(self) -> None:
        """Stop the stall timer: the client has caught up."""
        self._stall.end()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parse *data*, and count the bytes of an incomplete head."""
        if self.transport.is_closing():
            return  # nothing that arrives after a refusal is a request
        super().data_received(data)
        if self._in_body:
            self._body_at = self.loop.time()
            self._body_until += len(data) / BODY_RATE
            if self._body_timer is None and self.transport.get_protocol() is self:  # otherwise it became a WebSocket
                self._await_body()
            return
        if not self._in_head or self.transport.is_closing():
            return
        self._count_head(self._head_bytes + len(data))
        if self._head_bytes > HEAD_MAX_BYTES:
            self._refuse(b"431 Request Header Fields Too Large", f"the headers exceed {HEAD_MAX_BYTES} bytes")
        elif isinstance(self.server_state, State) and self.server_state.head_bytes > HEADS_MAX_BYTES:
            self._refuse(b"503 Service Unavailable", "too many incomplete requests: try again later")
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._on_slow_head)

    def on_message_begin(self) -> None:
        """Note that a head begins."""
        self._in_head = True
        super().on_message_begin()
        self.scope["gateway.connection"] = self  # type: ignore[typeddict-unknown-key]  # servers may add keys

    def on_headers_complete(self) -> None:
        """Note that a head ends, and its body begins. An error refuses the request with 400."""
        version = self.parser.get_http_version()
        if not _is_served(version, self.headers):
            raise ValueError("the gateway does not serve such a request")
        self._in_head, self._in_body = False, True
        if self._head_bytes:
            self._count_head(0)
        self._body_until = self.loop.time() + BODY_LEAST_S
        if self._head_timer is not None:
            self._stop_clock()
        before = self.cycle
        super().on_headers_complete()
        # A copy: uvicorn appends trailers of a chunked body to its own list, and proxies that filter headers pass them.
        self.scope["headers"] = list(self.headers)
        if self.cycle is not before and version == "1.0":
            self.cycle.__class__ = Http10Cycle  # uvicorn creates cycles of its own class only; it has not started yet
        if isinstance(self.server_state, State) and self.server_state.is_leaving:
            self.leave()

    def on_message_complete(self) -> None:
        """Note that a body ends, or that there was no body."""
        self._in_body = False
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not HTTP."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()  # an error would mix with the response that is being sent
        else:
            self._refuse(b"400 Bad Request", msg)

    def _count_head(self, count: int) -> None:
        if isinstance(self.server_state, State):
            self.server_state.head_bytes += count - self._head_bytes
        self._head_bytes = count

    def leave(self) -> None:
        """Let a response that has not started yet announce that it is the last on this connection."""
        # A started response has already announced that the connection stays, and its client may use it immediately.
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def _on_slow_head(self) -> None:
        self._head_timer = None
        if self._in_head:
            self._refuse(b"408 Request Timeout", f"the headers took longer than {HEAD_S:g} s")
        elif not self.transport.is_closing():
            self.transport.close()

    def _on_slow_body(self) -> None:
        self._body_timer = None
        if not self._in_body or self.transport.is_closing():
            return
        now = self.loop.time()
        if self.flow.read_paused:  # the gateway itself delays the body
            self._body_at = now
            self._body_until += BODY_S
        if now < self._body_at + BODY_S and now < self._body_until:
            self._await_body()
        elif self.pipeline or self.cycle.response_started:
            self.transport.close()  # an error would mix with the response that is being sent
        elif now < self._body_until:
            self._refuse(b"408 Request Timeout", f"nothing of the body came for {BODY_S:g} s")
        else:
            slow = f"the body took longer than {BODY_LEAST_S:g} s and came with less than {BODY_RATE} bytes a second"
            self._refuse(b"408 Request Timeout", slow)

    def _await_body(self) -> None:
        """Check again when the body has paused for too long, or its time is over."""
        at = min(self._body_at + BODY_S, self._body_until)
        self._body_timer = self.loop.call_at(at, self._on_slow_body)

    def _refuse(self, status: bytes, detail: str) -> None:
        self._stop_clock()
        body = b'{"detail":"%s"}' % detail.encode()
        self.transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
            % (status, len(body), body)
        )
        self.transport.close()

    def _stop_clock(self) -> None:
        for timer in (self._head_timer, self._body_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._body_timer = None


def _is_served(version: str, headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Return True if the gateway serves a request of this HTTP *version* with these *headers* (names in lower case).

    HTTP/1.1 needs exactly one Host. A body of other codings than chunks could be read differently by a proxy.
    """
    hosts = codings = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding":
            codings += 1 if value.lower() == b"chunked" else 2
    is_addressed = hosts == 1 if version == "1.1" else version == "1.0" and hosts <= 1  # llhttp reads 0.9 and 2.0 too
    return is_addressed and codings <= 1


class Http10Cycle(RequestResponseCycle):
    """One request of an HTTP/1.0 client and its response."""

    async def send(self, message: ASGISendEvent) -> None:
        """Send *message*. A response of unknown length gets no framing; uvicorn would send it in chunks."""
        if message["type"] == "http.response.start":
            message["headers"] = [pair for pair in message.get("headers", []) if pair[0] != b"transfer-encoding"]
            if all(name.lower() != b"content-length" for name, _ in message["headers"]):
                self.chunked_encoding = False
                self.expected_content_length = -1
        elif message["type"] == "http.response.body" and self.expected_content_length < 0:
            self.expected_content_length = len(message.get("body", b""))
            await super().send(message)
            if not self.response_complete:
                self.expected_content_length = -1
            return
        await super().send(message)

"""Extends uvicorn with bounds and an orderly end.

It bounds connections, the size and time of heads, and the pauses and slowness of bodies. It closes WebSockets between
two frames and detects their vanished clients. It announces the end while it still takes requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from gateway.core.errors import ConfigError, TooManyBytes
from gateway.http_framing import Http10Cycle, is_served

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
KEEP_ALIVE_S: Final = 75
"""Seconds that an idle client connection is kept. The reference servers keep theirs for 60 s, and the SDKs drop theirs
after 15 s."""
BACKLOG: Final = 4096
"""Size of the listen backlog. Hundreds of episodes start in the same second, each with its own connection."""

FRAME_MAX_BYTES: Final = 16 * 2**20
"""Maximum size of a message from a WebSocket client, as in stock OpenEnv servers; a larger message closes with 1009."""
PING_S: Final = 20.0
"""Seconds between pings of a WebSocket client, which has no deadline for the pong: a long generation may block its
loop. The kernel detects a client's lost machine."""
LOST_AFTER_S: Final = 60
"""Seconds that a client's kernel may leave sent data unacknowledged before the connection counts as lost."""
STALL_S: Final = 20.0
"""Seconds that a client may leave a full write buffer (64 KiB) unread."""
TRY_AGAIN_LATER: Final = 1013
"""Close code of a WebSocket whose messages would exceed the budget of bytes; see `gateway.frontends.asgi.ByteBudget`."""
GOING_AWAY: Final = 1001
"""Close code of a WebSocket that this process ends, not the client."""
REASON_MAX_CHARS: Final = 120
"""Maximum length of the reason in a close frame, which holds at most 123 bytes."""
CLOSE_S: Final = 2.0
"""Seconds that a client has to answer the close; a client with a blocked loop does not answer."""

_socket_log = logging.getLogger(f"{__name__}.websocket")
_socket_log.setLevel(logging.WARNING)  # lower levels log paths and headers, which may contain a key


@dataclass(slots=True)
class Lifecycle:
    """The phase of the process's end, for frontends."""

    is_draining: bool = False
    """True once a load balancer should send requests to other replicas; this replica still serves what arrives."""
    is_closing: bool = False
    """True once the server has ended: no new episode begins, even on open sockets."""


class _Stall:
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
        self._stall = _Stall()
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
        most = self.server_state.max_connections if isinstance(self.server_state, _State) else None
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
        elif isinstance(self.server_state, _State) and self.server_state.head_bytes > HEADS_MAX_BYTES:
            self._refuse(b"503 Service Unavailable", "too many incomplete requests: try again later")
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._on_slow_head)

    def on_message_begin(self) -> None:
        """Note that a head begins."""
        self._in_head = True
        self._count_head(0)
        super().on_message_begin()
        self.scope["gateway.upstreams.http1"] = self  # type: ignore[typeddict-unknown-key]  # servers may add keys

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, and drop a trailer of a chunked body: proxies that filter headers may pass trailers."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Note that a head ends, and its body begins. An error refuses the request with 400."""
        version = self.parser.get_http_version()
        if not is_served(version, self.headers):
            raise ValueError("the gateway does not serve such a request")
        self._in_head, self._in_body = False, True
        self._count_head(0)
        self._body_until = self.loop.time() + BODY_LEAST_S
        self._stop_clock()
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before and version == "1.0":
            self.cycle.__class__ = Http10Cycle  # uvicorn creates cycles of its own class only; it has not started yet
        if isinstance(self.server_state, _State) and self.server_state.is_leaving:
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
        if isinstance(self.server_state, _State):
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


class BoundedSocket(WebSocketsSansIOProtocol):
    """One WebSocket connection of a client."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = self.conn.logger = _socket_log
        self.conn.debug = False
        self._unanswered = 0
        self._is_ending = False
        self._is_refused = False
        self._stall = _Stall()

    def pause_writing(self) -> None:
        """Start the stall timer: the client reads more slowly than the gateway writes."""
        self._stall.begin(self.transport)
        super().pause_writing()

    def resume_writing(self) -> None:
        """Stop the stall timer: the client has caught up."""
        self._stall.end()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the stall timer."""
        self._stall.end()
        super().connection_lost(exc)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Configure the kernel to detect the loss of the client's machine."""
        connected = transport.get_extra_info("socket")
        if connected is not None and connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_AFTER_S * 1000)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Parse *data*, which counts in the budget of the client's key until all messages are answered.

        If the budget is exceeded, close the socket and drop what still arrives.
        """
        if self._is_refused:
            return
        if (held := self._held()) is not None:
            try:
                held.add(len(data))
            except TooManyBytes as error:
                self._is_refused = self._is_ending = True
                if not self.close_sent:
                    self._say_goodbye(TRY_AGAIN_LATER, error.detail)
                return
        super().data_received(data)
        self._release()

    def _held(self) -> Any:
        scope = getattr(self, "scope", None)  # uvicorn sets it when it has read the handshake
        return None if scope is None else scope.get("gateway.held")

    def _release(self) -> None:
        """Give the budget's bytes back if no message is incomplete or unanswered."""
        is_idle = self._unanswered <= 0 and not self.frames and not self.conn.reader.buffer
        if is_idle and (held := self._held()) is not None:
            held.release()

    def send_receive_event_to_app(self) -> None:
        """Count the messages that wait for their answer."""
        self._unanswered += 1
        super().send_receive_event_to_app()

    async def send(self, message: ASGISendEvent) -> None:
        """Send *message*, and close the socket if the end waited for this answer."""
        if self._is_ending and self.close_sent:
            raise ClientDisconnected
        await super().send(message)
        if message["type"] == "websocket.send":
            self._unanswered -= 1
            self._release()
            if self._is_ending and self._unanswered <= 0 and not self.transport.is_closing():
                self._say_goodbye()

    def shutdown(self) -> None:
        """Close with 1001, once the message that is being processed is answered.

        If a client gets the close without an answer, its message was never processed, and it may send the message
        elsewhere.
        """
        self._is_ending = True
        if self.close_sent or not self.handshake_complete:
            super().shutdown()
        elif self._unanswered <= 0:
            self._say_goodbye()

    def _say_goodbye(self, code: int = GOING_AWAY, reason: str = "") -> None:
        # uvicorn closes immediately. If data is unread, the kernel would then reset the connection without the code.
        self.stop_keepalive()
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code})
        self.conn.send_close(code, reason[:REASON_MAX_CHARS])
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True  # incoming data is dropped from now on
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(CLOSE_S, self.transport.close)


class _State(ServerState):
    """The server's state that all its connections share."""

    def __init__(self, max_connections: int | None) -> None:
        super().__init__()
        self.max_connections = max_connections
        self.is_leaving = False
        self.head_bytes = 0
        """Number of bytes of the heads that have begun and are not complete."""


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling, which ends the process before the gateway could be stopped in order."""

    def __init__(self, config: uvicorn.Config, *, max_connections: int | None = None) -> None:
        """Create the server. With more than *max_connections* connections, further ones get 503. None: no limit."""
        super().__init__(config)
        self.server_state = self._state = _State(max_connections)

    def leave(self) -> None:
        """Continue to take requests, but let each response announce that it is the last on its connection.

        New connections are taken too. Clients that keep connections thus move to another replica, if their load
        balancer checks ``/readyz``.
        """
        self._state.is_leaving = True
        for connection in list(self._state.connections):
            if isinstance(connection, BoundedHttp):
                connection.leave()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller of `serve`."""
        yield


def configured(app: ASGIApp, *, end_s: float) -> uvicorn.Config:
    """Return the configuration of a gateway's server; at its end running calls have *end_s* seconds."""
    return uvicorn.Config(
        app,
        http=BoundedHttp,
        ws=BoundedSocket,
        ws_max_size=FRAME_MAX_BYTES,
        ws_ping_interval=PING_S,
        ws_ping_timeout=None,
        ws_per_message_deflate=False,
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # no code uses a client's address, and parsing it would cost time in each step
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(end_s)),
        backlog=BACKLOG,
    )


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 selects a free port.

    Raises:
        ConfigError: The address can't be used.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(socket.socket(family, kind, proto))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            listener.setblocking(False)
            undo.pop_all()
            return listener
    except OSError as error:
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror or error}") from error

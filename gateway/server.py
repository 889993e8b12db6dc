"""uvicorn with what it lacks.

Bounds of a request's head in size and time, and of its body's pauses and slowness, WebSockets that are closed between
two frames and whose vanished clients are noticed, an end that is announced while requests are still taken, and one that
leaves time to clean up.
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

from gateway.core.errors import ConfigError

HEAD_MAX_BYTES: Final = 128 * 1024
"""Request line and headers; secrets in a header may take 64 KiB. Told to within one read of the socket (256 KiB)."""
HEAD_S: Final = 60.0
"""From a connection's, or a request's, first byte to the end of its headers."""
BODY_S: Final = 20.0
"""How long a client may send nothing in the middle of a body; one that is read slowly here is not meant."""
BODY_LEAST_S: Final = 60.0
"""How long a body may take however small it is."""
BODY_RATE: Final = 32 * 1024
"""Bytes a second that a body must come with on the whole, once it takes longer: 256 kbit/s, which the slowest line of
an honest client has. The largest body by default, 32 MiB, has 18 minutes; one that drips bytes has one."""
KEEP_ALIVE_S: Final = 75
"""Of idle client connections: the reference servers keep theirs 60 s, the SDKs drop theirs after 15."""
BACKLOG: Final = 4096
"""Hundreds of episodes start in the same second, each over a connection of its own."""


FRAME_MAX_BYTES: Final = 16 * 2**20
"""The largest message from a WebSocket's client, as stock OpenEnv servers have it; a larger one closes with 1009."""
PING_S: Final = 20.0
"""How often a WebSocket's client is pinged. It may take any time to answer: clients whose loop is blocked by a long
generation are alive. That their machine is there, the kernel tells."""
LOST_AFTER_S: Final = 60
"""How long a client's kernel may leave what we sent unacknowledged before the connection counts as lost."""
STALL_S: Final = 20.0
"""How long a client may leave a full write buffer (64 KiB) as it is."""
GOING_AWAY: Final = 1001
"""How a WebSocket is closed that this process leaves, and not its client."""
CLOSE_S: Final = 2.0
"""How long a client has to answer that; one whose loop is blocked does not."""

_socket_log = logging.getLogger(f"{__name__}.websocket")
_socket_log.setLevel(logging.WARNING)  # else each path and header is told, which may hold a key


@dataclass(slots=True)
class Lifecycle:
    """What frontends have to know of the end of their process."""

    is_draining: bool = False
    """A load balancer is to send requests to other replicas; this one still serves what comes."""
    is_closing: bool = False
    """The server has ended: no new episode begins, also on sockets that are open."""


class _Stall:
    """Ends a connection whose client does not read: what is written to it would wait for ever, and its session with it.

    The kernel tells of a client that is gone; one that is stopped, or has forgotten us, acknowledges and reads nothing.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, transport: asyncio.BaseTransport | None) -> None:
        """The write buffer is full."""
        if self._timer is None and transport is not None:
            abort = cast(asyncio.WriteTransport, transport).abort  # uvloop's are no subclass
            self._timer = asyncio.get_running_loop().call_later(STALL_S, abort)

    def end(self) -> None:
        """It has room again, or the connection is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class BoundedHttp(HttpToolsProtocol):
    """One connection of a client."""

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
        """Called when the client goes; see `gateway.frontends.asgi.Attended`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Give a new connection its time to say something."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_S, self._on_slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock, and tell whoever works for this client."""
        self._stop_clock()
        self._stall.end()
        super().connection_lost(exc)
        self.is_lost = True
        if self.on_lost is not None:
            self.on_lost()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is written to."""
        self._stall.begin(self.transport)
        super().pause_writing()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._stall.end()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parse, and count what belongs to a head that is not complete."""
        super().data_received(data)
        if self._in_body:
            self._body_at = self.loop.time()
            self._body_until += len(data) / BODY_RATE
            if self._body_timer is None and self.transport.get_protocol() is self:  # else it is a WebSocket by now
                self._await_body()
            return
        if not self._in_head or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_MAX_BYTES:
            self._refuse(b"431 Request Header Fields Too Large", f"the headers exceed {HEAD_MAX_BYTES} bytes")
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._on_slow_head)

    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()
        self.scope["gateway.upstreams.http1"] = self  # type: ignore[typeddict-unknown-key]  # servers may add keys

    def on_headers_complete(self) -> None:
        """A head ends."""
        self._in_head, self._in_body = False, True
        self._body_until = self.loop.time() + BODY_LEAST_S
        self._stop_clock()
        super().on_headers_complete()
        if isinstance(self.server_state, _State) and self.server_state.is_leaving:
            self.leave()

    def on_message_complete(self) -> None:
        """A body ends, or there was none."""
        self._in_body = False
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        super().on_message_complete()

    def leave(self) -> None:
        """Let the answer that is not begun yet say that it is the last one on this connection."""
        # One that is begun has told already that the connection stays, and its client may use it at once.
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
        if self.flow.read_paused:  # it waits for us
            self._body_at = now
            self._body_until += BODY_S
        if now < self._body_at + BODY_S and now < self._body_until:
            self._await_body()
        elif self.pipeline or self.cycle.response_started:
            self.transport.close()  # what is being answered would be mixed with this
        elif now < self._body_until:
            self._refuse(b"408 Request Timeout", f"nothing of the body came for {BODY_S:g} s")
        else:
            slow = f"the body took longer than {BODY_LEAST_S:g} s and came with less than {BODY_RATE} bytes a second"
            self._refuse(b"408 Request Timeout", slow)

    def _await_body(self) -> None:
        """Look again when the body's client has been silent for too long, or the body's time is over."""
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
    """One WebSocket of a client."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = self.conn.logger = _socket_log
        self.conn.debug = False
        self._unanswered = 0
        self._is_ending = False
        self._stall = _Stall()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is written to."""
        self._stall.begin(self.transport)
        super().pause_writing()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._stall.end()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stall.end()
        super().connection_lost(exc)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask the kernel to tell when the client's machine is gone."""
        connected = transport.get_extra_info("socket")
        if connected is not None and connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_AFTER_S * 1000)
        super().connection_made(transport)

    def send_receive_event_to_app(self) -> None:
        """Count the messages that wait for their answer."""
        self._unanswered += 1
        super().send_receive_event_to_app()

    async def send(self, message: ASGISendEvent) -> None:
        """Send, and close if that was what the end waited for."""
        if self._is_ending and self.close_sent:
            raise ClientDisconnected
        await super().send(message)
        if message["type"] == "websocket.send":
            self._unanswered -= 1
            if self._is_ending and self._unanswered <= 0 and not self.transport.is_closing():
                self._say_goodbye()

    def shutdown(self) -> None:
        """Close with 1001, once the message that is being worked on is answered.

        So a client that gets no answer before it may send again elsewhere: what it sent was never begun.
        """
        self._is_ending = True
        if self.close_sent or not self.handshake_complete:
            super().shutdown()
        elif self._unanswered <= 0:
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        # Not closed at once, as uvicorn does: with bytes of the client's unread the kernel would reset the connection,
        # and the client might never read why.
        self.stop_keepalive()
        self.queue.put_nowait({"type": "websocket.disconnect", "code": GOING_AWAY})
        self.conn.send_close(GOING_AWAY)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True  # from here on what comes is dropped
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(CLOSE_S, self.transport.close)


class _State(ServerState):
    """What all connections of a server see of it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_leaving = False


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling, which ends the process before what it served could be taken down."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.server_state = self._state = _State()

    def leave(self) -> None:
        """Go on taking connections and requests, and let each answer say that it is its connection's last one.

        Clients that keep their connections thus come to another replica, if whoever sends them here asks ``/readyz``.
        """
        self._state.is_leaving = True
        for connection in list(self._state.connections):
            if isinstance(connection, BoundedHttp):
                connection.leave()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to whoever serves."""
        yield


def configured(app: ASGIApp, *, end_s: float) -> uvicorn.Config:
    """What a gateway's server is made of; calls under way have *end_s* seconds when it ends."""
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
        proxy_headers=False,  # nothing here asks for a client's address, and each step would be asked for it
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(end_s)),
        backlog=BACKLOG,
    )


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 takes a free one.

    Raises:
        ConfigError: the address can't be used.
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

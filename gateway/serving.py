"""uvicorn with what it lacks.

Bounds of a request's head in size and time, WebSockets that are closed between two frames and whose vanished clients
are noticed, and an end that leaves time to clean up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

import uvicorn
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from gateway.core.errors import ConfigError

HEAD_MAX_BYTES: Final = 128 * 1024
"""Request line and headers; secrets in a header may take 64 KiB. Told to within one read of the socket (256 KiB)."""
HEAD_S: Final = 60.0
"""From a connection's, or a request's, first byte to the end of its headers."""
BACKLOG: Final = 4096
"""Hundreds of episodes start in the same second, each over a connection of its own."""


FRAME_MAX_BYTES: Final = 16 * 2**20
"""The largest message from a WebSocket's client, as stock OpenEnv servers have it; a larger one closes with 1009."""
PING_S: Final = 20.0
"""How often a WebSocket's client is pinged. It may take any time to answer: clients whose loop is blocked by a long
generation are alive. That their machine is there, the kernel tells."""
LOST_AFTER_S: Final = 60
"""How long a client's kernel may leave what we sent unacknowledged before the connection counts as lost."""

_socket_log = logging.getLogger(f"{__name__}.websocket")
_socket_log.setLevel(logging.WARNING)  # else each path and header is told, which may hold a key


class BoundedHttp(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self.is_lost = False
        self.on_lost: Callable[[], None] | None = None
        """Called when the client goes; see `gateway.fronts.asgi.Attended`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Give a new connection its time to say something."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_S, self._on_slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock, and tell whoever works for this client."""
        self._stop_clock()
        super().connection_lost(exc)
        self.is_lost = True
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        """Parse, and count what belongs to a head that is not complete."""
        super().data_received(data)
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
        self.scope["gateway.connection"] = self  # type: ignore[typeddict-unknown-key]  # servers may add keys

    def on_headers_complete(self) -> None:
        """A head ends."""
        self._in_head = False
        self._stop_clock()
        super().on_headers_complete()

    def _on_slow_head(self) -> None:
        self._head_timer = None
        if self._in_head:
            self._refuse(b"408 Request Timeout", f"the headers took longer than {HEAD_S:g} s")
        elif not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, status: bytes, detail: str) -> None:
        self._stop_clock()
        body = b'{"detail":"%s"}' % detail.encode()
        self.transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
            % (status, len(body), body)
        )
        self.transport.close()

    def _stop_clock(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class BoundedSocket(WebSocketsSansIOProtocol):
    """One WebSocket of a client."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = self.conn.logger = _socket_log
        self.conn.debug = False
        self._unanswered = 0
        self._is_ending = False

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
        await super().send(message)
        if message["type"] == "websocket.send":
            self._unanswered -= 1
            if self._is_ending and self._unanswered <= 0:
                super().shutdown()

    def shutdown(self) -> None:
        """Close with 1012, once the message that is being worked on is answered."""
        self._is_ending = True
        if self._unanswered <= 0 or not self.handshake_complete:
            super().shutdown()


class Server(uvicorn.Server):
    """uvicorn without its own signal handling, which ends the process before what it served could be taken down."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to whoever serves."""
        yield


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

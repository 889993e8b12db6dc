"""Extends uvicorn with bounds (`http`, `websocket`) and an orderly end.

It announces the end while it still takes requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from gateway.core.errors import ConfigError
from gateway.core.periodic import until_next
from gateway.server.http import BoundedHttp, State
from gateway.server.websocket import FRAME_MAX_BYTES, PING_S, BoundedSocket

KEEP_ALIVE_S: Final = 75
"""Seconds that an idle client connection is kept. The reference servers keep theirs for 60 s, and the SDKs drop theirs
after 15 s."""
DATE_S: Final = 1.0
"""Seconds between two updates of the header ``date``."""
SETTLE_S: Final = 0.1
"""Seconds before the connections are ended: one that was accepted just now is not among them at once."""
BACKLOG: Final = 4096
"""Size of the listen backlog. Hundreds of episodes start in the same second, each with its own connection."""


@dataclass(slots=True)
class Lifecycle:
    """The phase of the process's end, for frontends."""

    is_draining: bool = False
    """True once a load balancer should send requests to other replicas; this replica still serves what arrives."""
    is_closing: bool = False
    """True once the server has ended: no new episode begins, even on open sockets."""


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling, which ends the process before the gateway could be stopped in order."""

    def __init__(self, config: uvicorn.Config, *, max_connections: int | None = None) -> None:
        """Create the server. With more than *max_connections* connections, further ones get 503. None: no limit."""
        self._ended = asyncio.Event()
        super().__init__(config)
        self.server_state = self._state = State(max_connections)

    @property
    def should_exit(self) -> bool:
        """True once the server shall end."""
        return self._ended.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._ended.set()
        else:
            self._ended.clear()

    async def main_loop(self) -> None:
        """Serve until `should_exit`. Look once a second, for the header ``date``; uvicorn looks ten times a second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_next(DATE_S)):
                    await self._ended.wait()
        await asyncio.sleep(SETTLE_S)

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
        better = (
            "choose another port with GATEWAY_PORT or --port" if error.errno == errno.EADDRINUSE else "check --host"
        )
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror or error}; {better}") from error

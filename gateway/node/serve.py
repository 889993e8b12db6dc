"""Serving the gate on a Unix socket, and to a cluster: over TLS, with the relay to the workers on the next port."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from gateway.backends.folders import PATH_MAX_BYTES
from gateway.core.errors import ConfigError
from gateway.node.gate import Gate
from gateway.node.tunnel import Relay
from gateway.server import Server, listen

STOP_S = 2
"""How long streams may go on after the end was asked for; uvicorn would wait for ever."""
BACKLOG = 256


async def serve_gate(gate: Gate, socket_path: Path, *, mode: int = 0o660, group: int = -1) -> None:
    """Serve *gate* until SIGTERM or SIGINT; arguments as for `serving_gate`."""
    async with ending() as is_ending, serving_gate(gate, socket_path, mode=mode, group=group):
        await is_ending.wait()


@asynccontextmanager
async def ending() -> AsyncIterator[asyncio.Event]:
    """Set the event on SIGTERM or SIGINT, while the context is open."""
    loop, is_ending = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, is_ending.set)
    try:
        yield is_ending
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@asynccontextmanager
async def serving_gate(gate: Gate, socket_path: Path, *, mode: int = 0o660, group: int = -1) -> AsyncIterator[None]:
    """Serve *gate* on *socket_path* while the context is open.

    Args:
        gate: Closed at the end.
        socket_path: Replaced if it is a socket on which nobody listens any more.
        mode: Of the socket. Whoever can write to it can have containers made that the catalog allows, and no others.
        group: Numeric group that the socket is given to: the gateway's. -1 keeps this process' own.

    Raises:
        ConfigError: the socket can't be made there, or somebody listens on it.
    """
    listener = await asyncio.to_thread(_listen, socket_path, mode, group)
    server = Server(_configured(gate))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        await _ended(server, running)
        listener.close()
        socket_path.unlink(missing_ok=True)  # noqa: ASYNC240  # one system call on a local file
        await gate.aclose()


@asynccontextmanager
async def serving_cluster(
    app: ASGIApp, relay: Relay, *, host: str, port: int, tls: ssl.SSLContext, drain_s: float
) -> AsyncIterator[None]:
    """Serve *app* at *host* and *port*, and *relay* on the next port, while the context is open.

    In the end both listeners close at once; connections of *app* that are kept are served until requests through the
    relay have ended, for *drain_s* seconds at most.

    Raises:
        ConfigError: one of the addresses can't be used.
    """
    with closing(listen(host, port)) as for_app, closing(listen(host, port + 1)) as for_relay:
        config = _configured(app)
        config.load()
        config.ssl = tls
        server = Server(config)
        await relay.start(for_relay)
        running = asyncio.create_task(server.serve(sockets=[for_app]))
        try:
            yield
        finally:
            for listening in getattr(server, "servers", ()):
                listening.close()
            await relay.drain(drain_s)
            await _ended(server, running)


def _configured(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,  # above what clients keep: the SDK's have no limit and look before they use one
        timeout_graceful_shutdown=STOP_S,
    )


async def _ended(server: Server, running: asyncio.Task[None]) -> None:
    server.should_exit = True
    await asyncio.wait({running}, timeout=2 * STOP_S)
    running.cancel()
    await asyncio.wait({running})


def _listen(path: Path, mode: int, group: int) -> socket.socket:
    if len(os.fsencode(path)) > PATH_MAX_BYTES:
        raise ConfigError(f"{path} is too long for a Unix socket: at most {PATH_MAX_BYTES} bytes")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _remove_stale(path)
        # Bound with no rights for anybody, so that there is no moment with more than *mode*.
        before = os.umask(0o777)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        os.chown(path, -1, group)
        os.chmod(path, mode)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror}") from error
    except ConfigError:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        visitor.settimeout(1.0)
        with suppress(ConnectionRefusedError, FileNotFoundError):
            visitor.connect(str(path))
            raise ConfigError(f"something listens on {path} already")
    path.unlink(missing_ok=True)

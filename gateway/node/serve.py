"""Runs ``gateway node``: the gate, built from settings and catalog, on a Unix socket.

For a cluster it also serves over TLS, with the relay to the workers on the next port.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from http import HTTPStatus
from pathlib import Path

import httpx
import uvicorn
from starlette.types import ASGIApp

from gateway.backends.folders import PATH_MAX_BYTES
from gateway.catalog.catalog import Catalog
from gateway.catalog.reload import CatalogReload
from gateway.core.errors import BackendError, ConfigError
from gateway.node.cluster import Cluster
from gateway.node.gate import Gate, engine_client
from gateway.node.image_ids import ImageIds
from gateway.node.policy import Rules
from gateway.node.tls import server_context
from gateway.node.tunnel import Tunnel
from gateway.node.vouchers import Vouchers
from gateway.server import HttpServer, listen
from gateway.settings import Settings

logger = logging.getLogger(__name__)
STOP_S = 2
"""Maximum seconds for which streams continue after a shutdown request. By default uvicorn waits without limit."""
BACKLOG = 256
MODE = 0o660
"""Mode of the gate's socket. A process with write access can create only containers that the catalog allows."""


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
async def serving_gate(gate: Gate, socket_path: Path) -> AsyncIterator[None]:
    """Serve *gate* on *socket_path* while the context is open.

    Args:
        gate: The gate, which is closed at the end.
        socket_path: The socket's path. A stale socket there, on which no process listens, is replaced.

    Raises:
        ConfigError: The socket can't be created, or a process listens on it.
    """
    listener = await asyncio.to_thread(_listen, socket_path)
    server = HttpServer(_configured(gate))
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
    app: ASGIApp, relay: Tunnel, *, host: str, port: int, tls: ssl.SSLContext, drain_s: float
) -> AsyncIterator[None]:
    """Serve *app* at *host* and *port*, and *relay* on the next port, while the context is open.

    At the end both listeners close immediately. Open connections of *app* are served until requests through the relay
    have ended, for at most *drain_s* seconds.

    Raises:
        ConfigError: One of the addresses can't be used.
    """
    with closing(listen(host, port)) as for_app, closing(listen(host, port + 1)) as for_relay:
        config = _configured(app)
        config.load()
        config.ssl = tls
        server = HttpServer(config)
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
        timeout_keep_alive=75,  # longer than clients keep connections; the SDK has no limit, but checks them before use
        timeout_graceful_shutdown=STOP_S,
    )


async def _ended(server: HttpServer, running: asyncio.Task[None]) -> None:
    server.should_exit = True
    await asyncio.wait({running}, timeout=2 * STOP_S)
    running.cancel()
    await asyncio.wait({running})


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > PATH_MAX_BYTES:
        raise ConfigError(f"{path} is too long for a Unix socket: at most {PATH_MAX_BYTES} bytes")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _remove_stale(path)
        # Bound without any permissions, so that the socket never has more than `MODE`.
        before = os.umask(0o777)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        os.chmod(path, MODE)
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
            raise ConfigError(f"another process already listens on {path}")
    path.unlink(missing_ok=True)


async def run_node(settings: Settings, catalog: Catalog, *, makes_folders: bool = False) -> None:
    """Serve the engine gate until SIGTERM and, if ``node_listen`` is set, the gateways of a cluster.

    Args:
        settings: The gateway's settings. Gate and gateway must agree on instance, folders and volumes.
        catalog: The environments whose containers may be created.
        makes_folders: The gate owns ``socket_dir`` and creates the workers' folders in it. The gateway must not run as
            root and must not be able to write there (see `Gate`).

    Raises:
        BackendError: The engine does not answer or lacks a volume, or the folder is not safe.
        ConfigError: The gate's socket can't be created, or settings or files for the cluster are missing or invalid.
    """
    address = listen_address(settings.node_listen) if settings.node_listen else None
    tls = _tls(settings, makes_folders=makes_folders) if address is not None else None
    rules = await _rules(settings, catalog)
    gate = Gate(
        engine=settings.node_engine,
        rules=rules,
        socket_volume=settings.socket_volume,
        socket_view=settings.socket_dir if makes_folders else None,
        custom_tasks_volume=settings.custom_tasks_volume,
        custom_tasks_view=settings.custom_tasks_dir,
    )
    await gate.check()
    # The rules come from the files, not from the gateway: a compromised gateway must not be able to widen them.
    reload = CatalogReload(
        catalog, directory=settings.catalog_dir, names=settings.environments, image_tag=settings.image_tag
    )
    reload.changed(lambda: gate.take(rules.with_environments(catalog)))
    async with AsyncExitStack() as stack:
        is_ending = await stack.enter_async_context(ending())
        await stack.enter_async_context(serving_gate(gate, settings.node_socket))
        if address is not None and tls is not None:
            await stack.enter_async_context(_serving_gateways(gate, settings, address, tls))
        watching = asyncio.ensure_future(reload.run())
        stack.push_async_callback(_stopped, watching)
        logger.info(
            "gate_ready socket=%s environments=%d socket_root=%s", settings.node_socket, len(catalog), rules.socket_root
        )
        await is_ending.wait()
        if address is not None and settings.drain_notice_s:
            await _give_notice(is_ending, settings.drain_notice_s)


async def _give_notice(is_ending: asyncio.Event, notice_s: float) -> None:
    """Serve for *notice_s* more seconds, in which gateways find the node's successor. A second signal ends this."""
    logger.info("node_leaving notice_s=%g", notice_s)
    is_ending.clear()
    with suppress(TimeoutError):
        async with asyncio.timeout(notice_s):
            await is_ending.wait()


async def _rules(settings: Settings, catalog: Catalog) -> Rules:
    socket_root = str(settings.socket_dir.absolute())
    if settings.socket_volume is not None:
        socket_root = await mountpoint(settings.node_engine, settings.socket_volume)
    custom_tasks_root = str(settings.custom_tasks_dir.absolute()) if settings.custom_tasks_dir is not None else ""
    if settings.custom_tasks_volume is not None:
        custom_tasks_root = await mountpoint(settings.node_engine, settings.custom_tasks_volume)
    return Rules.of(
        catalog,
        instance=settings.instance,
        socket_root=socket_root,
        custom_tasks_root=custom_tasks_root,
        max_containers=settings.node_max_containers,
        forwarder_image=settings.forwarder_image,
    )


@asynccontextmanager
async def _serving_gateways(
    gate: Gate, settings: Settings, address: tuple[str, int], tls: ssl.SSLContext
) -> AsyncIterator[None]:
    _raise_file_limit()
    cluster = Cluster(
        gate,
        engine=settings.node_engine,
        vouchers=Vouchers(*settings.cluster_files()),
        state=settings.state_dir / "node",
        image_max_bytes=settings.node_image_max_bytes,
        image_ids=ImageIds(settings.node_image_ids) if settings.node_image_ids is not None else None,
    )
    try:
        await asyncio.to_thread(cluster.check)
        relay = Tunnel(sockets=settings.socket_dir, tls=tls)
        host, port = address
        async with serving_cluster(cluster, relay, host=host, port=port, tls=tls, drain_s=settings.node_drain_s):
            logger.info("node_ready listen=%s relay_port=%d", settings.node_listen, port + 1)
            yield
    finally:
        await cluster.aclose()


def listen_address(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``, with an IPv6 address in brackets.

    Raises:
        ConfigError: *text* has another form, or its port is not from 1 to 65534.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65_535:
        raise ConfigError(f"GATEWAY_NODE_LISTEN={text} is not HOST:PORT, with a port from 1 to 65534")
    return host, int(port)


def _tls(settings: Settings, *, makes_folders: bool) -> ssl.SSLContext:
    ca, cert, key = settings.cluster_ca, settings.cluster_cert, settings.cluster_key
    if ca is None or cert is None or key is None:
        raise ConfigError(
            "GATEWAY_NODE_LISTEN needs GATEWAY_CLUSTER_CA, GATEWAY_CLUSTER_CERT and GATEWAY_CLUSTER_KEY: make them "
            "with gateway certs"
        )
    if not makes_folders:
        raise ConfigError("GATEWAY_NODE_LISTEN needs GATEWAY_NODE_MAKES_FOLDERS=true: gateways elsewhere can't do it")
    return server_context(ca, cert, key)


def _raise_file_limit() -> None:
    """Raise the process's limit of open files: each connection through the relay needs two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def mountpoint(engine: str, volume: str) -> str:
    """Return the path of *volume* on the engine's machine.

    Raises:
        BackendError: The engine does not answer, or has no such volume.
    """
    async with engine_client(engine) as client:
        try:
            response = await client.get(f"/volumes/{volume}")
        except httpx.TransportError as error:
            raise BackendError(f"the engine at {engine} does not answer: {error}") from error
        if response.status_code != HTTPStatus.OK:
            raise BackendError(f"the engine has no volume {volume}; make it with: docker volume create {volume}")
        return str(response.json()["Mountpoint"])

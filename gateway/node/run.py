"""``gateway node``: the gate, put together from settings and catalog."""

from __future__ import annotations

import asyncio
import logging
import resource
import ssl
from contextlib import AsyncExitStack, suppress
from http import HTTPStatus

import httpx

from gateway.catalog.catalog import Catalog
from gateway.catalog.reload import Rollover
from gateway.core.errors import BackendError, ConfigError
from gateway.node.cluster import Cluster
from gateway.node.gate import Gate, engine_client
from gateway.node.rules import Rules
from gateway.node.serve import ending, serving_cluster, serving_gate
from gateway.node.tls import server_context
from gateway.node.tunnel import Relay
from gateway.settings import Settings

logger = logging.getLogger(__name__)


async def run_node(settings: Settings, catalog: Catalog, *, makes_folders: bool = False) -> None:
    """Serve the engine gate until SIGTERM, and where ``node_listen`` is set a cluster's gateways too.

    Args:
        settings: The gateway's own: both must agree on instance, folders and volumes.
        catalog: What may be created.
        makes_folders: ``socket_dir`` is here and belongs to the gate, which makes the workers' folders in it; the
            gateway must be another user than root and cannot write there (see `Gate`).

    Raises:
        BackendError: the engine does not answer, has no such volume, or the folder is not safe.
        ConfigError: the gate's own socket can't be made; or what a cluster needs is not there, or not as it should be.
    """
    address = listen_address(settings.node_listen) if settings.node_listen else None
    tls = _tls(settings, makes_folders=makes_folders) if address is not None else None
    socket_root = str(settings.socket_dir.absolute())
    if settings.socket_volume is not None:
        socket_root = await mountpoint(settings.node_engine, settings.socket_volume)
    custom_tasks_root = str(settings.custom_tasks_dir.absolute()) if settings.custom_tasks_dir is not None else ""
    if settings.custom_tasks_volume is not None:
        custom_tasks_root = await mountpoint(settings.node_engine, settings.custom_tasks_volume)

    def rules() -> Rules:
        return Rules.of(
            catalog,
            instance=settings.instance,
            socket_root=socket_root,
            custom_tasks_root=custom_tasks_root,
            max_containers=settings.node_max_containers,
            forwarder_image=settings.forwarder_image,
        )

    gate = Gate(
        engine=settings.node_engine,
        rules=rules(),
        socket_volume=settings.socket_volume,
        socket_view=settings.socket_dir if makes_folders else None,
        custom_tasks_volume=settings.custom_tasks_volume,
        custom_tasks_view=settings.custom_tasks_dir,
    )
    await gate.check()
    # Its own look at the files, not the gateway's word: one that is taken over must not widen its own rules.
    rollover = Rollover(
        catalog, directory=settings.catalog_dir, names=settings.environments, image_tag=settings.image_tag
    )
    rollover.changed(lambda: gate.take(rules()))
    async with AsyncExitStack() as stack:
        is_ending = await stack.enter_async_context(ending())
        await stack.enter_async_context(serving_gate(gate, settings.node_socket))
        if address is not None and tls is not None:
            _raise_file_limit()
            cluster = Cluster(
                gate,
                engine=settings.node_engine,
                rules=rules(),
                state=settings.state_dir / "node",
                image_max_bytes=settings.node_image_max_bytes,
            )
            stack.push_async_callback(cluster.aclose)
            await asyncio.to_thread(cluster.check)
            rollover.changed(lambda: cluster.take(rules()))
            relay = Relay(sockets=settings.socket_dir, tls=tls)
            host, port = address
            await stack.enter_async_context(
                serving_cluster(cluster, relay, host=host, port=port, tls=tls, drain_s=settings.node_drain_s)
            )
            logger.info("node_ready listen=%s relay_port=%d", settings.node_listen, port + 1)
        watching = asyncio.ensure_future(rollover.run())
        stack.push_async_callback(_stopped, watching)
        logger.info(
            "gate_ready socket=%s environments=%d socket_root=%s", settings.node_socket, len(catalog), socket_root
        )
        await is_ending.wait()
        if address is not None and settings.drain_notice_s:
            logger.info("node_leaving notice_s=%g", settings.drain_notice_s)
            is_ending.clear()
            with suppress(TimeoutError):  # a second signal ends it
                async with asyncio.timeout(settings.drain_notice_s):
                    await is_ending.wait()


def listen_address(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``, an IPv6 address in brackets; raises ``ConfigError`` if it is none, or has no next port."""
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
    """Each connection through the relay is two files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def mountpoint(engine: str, volume: str) -> str:
    """Where the engine has *volume* on its machine.

    Raises:
        BackendError: it does not answer, or has no such volume.
    """
    async with engine_client(engine) as client:
        try:
            response = await client.get(f"/volumes/{volume}")
        except httpx.TransportError as error:
            raise BackendError(f"the engine at {engine} does not answer: {error}") from error
        if response.status_code != HTTPStatus.OK:
            raise BackendError(f"the engine has no volume {volume}; make it with: docker volume create {volume}")
        return str(response.json()["Mountpoint"])

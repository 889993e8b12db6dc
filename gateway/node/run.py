"""``gateway node``: the gate, put together from settings and catalog."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

import httpx

from gateway.catalog import Catalog
from gateway.core.errors import BackendError
from gateway.node.gate import Gate, engine_client
from gateway.node.rules import Rules
from gateway.node.serve import serve_gate
from gateway.rollover import Rollover
from gateway.settings import Settings

logger = logging.getLogger(__name__)


async def run_node(settings: Settings, catalog: Catalog, *, makes_folders: bool = False) -> None:
    """Serve the engine gate until SIGTERM.

    Args:
        settings: The gateway's own: both must agree on instance, folders and volumes.
        catalog: What may be created.
        makes_folders: ``socket_dir`` is here and belongs to the gate, which makes the workers' folders in it; the
            gateway must be another user than root and cannot write there (see `Gate`).

    Raises:
        BackendError: the engine does not answer, has no such volume, or the folder is not safe.
        ConfigError: the gate's own socket can't be made.
    """
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
    logger.info("gate_ready socket=%s environments=%d socket_root=%s", settings.node_socket, len(catalog), socket_root)
    # Its own look at the files, not the gateway's word: one that is taken over must not widen its own rules.
    rollover = Rollover(catalog, directory=settings.catalog_dir, names=settings.environments)
    rollover.changed(lambda: gate.take(rules()))
    watching = asyncio.ensure_future(rollover.run())
    try:
        await serve_gate(gate, settings.node_socket)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


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

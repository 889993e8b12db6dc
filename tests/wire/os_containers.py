"""The containers of a gateway's workers, inspected without the gateway."""

from __future__ import annotations

from typing import Any

import docker

from tests.wire.areal_client import ArealClient
from tests.wire.gateways import Gateway

LABEL_WORKER = "env-gateway.worker"
SERVER_PROCESSES = 4
"""The most processes of a worker without a session: its first process, the server, its launcher, and the spawner of
sandboxes."""


async def processes(gateway: Gateway) -> dict[str, list[str]]:
    """Return the command lines that run in each worker's container."""
    return {worker: [" ".join(row[7:]) for row in found.top()["Processes"]] for worker, found in await _found(gateway)}


async def kill(gateway: Gateway, worker: str) -> None:
    """Kill the container of *worker*, as an out-of-memory kill would."""
    (container,) = [found for name, found in await _found(gateway) if name == worker]
    container.kill()


async def nothing_is_left(gateway: Gateway) -> None:
    """Assert that no session, no used slot, and no process of a box is left in any worker."""
    assert await gateway.sessions() == []
    health = await ArealClient(gateway.url).ask("GET", "/health")
    assert [health[name] for name in ("active_episodes", "queued", "leaked")] == [0, 0, 0], health
    for worker, running in (await processes(gateway)).items():
        assert len(running) <= SERVER_PROCESSES, (worker, running)


async def _found(gateway: Gateway) -> list[tuple[str, Any]]:
    workers = [worker["id"] for worker in await gateway.workers("os")]
    engine = docker.from_env(version="auto")
    try:
        return [
            (worker, found)
            for worker in workers
            for found in engine.containers.list(ignore_removed=True, filters={"label": f"{LABEL_WORKER}={worker}"})
        ]
    finally:
        engine.close()

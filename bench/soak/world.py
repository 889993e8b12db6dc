"""The subject of a soak: the run's own replicas of the gateway, Redis and containers, for faults to break."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Container, Mapping
from pathlib import Path
from typing import Any

import docker
from docker.errors import NotFound

from bench.load.http1 import Address
from bench.subjects.catalogs import STEPS, STEPS_FOLDER, STEPS_IMAGE, steps_toml, write_catalog
from bench.subjects.peers import free_port
from bench.subjects.processes import ServerProcess, StartError
from bench.subjects.redis_server import RedisServer
from bench.subjects.targets import GATEWAY, Servers
from gateway.backends.docker.container import LABEL_INSTANCE

ALONE = "alone"
"""The environment that gives each session its own container."""
IDLE_S = 20
"""Seconds after which an abandoned session ends."""
SHARED_WORKERS, ALONE_WORKERS = 3, 4
KEPT_S = 10
"""Seconds for which Redis remembers an ended session."""
ENGINE_S = 60
PREFIX = "{gateway}:"
GRACE_S = 3.0
"""Seconds around a fault in which a connection made just before it may still break."""


class Replica:
    """Successive gateway processes at one address."""

    def __init__(self, servers: Servers, name: str, settings: Mapping[str, str]) -> None:
        self._servers = servers
        self._settings = dict(settings) | {"GATEWAY_PORT": str(free_port())}
        self.name = name
        self.address = Address(port=int(self._settings["GATEWAY_PORT"]))
        self.lives: list[ServerProcess] = []
        self.down: list[tuple[float, float]] = []
        """Start and end of each time, by the monotonic clock, in which the replica was not fully up."""
        self._is_down = True

    @property
    def process(self) -> ServerProcess:
        """The current process."""
        return self.lives[-1]

    @property
    def is_up(self) -> bool:
        """True if the replica is expected to serve."""
        return not self._is_down

    async def start(self) -> None:
        """Start the replica.

        Raises:
            StartError: It does not become ready.
        """
        self.lives.append(self._servers.make(GATEWAY, self._settings))
        await self.process.start()
        self._is_down = False
        if self.down:
            self.down[-1] = (self.down[-1][0], time.monotonic())

    async def kill(self) -> None:
        """End the replica by SIGKILL."""
        self._goes()
        await self.process.kill()

    async def stop(self) -> None:
        """Send SIGTERM, and wait for the replica's end."""
        self._goes()
        if self.lives:
            await self.process.stop()

    def may_break(self, since: float) -> bool:
        """Return True if a fault may have broken a connection in use since *since* (monotonic, s)."""
        return any(begin <= time.monotonic() and since <= end + GRACE_S for begin, end in self.down)

    def _goes(self) -> None:
        self._is_down = True
        self.down.append((time.monotonic(), float("inf")))


class World:
    """The replicas, their Redis, their engine and their folder."""

    def __init__(self, servers: Servers, *, replicas: int = 2) -> None:
        self.instance = f"soak-{uuid.uuid4().hex[:8]}"
        self.folder = servers.folder
        self.redis = RedisServer(self.folder, keeps=True)
        self.engine = docker.from_env(version="auto", timeout=ENGINE_S)
        settings = write_catalog(self.folder, **_tomls()) | {
            "GATEWAY_STORE": self.redis.url,
            "GATEWAY_BACKEND": "docker",
            "GATEWAY_INSTANCE": self.instance,
            "GATEWAY_SOCKET_DIR": str(self.folder / "s"),
            "GATEWAY_STATE_DIR": str(self.folder / "state"),
            "GATEWAY_SECRET": secrets.token_hex(32),
            "GATEWAY_CLOSED_KEPT_S": str(KEPT_S),
        }
        self.replicas = [Replica(servers, f"replica {n + 1}", settings) for n in range(replicas)]

    async def start(self) -> None:
        """Build the image and start Redis and all replicas.

        Raises:
            StartError: The image cannot be built, or a server does not start.
        """
        await asyncio.to_thread(self._build)
        await self.redis.start()
        for replica in self.replicas:
            await replica.start()

    async def close(self) -> None:
        """End and remove everything, in any state."""
        for replica in self.replicas:
            with contextlib.suppress(ProcessLookupError):
                await replica.stop()
        await self.redis.stop()
        for container in await self.containers():
            with contextlib.suppress(NotFound):
                await asyncio.to_thread(container.remove, force=True)
        self.engine.close()

    async def containers(self, *, running: bool = False) -> list[Any]:
        """Return the containers of this run, with dead containers unless *running* is set."""
        filters: dict[str, str | list[str] | bool] = {"label": f"{LABEL_INSTANCE}={self.instance}"}
        if running:
            filters["status"] = "running"
        # Sparse, because the details of a container that disappears meanwhile are not available.
        found: list[Any] = await asyncio.to_thread(
            lambda: self.engine.containers.list(all=True, sparse=True, filters=filters)
        )
        return found

    def lasting_keys(self, kinds: Container[str] | None = None) -> set[str]:
        """Return the Redis keys without an expiry. *kinds*, the first words of their names, selects some."""
        with self.redis.client() as client:
            keys = [str(key) for key in client.scan_iter(count=1000)]
            wanted = [key for key in keys if kinds is None or key.removeprefix(PREFIX).partition(":")[0] in kinds]
            return {key for key in wanted if client.ttl(key) == -1}

    def folders(self) -> set[str]:
        """Return the names of the workers' folders."""
        sockets = self.folder / "s"
        return {each.name for each in sockets.iterdir()} if sockets.exists() else set()

    def logs(self) -> str:
        """Return the output of all replicas in all their lives."""
        return "".join(life.output for replica in self.replicas for life in replica.lives)

    def _build(self) -> None:
        try:
            self.engine.images.build(path=str(STEPS_FOLDER), tag=STEPS_IMAGE, rm=True)
        except docker.errors.DockerException as error:
            raise StartError(f"building {STEPS_IMAGE} (scripts/build-images base): {error}") from error


def _tomls() -> dict[str, str]:
    times = {"idle_s": IDLE_S, "open_s": 30, "call_s": 60}
    shared = {
        "slots": 16,
        "min_workers": 0,
        "max_workers": SHARED_WORKERS,
        "idle_worker_s": 6,
        "pause_idle_s": 2,
        "max_uses": 500,
    }
    alone = {"slots": 1, "min_workers": 0, "max_workers": ALONE_WORKERS, "idle_worker_s": 3, "max_uses": 1}
    return {
        STEPS: steps_toml(STEPS, pool=shared, timeouts=times),
        ALONE: steps_toml(ALONE, head={"isolation": "exclusive"}, pool=alone, timeouts=times),
    }


@contextlib.asynccontextmanager
async def world(servers: Servers) -> AsyncIterator[World]:
    """Run a world, and remove it on leaving in any case."""
    made = World(servers)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


def read_status(pid: int) -> tuple[int, int]:
    """Return the numbers of open files and threads of the process *pid*, or zeros if it has ended."""
    try:
        files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    return files, next(int(line.split()[1]) for line in lines if line.startswith("Threads:"))

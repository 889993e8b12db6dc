"""What is soaked: replicas of the gateway on a Redis and an engine, all of this run's own, that faults may break."""

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
"""The environment whose sessions each have a container of their own."""
IDLE_S = 20
"""After which a session ends that its trainer left."""
SHARED_WORKERS, ALONE_WORKERS = 3, 4
KEPT_S = 10
"""How long Redis remembers a session that ended."""
ENGINE_S = 60
PREFIX = "{gateway}:"
GRACE_S = 3.0
"""A connection that was made just before a fault may break just after it."""


class Replica:
    """One gateway process after the other at one address."""

    def __init__(self, servers: Servers, name: str, settings: Mapping[str, str]) -> None:
        self._servers = servers
        self._settings = dict(settings) | {"GATEWAY_PORT": str(free_port())}
        self.name = name
        self.address = Address(port=int(self._settings["GATEWAY_PORT"]))
        self.lives: list[ServerProcess] = []
        self.down: list[tuple[float, float]] = []
        """Begin and end of the times, of the monotonic clock, in which it was not all there."""
        self._is_down = True

    @property
    def process(self) -> ServerProcess:
        """The present one."""
        return self.lives[-1]

    @property
    def is_up(self) -> bool:
        """Whether it serves, as far as anybody knows."""
        return not self._is_down

    async def start(self) -> None:
        """Start it.

        Raises:
            StartError: it does not become ready.
        """
        self.lives.append(self._servers.make(GATEWAY, self._settings))
        await self.process.start()
        self._is_down = False
        if self.down:
            self.down[-1] = (self.down[-1][0], time.monotonic())

    async def kill(self) -> None:
        """SIGKILL."""
        self._goes()
        await self.process.kill()

    async def stop(self) -> None:
        """SIGTERM, and wait for its end."""
        self._goes()
        if self.lives:
            await self.process.stop()

    def may_break(self, since: float) -> bool:
        """Whether a connection that was used since *since* (monotonic, s) may have broken for a fault's sake."""
        return any(begin <= time.monotonic() and since <= end + GRACE_S for begin, end in self.down)

    def _goes(self) -> None:
        self._is_down = True
        self.down.append((time.monotonic(), float("inf")))


class World:
    """All of it."""

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
        """Build the image and start everything.

        Raises:
            StartError: something does not start.
        """
        await asyncio.to_thread(self._build)
        await self.redis.start()
        for replica in self.replicas:
            await replica.start()

    async def close(self) -> None:
        """End and remove everything, whatever state it is in."""
        for replica in self.replicas:
            with contextlib.suppress(ProcessLookupError):
                await replica.stop()
        await self.redis.stop()
        for container in await self.containers():
            with contextlib.suppress(NotFound):
                await asyncio.to_thread(container.remove, force=True)
        self.engine.close()

    async def containers(self, *, running: bool = False) -> list[Any]:
        """The containers of this run, dead ones too unless only *running* ones are asked for."""
        filters: dict[str, str | list[str] | bool] = {"label": f"{LABEL_INSTANCE}={self.instance}"}
        if running:
            filters["status"] = "running"
        # Sparse: the details of a container that goes meanwhile can't be had.
        found: list[Any] = await asyncio.to_thread(
            lambda: self.engine.containers.list(all=True, sparse=True, filters=filters)
        )
        return found

    def lasting_keys(self, kinds: Container[str] | None = None) -> set[str]:
        """The keys of Redis that do not run out by themselves; of *kinds* only, the first words of their names."""
        with self.redis.client() as client:
            keys = [str(key) for key in client.scan_iter(count=1000)]
            wanted = [key for key in keys if kinds is None or key.removeprefix(PREFIX).partition(":")[0] in kinds]
            return {key for key in wanted if client.ttl(key) == -1}

    def folders(self) -> set[str]:
        """The workers' folders."""
        sockets = self.folder / "s"
        return {each.name for each in sockets.iterdir()} if sockets.exists() else set()

    def logs(self) -> str:
        """What all replicas wrote in all their lives."""
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
    """Run a world; it is removed on leaving, whatever happened."""
    made = World(servers)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


def read_status(pid: int) -> tuple[int, int]:
    """How many files and threads the process *pid* has open; zeros where it has ended."""
    try:
        files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    return files, next(int(line.split()[1]) for line in lines if line.startswith("Threads:"))

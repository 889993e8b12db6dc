"""Helpers of the suites of third-party workers, other than fixtures: a backend from outside, a worker from inside."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import docker

from gateway.backends.docker.backend import DockerBackend, EnginePace
from gateway.backends.docker.mounts import HostPaths
from gateway.core.addresses import parse_address
from gateway.core.environment import Environment, Limits, Server
from gateway.core.errors import UpstreamGone
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.ports.backend import Backend
from gateway.core.ports.transport import Request
from gateway.upstreams.transport import HttpTransport
from tests.contract.backend_swarm_world import DIALERS
from tests.contract.backend_world import (
    BASE_IMAGES,
    FAKE_WORKER,
    eventually,
    folders_below,
    labelled,
    new_id,
    remove_folders,
    remove_labelled,
)
from tests.deadlines import HANG_S

TCP_SERVER = Path(__file__).with_name("backend_tcp_server.py")
FORWARDER = Path(__file__).parents[2] / "env_images" / "base" / "envserver" / "forwarder.py"
PORT = 8000


async def ask(address: str, request: Request, *, silence_s: float = HANG_S) -> str:
    """Send *request* to a worker as the gateway does. Return the body of the response."""
    node = parse_address(address).node
    relay = HttpTransport(dial=DIALERS[node].dial if node else None)
    try:
        exchange = await relay.send(new_id(), address, request, silence_s=silence_s)
        try:
            return (await exchange.read(2**20)).decode()
        finally:
            await exchange.aclose()
    finally:
        await relay.aclose()


async def healthy(address: str) -> Any:
    """Wait until the worker answers. Return its health."""

    async def answer() -> Any:
        try:
            return json.loads(await ask(address, Request(b"GET", b"/health")))
        except UpstreamGone:
            return None

    return await eventually(answer)


async def run_inside(address: str, program: str) -> str:
    """Run a Python *program* in the worker. Return its output."""
    return await ask(address, Request(b"POST", b"/run", (), program.encode()))


@dataclass
class ForeignWorld:
    """A backend with an environment that is a third-party server, and functions that check its effects."""

    backend: Backend
    environment: Environment
    kill: Callable[[WorkerId, str], Awaitable[None]] | None
    """Kills -9 the worker with this id and address, from outside. None if the gateway does not start the server."""
    left: Callable[[], list[str]]
    """Returns what exists of any worker: containers or processes, folders."""
    image_id: str = ""
    """The id of the environment's image, as the engine states it."""
    offer: Callable[[Environment], None] = lambda environment: None
    """Puts this environment into the catalog of the engine gate, if there is one, in place of the world's."""

    def variant(self, **changes: Any) -> Environment:
        changed = replace(self.environment, **changes)
        self.offer(changed)
        return changed


def base_image(engine: docker.APIClient) -> str:
    found = next((name for name in BASE_IMAGES if engine.images(name, quiet=True)), None)
    assert found is not None, f"none of {BASE_IMAGES} is here: scripts/base-image makes one"
    return found


def foreign_environment(image: str) -> Environment:
    return Environment(
        name=EnvironmentName("foreign"),
        image=image,
        directory=FAKE_WORKER,
        command=("python3", str(TCP_SERVER), "{port}"),
        limits=Limits(memory_bytes=128 * 2**20, cpus=0.5, pids=64, tmp_bytes=8 * 2**20),
        server=Server(port=PORT),
    )


@asynccontextmanager
async def foreign_docker_at(
    url: str, engine: docker.APIClient, images: tuple[str, str], shared_dir: Path, instance: str
) -> AsyncIterator[ForeignWorld]:
    """A Docker backend that talks to *url*; *images* are the server's and the forwarder's."""
    environment = foreign_environment(images[0])
    backend = DockerBackend(
        url=url,
        instance=instance,
        paths=HostPaths(socket_dir=shared_dir),
        pace=EnginePace(threads=4, stop_grace_s=1.0),
        environments=[environment],
        forwarder_image=images[1],
    )

    async def kill(id: WorkerId, address: str) -> None:
        engine.kill(part(engine, id, "server")["Id"], signal="SIGKILL")

    def left() -> list[str]:
        return [*(entry["Names"][0] for entry in labelled(engine, instance)), *folders_below(shared_dir)]

    try:
        id = engine.inspect_image(images[0])["Id"]  # type: ignore[no-untyped-call]  # no stubs
        yield ForeignWorld(backend=backend, environment=environment, kill=kill, left=left, image_id=id)
    finally:
        await backend.aclose()
        remove_labelled(engine, instance)
        remove_folders(shared_dir)


def part(engine: docker.APIClient, id: WorkerId, role: str) -> dict[str, Any]:
    """Return the description of one of a worker's two containers."""
    labels = [f"env-gateway.worker={id}", f"env-gateway.role={role}"]
    (entry,) = engine.containers(all=True, filters={"label": labels})
    found: dict[str, Any] = engine.inspect_container(entry["Id"])
    return found


async def listening_port(pid: int) -> int:
    """Return the port of loopback on which process *pid* listens, or 0."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():  # noqa: ASYNC240  # no file of a disk
        with contextlib.suppress(FileNotFoundError):  # the file was closed meanwhile
            inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:  # noqa: ASYNC240  # no file of a disk
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            return int(fields[1].rpartition(":")[2], 16)
    return 0

"""Helpers of the backend suites, other than fixtures: both backends from outside, and workers from inside."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import docker
import httpx

from gateway.backends.docker.backend import DockerBackend, EnginePace
from gateway.backends.docker.mounts import HostPaths
from gateway.core.addresses import parse_address
from gateway.core.environment import CustomTasks, Environment, Limits
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.ports.backend import Backend
from gateway.core.worker import Worker
from tests.deadlines import HANG_S

T = TypeVar("T")

FAKE_WORKER = Path(__file__).parent.parent / "fakes" / "worker"
BASE_IMAGES = ("env-gateway/debian-python:trixie", "env-gateway/python:with-ca", "python:3.13-slim")
"""The images that scripts/base-image may provide. Any of them has Python."""
ENGINE_URL = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
SOCKETS_ON_NODES: dict[str, Path] = {}
"""The folder on this machine of the workers whose addresses name a node, by the node's id."""


async def eventually(check: Callable[[], Awaitable[T]]) -> T:
    """Call *check* repeatedly until its result is true, and return it. Fail after a deadline."""
    async with asyncio.timeout(HANG_S):
        while True:
            if result := await check():
                return result
            await asyncio.sleep(0.02)


def socket_of(address: str) -> Path:
    """Return the Unix socket of the worker at *address*, which may name a node that is this machine."""
    found = parse_address(address)
    return Path(found.path) if found.is_unix else SOCKETS_ON_NODES[found.node] / found.path


@asynccontextmanager
async def door(address: str) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client for the worker at *address*."""
    # `verify=False`: reading the certificates, which a Unix socket does not use, takes 25 ms of CPU for each client.
    transport = httpx.AsyncHTTPTransport(uds=str(socket_of(address)), verify=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://worker", trust_env=False) as client:
        yield client


async def healthy(address: str) -> dict[str, Any]:
    """Wait until the worker answers. Return its health."""

    async def answer() -> dict[str, Any]:
        try:
            async with door(address) as client:
                found: dict[str, Any] = (await client.get("/health")).json()
                return found
        except httpx.TransportError:
            return {}

    return await eventually(answer)


async def answers(address: str) -> bool:
    """Return True if the worker answers immediately. A running worker does so within some milliseconds."""
    try:
        async with door(address) as client:
            return (await client.get("/health", timeout=0.5)).status_code == 200
    except httpx.TransportError:
        return False


async def run_inside(address: str, program: str) -> str:
    """Run a Python *program* in the worker. Return its output."""
    async with door(address) as client:
        return (await client.post("/run", content=program.encode())).text


def new_id() -> WorkerId:
    return WorkerId(secrets.token_hex(8))


def worker_of(environment: Environment, id: WorkerId | None = None) -> Worker:
    return Worker(
        id=new_id() if id is None else id,
        environment=environment.name,
        digest=environment.digest(),
        slots=environment.pool.slots,
    )


@dataclass
class World:
    """A backend, and functions that check its effects."""

    backend: Backend
    environment: Environment
    shared_dir: Path
    tasks_dir: Path
    """The folder with the folders of operators' task modules."""
    killing: Callable[[WorkerId, str], Awaitable[Callable[[], Awaitable[None]]]]
    """Prepares a kill -9 from outside of the worker with this id and address, which answers now."""
    engine_leftovers: Callable[[], list[str]]
    another: Callable[[], Backend]
    """Returns the backend of another gateway on the same engine or machine. It closes with this one."""

    image_id: str = ""
    """The id of the environment's image, as the engine states it."""
    check_folders: Callable[[], Awaitable[None]] | None = None
    """The check that another process does at its start, where that process creates the folders."""
    offer: Callable[[Environment], None] = lambda environment: None
    """Puts this environment into the catalog of the engine gate, if there is one, in place of the world's."""

    async def kill(self, id: WorkerId, address: str) -> None:
        """Kill -9 the worker with this id and address, from outside."""
        await (await self.killing(id, address))()

    def leftovers(self) -> list[str]:
        """Return what exists of any worker: containers or processes, folders."""
        return [*self.engine_leftovers(), *folders_below(self.shared_dir)]

    def variant(self, **changes: Any) -> Environment:
        changed = replace(self.environment, **changes)
        self.offer(changed)
        return changed

    def misbehaving(self, how: str) -> Environment:
        return self.variant(variables={"FAKE_WORKER": how})


def labelled(engine: docker.APIClient, instance: str) -> list[dict[str, Any]]:
    """Return the containers of an instance, whichever process created them."""
    found: list[dict[str, Any]] = engine.containers(all=True, filters={"label": f"env-gateway.instance={instance}"})
    return found


def remove_labelled(engine: docker.APIClient, instance: str) -> None:
    for entry in labelled(engine, instance):
        engine.remove_container(entry["Id"], force=True, v=True)


def fake_environment(image: str) -> Environment:
    return Environment(
        name=EnvironmentName("fake"),
        image=image,
        directory=FAKE_WORKER,
        command=("python3", "server.py"),
        limits=Limits(memory_bytes=128 * 2**20, cpus=0.5, pids=64, tmp_bytes=8 * 2**20),
        custom_tasks=CustomTasks(module="custom_tasks.mine", folder="fake"),
    )


def folders_below(top: Path) -> list[str]:
    """Return the names of all folders below *top*. Unlike ``Path.rglob``, tolerate folders that disappear meanwhile."""
    return [name for _, names, _ in os.walk(top) for name in names]


def processes_with(variable: str) -> list[str]:
    """Return the processes whose environment contains *variable* (a prefix of ``NAME=value``)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it ended, or belongs to another user
        if any(entry.startswith(variable.encode()) for entry in variables):
            found.append(f"process {folder.name}")
    return found


def remove_folders(shared_dir: Path) -> None:
    for entry in shared_dir.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)


@asynccontextmanager
async def docker_world_at(
    url: str, engine: docker.APIClient, image: str, shared_dir: Path, tasks_dir: Path, instance: str
) -> AsyncIterator[World]:
    """Yield a Docker backend that talks to *url*, and one of another owner that talks to the engine itself."""

    def backend(at: str, owner: str) -> DockerBackend:
        made = DockerBackend(
            url=at,
            instance=instance,
            owner=owner,
            paths=HostPaths(socket_dir=shared_dir, custom_tasks_dir=tasks_dir),
            pace=EnginePace(threads=4, stop_grace_s=1.0),
            environments=[fake_environment(image)],
        )
        backends.append(made)
        return made

    async def killing(id: WorkerId, address: str) -> Callable[[], Awaitable[None]]:
        async def kill() -> None:
            (entry,) = engine.containers(filters={"label": f"env-gateway.worker={id}"})
            engine.kill(entry["Id"], signal="SIGKILL")

        return kill

    backends: list[DockerBackend] = []
    yield World(
        backend=backend(url, "0" * 16),
        environment=fake_environment(image),
        shared_dir=shared_dir,
        tasks_dir=tasks_dir,
        killing=killing,
        image_id=engine.inspect_image(image)["Id"],  # type: ignore[no-untyped-call]  # no stubs
        engine_leftovers=lambda: [entry["Names"][0] for entry in labelled(engine, instance)],
        another=lambda: backend(ENGINE_URL, "1" * 16),
    )
    for made in backends:
        await made.aclose()
    remove_labelled(engine, instance)
    remove_folders(shared_dir)

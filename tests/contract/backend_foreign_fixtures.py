"""Third-party servers on every backend that supports them, loaded as a plugin by the suites that need them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import docker
import pytest

from gateway.backends.external import RoutedBackend
from gateway.backends.process import ProcessBackend
from gateway.core.environment import Server
from gateway.core.ids import WorkerId
from gateway.node.gate import Gate
from gateway.node.policy import Rules
from gateway.node.serve import serving_gate
from tests.contract.backend_foreign_world import (
    FORWARDER,
    PORT,
    TCP_SERVER,
    ForeignWorld,
    base_image,
    foreign_docker_at,
    foreign_environment,
    listening_port,
    run_inside,
)
from tests.contract.backend_swarm_world import swarm_at
from tests.contract.backend_world import ENGINE_URL, FAKE_WORKER, eventually, folders_below, processes_with
from tests.fakes.images import built_once

pytest_plugins = ["tests.contract.backend_fixtures"]


@pytest.fixture(scope="session")
def foreign_image(docker_engine: docker.APIClient) -> str:
    """An image of a third-party server: a port, a health check, root, and a home that only root can write to."""
    lines = [
        f"FROM {base_image(docker_engine)}",
        "WORKDIR /srv",
        "COPY server.py backend_tcp_server.py /srv/",
        f"EXPOSE {PORT}",
        'HEALTHCHECK CMD ["false"]',
        "VOLUME /cache",
        'ENTRYPOINT ["python3", "/srv/backend_tcp_server.py"]',
        f'CMD ["{PORT}"]',
    ]
    files = {"server.py": (FAKE_WORKER / "server.py").read_bytes(), TCP_SERVER.name: TCP_SERVER.read_bytes()}
    return built_once(docker_engine, "env-gateway-tests/foreign:1", {"Dockerfile": "\n".join(lines).encode(), **files})


@pytest.fixture(scope="session")
def forwarder_image(docker_engine: docker.APIClient) -> str:
    """The part of the base image that a forwarder needs, with this checkout's forwarder."""
    package = "$(python3 -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')/envserver"
    lines = [
        f"FROM {base_image(docker_engine)}",
        "COPY forwarder.py /tmp/",
        f'RUN mkdir -p "{package}" && cp /tmp/forwarder.py "{package}/" && touch "{package}/__init__.py"',
    ]
    files = {"Dockerfile": "\n".join(lines).encode(), "forwarder.py": FORWARDER.read_bytes()}
    return built_once(docker_engine, "env-gateway-tests/forwarder:1", files)


@pytest.fixture
async def foreign_docker_world(
    docker_engine: docker.APIClient, foreign_image: str, forwarder_image: str, shared_dir: Path, instance: str
) -> AsyncIterator[ForeignWorld]:
    """Containers, through the engine directly."""
    images = (foreign_image, forwarder_image)
    async with foreign_docker_at(ENGINE_URL, docker_engine, images, shared_dir, instance) as world:
        yield world


@pytest.fixture
async def foreign_gate_world(
    docker_engine: docker.APIClient, foreign_image: str, forwarder_image: str, shared_dir: Path, instance: str
) -> AsyncIterator[ForeignWorld]:
    """Containers, through the engine gate."""
    environment = foreign_environment(foreign_image)
    rules = Rules.of([environment], instance=instance, socket_root=str(shared_dir), forwarder_image=forwarder_image)
    images, socket = (foreign_image, forwarder_image), shared_dir / "gate.sock"
    gate = Gate(engine=ENGINE_URL, rules=rules)
    async with (
        serving_gate(gate, socket),
        foreign_docker_at(f"unix://{socket}", docker_engine, images, shared_dir, instance) as world,
    ):
        yield replace(world, offer=lambda environment: gate.take(rules.with_environments([environment])))


@pytest.fixture
async def foreign_swarm_world(
    docker_engine: docker.APIClient, foreign_image: str, forwarder_image: str, shared_dir: Path, instance: str
) -> AsyncIterator[ForeignWorld]:
    """Containers on a node of a cluster, over TLS."""
    environment = foreign_environment(foreign_image)
    rules = Rules.of([environment], instance=instance, socket_root=str(shared_dir), forwarder_image=forwarder_image)
    images = (foreign_image, forwarder_image)
    async with (
        foreign_docker_at(ENGINE_URL, docker_engine, images, shared_dir, instance) as world,
        swarm_at(rules, environment, shared_dir) as machine,
    ):
        yield replace(world, backend=machine.backend, offer=machine.offer)


@pytest.fixture
async def foreign_process_world(shared_dir: Path) -> AsyncIterator[ForeignWorld]:
    backend = ProcessBackend(socket_dir=shared_dir, sandbox_dir=shared_dir / "sandboxes", stop_grace_s=1.0)

    async def kill(id: WorkerId, address: str) -> None:
        os.kill(int(await run_inside(address, "import os; print(os.getpid())")), signal.SIGKILL)

    def left() -> list[str]:
        return [*processes_with(f"HOME={shared_dir}/"), *folders_below(shared_dir)]

    yield ForeignWorld(backend=backend, environment=foreign_environment("no-image"), kill=kill, left=left)
    await backend.aclose()


@pytest.fixture
async def static_world(shared_dir: Path) -> AsyncIterator[ForeignWorld]:
    """A server that the gateway does not start, next to a backend that starts others."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(TCP_SERVER), "0", cwd=FAKE_WORKER, stdout=asyncio.subprocess.DEVNULL
    )
    port = await eventually(lambda: listening_port(process.pid))
    environment = replace(foreign_environment("static"), command=(), server=Server(url=f"http://127.0.0.1:{port}"))
    default = ProcessBackend(socket_dir=shared_dir, sandbox_dir=shared_dir / "sandboxes")
    backend = RoutedBackend(default, [environment])

    def left() -> list[str]:
        return folders_below(shared_dir)

    yield ForeignWorld(backend=backend, environment=environment, kill=None, left=left)
    await backend.aclose()
    process.kill()
    await process.wait()


RUN = (
    "foreign_process",
    pytest.param("foreign_docker", marks=[pytest.mark.docker]),
    pytest.param("foreign_gate", marks=[pytest.mark.docker]),
    pytest.param("foreign_swarm", marks=[pytest.mark.docker]),
)


@pytest.fixture(params=RUN)
def run_world(request: pytest.FixtureRequest) -> ForeignWorld:
    """Each backend that runs the server itself. The Docker one also runs through the engine gate."""
    found: ForeignWorld = request.getfixturevalue(f"{request.param}_world")
    return found


@pytest.fixture(params=["static", *RUN])
def foreign_world(request: pytest.FixtureRequest) -> ForeignWorld:
    """Each backend in turn."""
    found: ForeignWorld = request.getfixturevalue(f"{request.param}_world")
    return found

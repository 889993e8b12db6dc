"""A real engine, an image of the smallest worker, and both backends, loaded as a plugin by the suites that need them.

Everything on the engine has the label of its test's instance, and is removed by that label.
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import docker
import pytest
from docker.errors import DockerException

from gateway.backends.process import ProcessBackend
from gateway.core.ids import WorkerId
from gateway.node.gate import Gate
from gateway.node.policy import Rules
from gateway.node.serve import serving_gate
from tests.contract.backend_swarm_world import swarm_at
from tests.contract.backend_world import (
    BASE_IMAGES,
    ENGINE_URL,
    FAKE_WORKER,
    World,
    docker_world_at,
    fake_environment,
    processes_with,
    run_inside,
)
from tests.deadlines import HANG_S
from tests.fakes.images import built_once


@pytest.fixture
def shared_dir() -> Iterator[Path]:
    """A folder with the same path for the engine and the test, short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="eg-") as name:
        os.chmod(name, 0o711)
        yield Path(name)


@pytest.fixture
def tasks_dir() -> Iterator[Path]:
    """A folder like `shared_dir`, for task modules: workers may read its content."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="eg-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[docker.APIClient]:
    """The real engine. Without it tests are skipped, or fail in CI."""
    try:
        client = docker.APIClient(base_url=ENGINE_URL, version="auto", timeout=HANG_S)
    except DockerException as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no Docker engine at {ENGINE_URL}: {error}")
    yield client
    client.close()


@pytest.fixture(scope="session")
def worker_image(docker_engine: docker.APIClient) -> str:
    """An image of the smallest worker."""
    base = next((name for name in BASE_IMAGES if docker_engine.images(name, quiet=True)), None)
    assert base is not None, f"none of {BASE_IMAGES} is here: scripts/base-image makes one"
    lines = (f"FROM {base}", "COPY server.py /srv/", 'CMD ["python3", "/srv/server.py"]')
    files = {"Dockerfile": "\n".join(lines).encode(), "server.py": (FAKE_WORKER / "server.py").read_bytes()}
    return built_once(docker_engine, "env-gateway-tests/worker:1", files)


@pytest.fixture
def instance() -> str:
    return f"eg-test-{secrets.token_hex(4)}"


@pytest.fixture
async def docker_world(
    docker_engine: docker.APIClient, worker_image: str, shared_dir: Path, tasks_dir: Path, instance: str
) -> AsyncIterator[World]:
    """Containers, through the engine directly."""
    async with docker_world_at(ENGINE_URL, docker_engine, worker_image, shared_dir, tasks_dir, instance) as world:
        yield world


@pytest.fixture
async def gate_world(
    docker_engine: docker.APIClient, worker_image: str, shared_dir: Path, tasks_dir: Path, instance: str
) -> AsyncIterator[World]:
    """Containers, through the engine gate."""
    rules = Rules.of(
        [fake_environment(worker_image)],
        instance=instance,
        socket_root=str(shared_dir),
        custom_tasks_root=str(tasks_dir),
    )
    socket, gate = shared_dir / "gate.sock", Gate(engine=ENGINE_URL, rules=rules, custom_tasks_view=tasks_dir)
    async with (
        serving_gate(gate, socket),
        docker_world_at(f"unix://{socket}", docker_engine, worker_image, shared_dir, tasks_dir, instance) as world,
    ):
        yield replace(world, offer=lambda environment: gate.take(rules.with_environments([environment])))


@pytest.fixture
async def swarm_world(
    docker_engine: docker.APIClient, worker_image: str, shared_dir: Path, tasks_dir: Path, instance: str
) -> AsyncIterator[World]:
    """Containers on a node of a cluster, over TLS."""
    environment = fake_environment(worker_image)
    rules = Rules.of([environment], instance=instance, socket_root=str(shared_dir), custom_tasks_root=str(tasks_dir))
    async with (
        docker_world_at(ENGINE_URL, docker_engine, worker_image, shared_dir, tasks_dir, instance) as world,
        swarm_at(rules, environment, shared_dir, tasks_dir=tasks_dir) as machine,
    ):
        yield replace(world, backend=machine.backend, check_folders=machine.gate.check, offer=machine.offer)


@pytest.fixture
async def process_world(shared_dir: Path, tasks_dir: Path) -> AsyncIterator[World]:
    def backend() -> ProcessBackend:
        made = ProcessBackend(
            socket_dir=shared_dir,
            sandbox_dir=shared_dir / "sandboxes",
            custom_tasks_dir=tasks_dir,
            stop_grace_s=1.0,
        )
        backends.append(made)
        return made

    async def killing(id: WorkerId, address: str) -> Callable[[], Awaitable[None]]:
        pid = int(await run_inside(address, "import os; print(os.getpid())"))

        async def kill() -> None:
            os.kill(pid, signal.SIGKILL)

        return kill

    backends: list[ProcessBackend] = []
    world = World(
        backend=backend(),
        environment=fake_environment("no-image"),
        shared_dir=shared_dir,
        tasks_dir=tasks_dir,
        killing=killing,
        engine_leftovers=lambda: processes_with(f"ENVSERVER_SOCKET={shared_dir}/"),
        another=backend,
    )
    yield world
    for made in backends:
        await made.aclose()


@pytest.fixture(
    params=[
        "process",
        pytest.param("docker", marks=[pytest.mark.docker]),
        pytest.param("gate", marks=[pytest.mark.docker]),
        pytest.param("swarm", marks=[pytest.mark.docker]),
    ]
)
def world(request: pytest.FixtureRequest) -> World:
    """Each backend in turn; the Docker one also through the engine gate, and on a node of a cluster."""
    found: World = request.getfixturevalue(f"{request.param}_world")
    return found

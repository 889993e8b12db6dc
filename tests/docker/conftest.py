"""The engine gate in front of the real engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import docker
import httpx
import pytest

from gateway.core.environment import Environment
from gateway.node.gate import Gate
from gateway.node.policy import Rules
from gateway.node.serve import serving_gate
from tests.contract.backend_world import ENGINE_URL, fake_environment, remove_labelled
from tests.deadlines import HANG_S


@pytest.fixture
def environment(worker_image: str) -> Environment:
    return fake_environment(worker_image)


@pytest.fixture
def rules(environment: Environment, instance: str, shared_dir: Path) -> Rules:
    return Rules.of([environment], instance=instance, socket_root=str(shared_dir / "sockets"), max_containers=3)


@pytest.fixture
async def gate_socket(
    docker_engine: docker.APIClient, rules: Rules, shared_dir: Path, instance: str
) -> AsyncIterator[Path]:
    """The socket of a gate that creates the workers' folders itself."""
    (shared_dir / "sockets").mkdir(mode=0o711)  # before any container runs
    gate = Gate(engine=ENGINE_URL, rules=rules, socket_view=shared_dir / "sockets")
    await gate.check()
    async with serving_gate(gate, shared_dir / "gate.sock"):
        yield shared_dir / "gate.sock"
    remove_labelled(docker_engine, instance)


@pytest.fixture
async def gate(gate_socket: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the gate."""
    transport = httpx.AsyncHTTPTransport(uds=str(gate_socket), verify=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://gate", timeout=HANG_S, trust_env=False
    ) as client:
        yield client

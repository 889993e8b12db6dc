"""The engine gate in front of a fake engine: it forwards at most one start of a container."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from gateway.backends.docker.container import LABEL_ENVIRONMENT, LABEL_INSTANCE, LABEL_WORKER
from gateway.node.gate import Gate
from gateway.node.policy import Rules
from tests.fakes.engine import FakeContainer, FakeEngine

ID = "c" * 64
RULES = Rules.of([], instance="ours", socket_root="/nowhere")


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with tempfile.TemporaryDirectory(prefix="eg-") as folder, FakeEngine(Path(folder) / "engine.sock") as running:
        labels = {LABEL_INSTANCE: "ours", LABEL_WORKER: "w1", LABEL_ENVIRONMENT: "fake"}
        running.containers[ID] = FakeContainer(ID, "ours-fake-w1", {"Labels": labels, "Image": "env-gateway/fake"})
        yield running


@pytest.fixture
async def gate(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    made = Gate(engine=engine.url, rules=RULES)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(made), base_url="http://gate") as client:
        yield client
    await made.aclose()


async def start(gate: httpx.AsyncClient) -> int:
    return (await gate.post(f"/v1.41/containers/{ID}/start")).status_code


async def test_a_container_that_ran_is_not_started_again(gate: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert await start(gate) == 204
    engine.die(engine.containers[ID])

    response = await gate.post(f"/containers/{ID}/start")

    assert response.status_code == 409
    assert response.json()["message"] == f"container {ID} was started before: create a new one"
    assert (engine.count("POST start"), engine.containers[ID].state) == (1, "exited")


async def test_a_gate_that_restarted_does_not_start_a_container_again(
    gate: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.containers[ID].state = "exited"

    assert await start(gate) == 409
    assert engine.count("POST start") == 0


async def test_of_concurrent_starts_one_reaches_the_engine(gate: httpx.AsyncClient, engine: FakeEngine) -> None:
    held = engine.hold("POST start")
    starts = [asyncio.create_task(start(gate)) for _ in range(5)]
    refused = 0
    for done in asyncio.as_completed(starts):
        refused += await done == 409
        if refused == 4:
            held.released.set()

    assert sorted(task.result() for task in starts) == [204, 409, 409, 409, 409]
    assert engine.count("POST start") == 1


async def test_a_start_that_the_engine_refused_or_did_not_answer_is_not_repeated(
    gate: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.lose("POST start")

    assert await start(gate) == 503
    assert await start(gate) == 409
    assert engine.count("POST start") == 1

"""The Docker backend on a real engine that hangs, is killed and starts again. The suite starts this engine itself."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import docker
import pytest

from gateway.backends.docker.backend import DockerBackend, EnginePace
from gateway.backends.docker.mounts import HostPaths
from gateway.core.errors import BackendError, StartFailed
from gateway.core.ids import WorkerId
from gateway.core.session import CloseReason
from tests.contract.backend_engine import OwnEngine, own_engine
from tests.contract.backend_world import (
    World,
    docker_world_at,
    eventually,
    fake_environment,
    healthy,
    labelled,
    worker_of,
)
from tests.deadlines import HANG_S

pytestmark = [pytest.mark.docker]
pytest_plugins = ["tests.contract.backend_fixtures"]

THREADS = 4
SILENCE_S = 2.0


@pytest.fixture(scope="module")
def fresh_engine(docker_engine: docker.APIClient, worker_image: str) -> Iterator[OwnEngine]:
    with own_engine() as engine:
        engine.load(docker_engine, worker_image)
        yield engine


@pytest.fixture
def engine(fresh_engine: OwnEngine) -> Iterator[OwnEngine]:
    """The running engine. It runs again after each test."""
    yield fresh_engine
    fresh_engine.revive()


@pytest.fixture
async def world(
    engine: OwnEngine, worker_image: str, shared_dir: Path, tasks_dir: Path, instance: str
) -> AsyncIterator[World]:
    with engine.client() as client:
        async with docker_world_at(engine.url, client, worker_image, shared_dir, tasks_dir, instance) as world:
            yield world
            await asyncio.to_thread(engine.revive)


@pytest.fixture
async def impatient(
    engine: OwnEngine, worker_image: str, shared_dir: Path, instance: str
) -> AsyncIterator[DockerBackend]:
    """A backend of the world's instance that tolerates only a short silence of the engine."""
    made = DockerBackend(
        url=engine.url,
        instance=instance,
        paths=HostPaths(socket_dir=shared_dir),
        pace=EnginePace(threads=THREADS, stop_grace_s=1.0, silence_s=SILENCE_S),
        environments=[fake_environment(worker_image)],
    )
    yield made
    await made.aclose()


async def started(world: World) -> tuple[WorkerId, str]:
    worker = worker_of(world.environment)
    address = await world.backend.start(worker, world.environment)
    await healthy(address)
    return worker.id, address


def engine_threads() -> int:
    return sum(thread.name == "engine" for thread in threading.enumerate())


async def test_while_the_engine_hangs_workers_go_on_and_calls_fail_in_time_without_more_threads(
    world: World, engine: OwnEngine, impatient: DockerBackend
) -> None:
    _, address = await started(world)
    before = engine_threads()

    engine.hang()
    calls = [impatient.found() for _ in range(5 * THREADS)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    threads = engine_threads() - before

    assert [str(outcome) for outcome in outcomes if not isinstance(outcome, BackendError)] == []
    assert threads <= THREADS
    assert await healthy(address) == {"status": "ok"}
    engine.go_on()
    assert [entry.running for entry in await impatient.found()] == [True]


async def test_a_start_under_way_when_the_engine_hangs_leaves_nothing_once_the_engine_resumes(
    world: World, engine: OwnEngine, impatient: DockerBackend, instance: str
) -> None:
    await impatient.found()
    engine.hang()

    with pytest.raises(BackendError, match="does not answer") as refusal:
        await impatient.start(worker_of(world.environment), world.environment)
    assert not isinstance(refusal.value, StartFailed)  # which would count against the image
    engine.go_on()

    with engine.client() as client:

        async def gone() -> bool:
            return world.leftovers() == [] and await asyncio.to_thread(labelled, client, instance) == []

        await eventually(gone)
    assert await impatient.found() == []


async def test_a_death_while_the_engine_hangs_is_reported_when_the_engine_resumes(
    world: World, engine: OwnEngine
) -> None:
    deaths = world.backend.deaths()
    (id, _), (other, _) = await started(world), await started(world)
    with engine.client() as client:
        (entry,) = client.containers(filters={"label": f"env-gateway.worker={id}"})
        pid = client.inspect_container(entry["Id"])["State"]["Pid"]
    engine.hang()
    os.kill(pid, signal.SIGKILL)

    async def silent() -> bool:
        return not Path(f"/proc/{pid}").exists()  # noqa: ASYNC240  # no file of a disk

    await eventually(silent)
    engine.go_on()

    async with asyncio.timeout(HANG_S):
        death = await anext(deaths)
    assert (death.id, death.reason) == (id, CloseReason.WORKER_LOST)

    async def found() -> bool:
        return {entry.id: entry.running for entry in await world.backend.found()} == {id: False, other: True}

    await eventually(found)


async def test_after_an_engine_was_killed_and_started_again_found_is_right_and_deaths_are_reported(
    world: World, engine: OwnEngine
) -> None:
    deaths = world.backend.deaths()
    (one, _), (other, _) = await started(world), await started(world)

    await asyncio.to_thread(engine.kill)
    with pytest.raises(BackendError, match="does not answer"):
        await world.backend.found()
    await asyncio.to_thread(engine.start)

    async with asyncio.timeout(HANG_S):
        told = {(await anext(deaths)).id, (await anext(deaths)).id}
    assert told == {one, other}
    assert {entry.id: entry.running for entry in await world.backend.found()} == {one: False, other: False}
    for id in (one, other):
        await world.backend.stop(id)
    assert world.leftovers() == []
    third, address = await started(world)
    assert [(entry.id, entry.running) for entry in await world.backend.found()] == [(third, True)]
    assert await healthy(address) == {"status": "ok"}

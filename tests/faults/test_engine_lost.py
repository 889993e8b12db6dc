"""The engine hangs, and is killed and started again, under load. The test starts this engine, not the machine."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import docker
import httpx
import pytest

from tests.contract.backend_engine import OwnEngine, own_engine
from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually, until
from tests.faults.invariants import at_rest
from tests.faults.players import counted, delete_all, opened, step, workers_of
from tests.faults.steady import TASKS, crowd, no_slot_is_leased_twice
from tests.faults.world import ENGINE, IMAGE, SCALE, World, environment_toml, running
from tests.wire.gateways import OPERATOR_KEY
from tests.wire.raw import RawEpisode, create, new_sid

HANGS_S = min(60.0, 8.0 * SCALE)
SLOTS = 4
WORKERS = 2
LAG_MAX_S = 5.0
"""Seconds, a bucket of the histogram. It is below `HANGS_S`, because the event loop must never wait for a hanging
engine. A loaded machine adds less.
"""
UNRULY = environment_toml(
    "unruly",
    pool={"slots": SLOTS, "min_workers": WORKERS, "max_workers": WORKERS + 1, "idle_worker_s": 300},
    timeouts={"open_s": 4},
    tasks={"directory": str(TASKS)},
    areal={"max_turns": 100_000},
)
DOOMED = environment_toml("doomed", pool={"slots": 1, "min_workers": 1, "max_workers": 1})
Created = tuple[str, httpx.Response]
"""The session's name, and the answer to its create."""


@pytest.fixture(scope="module")
def own() -> Iterator[OwnEngine]:
    with own_engine() as engine:
        with closing(docker.APIClient(base_url=ENGINE, version="auto")) as source:
            engine.load(source, IMAGE)
        yield engine


@pytest.fixture
def world(own: OwnEngine) -> Iterator[World]:
    with running(UNRULY, DOOMED, replicas=2, engine=own.url) as world:
        try:
            yield world
        finally:
            own.revive()


async def test_while_the_engine_hangs_sessions_go_on_and_creates_end_and_afterwards_the_pool_is_full_again(
    world: World, own: OwnEngine, measured: Callable[[str, float, str], None]
) -> None:
    await eventually(lambda: _full(world))
    async with crowd(world) as everybody, world.http(0) as http:
        for replica in (0, 1):
            await everybody.ors(replica)
            await everybody.areal(replica)
            await everybody.openenv(replica)
        doomed = await opened(http, "doomed")
        (worker,) = workers_of(await world.sessions(), [doomed])
        pid = int((await asyncio.to_thread(world.container, worker)).attrs["State"]["Pid"])
        await everybody.goes_on()

        own.hang()
        hangs_until = time.monotonic() + HANGS_S
        creates = [asyncio.create_task(_create(http)) for _ in range(SLOTS * (WORKERS + 1))]
        # The test kills it directly, and the hanging engine cannot report it. The call fails, without a reward.
        broken = asyncio.create_task(step(doomed, "wait", {"gate": "never"}))
        await until(lambda: world.waiting_steps("never") == 1)
        os.kill(pid, signal.SIGKILL)
        slowest_s = 0.0
        while time.monotonic() < hangs_until:
            await everybody.goes_on()
            slowest_s = max(slowest_s, await _asked(world))
        assert not os.path.exists(f"/proc/{pid}")  # noqa: ASYNC240  # no file of a disk
        error = (await broken).error
        assert "worker" in error, error
        answers = await asyncio.gather(*creates)
        own.go_on()

        taken = [sid for sid, answer in answers if answer.status_code == 200]
        told = [answer for _, answer in answers if answer.status_code != 200]
        measured("the slowest look at /readyz and /metrics of both replicas", slowest_s, "s")
        measured("the longest step", everybody.longest_s, "s")
        assert len(taken) == SLOTS * WORKERS - len(everybody.members)
        assert {answer.status_code for answer in told} <= {429, 503}, [answer.text for answer in told]
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in told)

        fresh = await eventually(lambda: _opened(http, "unruly"))
        assert await counted(fresh) == 1
        await eventually(lambda: _is_gone(world, worker))
        assert "worker_lost" in (await step(doomed, "count")).error
        await eventually(lambda: _full(world))
        assert await counted(await opened(http, "doomed")) == 1
        await everybody.goes_on()
        await eventually(lambda: no_slot_is_leased_twice(world))
        serving = {str(session["worker"]) for session in await world.sessions()}
        died = {event.worker for event in world.events.of("die")}
        await delete_all([fresh, *(RawEpisode(http, sid, "unruly") for sid in taken)])
        await everybody.leave()

    await _the_loop_never_stalled(world, measured)
    assert worker in died
    assert not died & serving  # the other containers are starts that the gateway cancelled
    await at_rest(world)


async def test_after_the_engine_was_killed_and_started_again_its_sessions_are_lost_and_the_pool_is_full_again(
    world: World, own: OwnEngine, measured: Callable[[str, float, str], None]
) -> None:
    await eventually(lambda: _full(world))
    before = {str(worker["id"]) for worker in await world.workers()}
    async with crowd(world) as everybody, world.http(1) as http:
        await everybody.ors(0)
        await everybody.areal(1)
        await everybody.openenv(0)
        lost = [await opened(http, "unruly") for _ in range(SLOTS)]
        begun = await http.post("/areal/unruly/api/episode/start", json={"sample_id": 0, "config": {}})
        episode_id = begun.json()["episode_id"]
        doomed = await opened(http, "doomed")
        (worker,) = workers_of(await world.sessions(), [doomed])
        pid = int((await asyncio.to_thread(world.container, worker)).attrs["State"]["Pid"])
        await everybody.goes_on()

        await asyncio.to_thread(own.kill)
        os.kill(pid, signal.SIGKILL)  # the next engine finds it dead
        await everybody.goes_on(10)  # the other workers live until the next engine finds them
        assert await _asked(world) < 30
        await everybody.stand_still()
        in_flight = [asyncio.create_task(step(episode, "wait", {"gate": "never"})) for episode in lost]
        turn = asyncio.create_task(_areal_step(http, episode_id, "wait", gate="never"))
        await until(lambda: world.waiting_steps("never") == len(lost) + 1)
        waiting = asyncio.create_task(_create(http))
        await asyncio.to_thread(own.start)
        began_at = time.monotonic()

        # The new engine stops them with a short grace period: some have the time to report it.
        errors = [(await taken).error for taken in in_flight]
        assert all("worker_lost" in error or "shutting down" in error for error in errors), errors
        answered = await turn
        assert answered.status_code >= 400, answered.text
        assert "reward" not in answered.text
        # A 503 reports the loss where the new engine has not yet reported the death.
        afterwards = [(await step(episode, "count")).body for episode in lost]
        assert all("worker_lost" in body for body in afterwards), afterwards
        await eventually(lambda: _full(world, others_than=before))
        assert "worker_lost" in (await step(doomed, "count")).error
        measured("the pool is full again after the engine's return", time.monotonic() - began_at, "s")
        sid, answer = await waiting
        fresh = await eventually(lambda: _opened(http, "unruly"))
        assert await counted(fresh) == 1
        # The pending create got a worker that died, and reports it, or a worker that lives, and succeeds.
        assert answer.status_code in (200, 429, 503), answer.text
        await delete_all([fresh, RawEpisode(http, sid, "unruly")])

    await _the_loop_never_stalled(world, measured)
    await at_rest(world)


async def _create(http: httpx.AsyncClient) -> Created:
    sid = new_sid()
    return sid, await create(http, sid, env_name="unruly", task_spec={})


async def _areal_step(http: httpx.AsyncClient, episode_id: str, tool: str, **arguments: str) -> httpx.Response:
    action = {"type": "structured", "content": {"name": tool, "arguments": arguments}}
    return await http.post("/areal/unruly/api/episode/step", json={"episode_id": episode_id, "action": action})


async def _opened(http: httpx.AsyncClient, environment: str) -> RawEpisode:
    return await opened(http, environment)


async def _asked(world: World) -> float:
    """Query health and metrics of each replica. Return the seconds that this took."""
    began_at = time.monotonic()
    await _told(world)
    return time.monotonic() - began_at


async def _told(world: World) -> dict[str, str]:
    told = {}
    headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
    async with httpx.AsyncClient(timeout=HANG_S, verify=False, trust_env=False, headers=headers) as http:
        for gateway in world.gateways:
            for path in ("/readyz", "/metrics"):
                answer = await http.get(gateway.url + path)
                assert answer.status_code == 200, answer.text
                told[gateway.url + path] = answer.text
    return told


async def _full(world: World, *, others_than: frozenset[str] | set[str] = frozenset()) -> None:
    """Assert that the wanted number of workers exists, that all are ready, and that none is in *others_than*."""
    workers = await world.workers()
    assert {worker["state"] for worker in workers} == {"ready"}, workers
    assert len([worker for worker in workers if worker["environment"] == "unruly"]) >= WORKERS
    assert len([worker for worker in workers if worker["environment"] == "doomed"]) == 1
    assert not others_than & {str(worker["id"]) for worker in workers}


async def _is_gone(world: World, id: str) -> None:
    assert id not in {worker["id"] for worker in await world.workers()}


async def _the_loop_never_stalled(world: World, measured: Callable[[str, float, str], None]) -> None:
    longest_s = [longest_lag_s(text) for text in await _metrics(world)]
    measured("the event loops' longest lag is below", max(longest_s), "s")
    assert max(longest_s) <= LAG_MAX_S


def longest_lag_s(metrics: str) -> float:
    """Return the bound of the first bucket that contains all samples."""
    found = re.findall(r'^gateway_event_loop_lag_seconds_bucket\{le="(.+)"\} (\S+)$', metrics, re.MULTILINE)
    buckets = [(float(bound), float(count)) for bound, count in found]
    assert buckets[-1][1] > 0, "nothing was measured"
    return next(bound for bound, count in buckets if count == buckets[-1][1])


async def _metrics(world: World) -> list[str]:
    """Return the metrics of each replica."""
    return [text for path, text in (await _told(world)).items() if path.endswith("/metrics")]

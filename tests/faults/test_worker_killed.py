"""A worker is killed with a hundred steps in flight, or frozen: each step gets a typed error, other workers go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from tests.fakes.eventually import eventually, until
from tests.faults.invariants import at_rest
from tests.faults.players import counted, delete_all, open_many, opened, step, workers_of
from tests.faults.world import SCALE, World, environment_toml, running

GATE = "gate"
SLOTS = max(1, round(100 * SCALE))
RIDDLES = environment_toml(
    "riddles",
    image="env-gateway-test/ors-sdk",
    head={"upstream_name": "riddles"},
    server={"port": 8080},
    pool={"slots": 4, "min_workers": 2, "max_workers": 2},
    limits={"memory_mib": 512},
    timeouts={"setup_s": 120},
)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with running(environment_toml("unruly", pool={"slots": SLOTS, "min_workers": 2, "max_workers": 2})) as world:
        yield world


async def test_each_step_in_flight_of_a_killed_worker_gets_a_typed_error_and_the_other_worker_goes_on(
    world: World, measured: Callable[[str, float, str], None]
) -> None:
    await eventually(lambda: ready_workers(world, 2))
    async with world.http() as http:
        episodes = await open_many(http, "unruly", 2 * SLOTS)
        workers = workers_of(await world.sessions(), episodes)
        doomed = workers[0]
        steps = [asyncio.create_task(step(episode, "wait", {"gate": GATE})) for episode in episodes]
        await until(lambda: world.waiting_steps(GATE) == len(episodes))
        world.container(doomed).kill()

        theirs = [taken for taken, worker in zip(steps, workers, strict=True) if worker == doomed]
        others = [taken for taken, worker in zip(steps, workers, strict=True) if worker != doomed]
        errors = await asyncio.gather(*theirs)
        untouched = [taken.done() for taken in others]
        world.open_gate(GATE)
        counts = [int((await taken).outcome.text) for taken in others]
        # A loaded engine may report the death after the call stopped waiting for it: both are typed errors.
        await eventually(lambda: replaced(world, doomed))
        later = await episodes[0].get("prompt")
        await eventually(lambda: ready_workers(world, 2))
        fresh = await opened(http, "unruly")
        first_count = await counted(fresh)
        await delete_all([fresh, *episodes])

    died_at = world.events.of("die", worker=doomed)[0].at
    measured("last typed error after the engine's die event", max(each.at for each in errors) - died_at, "s")
    ready_at = [event.at for event in world.events.of("start") if event.at > died_at]
    measured("its successor's start after the die event", ready_at[0] - died_at, "s")
    assert len(theirs) == len(others) == SLOTS
    assert all("worker_lost" in each.error for each in errors), errors[0]
    assert not any(untouched)
    starts = [1000 * n for n, worker in enumerate(workers) if worker != doomed]
    assert counts == [start + 1 for start in starts]
    assert (later.status_code, "worker_lost" in later.text) == (410, True)
    assert first_count == 1
    await world.counts(1, "gateway_workers_lost_total", environment="unruly")
    await world.counts(SLOTS, "gateway_sessions_closed_total", reason="worker_lost")
    await world.counts(SLOTS, "gateway_calls_total", outcome="worker_lost")
    assert f"worker_lost environment=unruly worker={doomed}" in world.log
    assert doomed not in [each["id"] for each in await world.workers()]
    await at_rest(world)


async def test_new_sessions_go_elsewhere_while_a_worker_is_frozen(world: World) -> None:
    await eventually(lambda: ready_workers(world, 2))
    async with world.http() as http:
        first = await opened(http, "unruly")
        (frozen,) = workers_of(await world.sessions(), [first])
        container = world.container(frozen)
        container.pause()
        try:
            episodes = await open_many(http, "unruly", 6)  # for some of them the frozen worker is the less used one
            elsewhere = workers_of(await world.sessions(), episodes)
            counts = [await counted(episode) for episode in episodes]
        finally:
            container.unpause()

        assert frozen not in elsewhere
        assert counts == [1000 * number + 1 for number in range(6)]
        assert f"worker_suspect environment=unruly worker={frozen}" in world.log
        await eventually(lambda: ready_workers(world, 2))
        assert await counted(first) == 1
        await delete_all([first, *episodes])
    await at_rest(world)


@pytest.mark.needs("third-party-images")
async def test_new_sessions_go_elsewhere_while_a_third_party_worker_is_frozen_and_its_opening_goes_on() -> None:
    with running(RIDDLES) as world:
        await eventually(lambda: ready_workers(world, 2))
        async with world.http() as http:
            first, second = await opened(http, "riddles"), await opened(http, "riddles")
            frozen, other = workers_of(await world.sessions(), [first, second])
            container = world.container(frozen, role="server")
            container.pause()
            try:
                caught = asyncio.create_task(
                    opened(http, "riddles")
                )  # of two equally used workers the older one is next
                await until(lambda: f"worker_suspect environment=riddles worker={frozen}" in world.log)
                episodes = [await opened(http, "riddles") for _ in range(3)]
                elsewhere = workers_of(await world.sessions(), episodes)
                was_caught = not caught.done()
            finally:
                container.unpause()

            assert was_caught
            assert elsewhere == [other] * 3
            later = await caught
            assert workers_of(await world.sessions(), [later]) == [frozen]
            await eventually(lambda: ready_workers(world, 2))
            await delete_all([first, second, later, *episodes])


async def ready_workers(world: World, number: int) -> None:
    """Assert, for `eventually`, that there are *number* workers and all are ready."""
    states = [worker["state"] for worker in await world.workers()]
    assert states == ["ready"] * number, states


async def replaced(world: World, lost: str) -> None:
    """Assert, for `eventually`, that the gateway does not list the worker *lost*."""
    assert lost not in [worker["id"] for worker in await world.workers()]

"""Redis is killed and comes back with its data, with older data or without data. Or it does not answer for a while.

Two replicas serve sessions of each protocol, which step continuously. No step fails or runs twice, no session is lost,
and no slot is leased twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.faults.invariants import at_rest, nothing_left
from tests.faults.mortal_redis import MortalRedis, is_whole, mortal
from tests.faults.players import counted, delete_all, open_many, opened, step
from tests.faults.steady import (
    Crowd,
    brief_toml,
    crowd,
    gone_at,
    no_slot_is_leased_twice,
    of_every_protocol,
    patient_create,
    steady_toml,
)
from tests.faults.world import SCALE, World, environment_toml, running
from tests.wire.raw import RawEpisode, create, new_sid

SLOTS = 10
WORKERS = 2
IDLE_S = 8
SILENT_S = min(30.0, 6.0 * SCALE)
UNRULY = steady_toml(slots=SLOTS, min_workers=WORKERS, max_workers=WORKERS)
BRIEF = brief_toml(IDLE_S)
TIGHT = environment_toml("tight", pool={"slots": 2, "min_workers": 1, "max_workers": 1}, timeouts={"open_s": HANG_S})
LATER = environment_toml("later", pool={"slots": 1, "min_workers": 0, "max_workers": 1, "idle_worker_s": 1})


@pytest.fixture(scope="module")
def of_module() -> Iterator[World]:
    """A world whose Redis is killed in each test, and comes back with its last saved data."""
    with running(UNRULY, BRIEF, TIGHT, replicas=2, redis=MortalRedis) as world:
        yield world


@pytest.fixture
def world(of_module: World) -> World:
    """The world, without the engine's events of earlier tests: one of them lets a worker die."""
    of_module.events.forget()
    return of_module


@pytest.mark.parametrize("comes_back", ["with older data", "without data"])
async def test_sessions_go_on_when_redis_is_killed_and_loses_data(
    world: World, comes_back: str, measured: Callable[[str, float, str], None]
) -> None:
    mortal(world).forget()
    await _is_killed(world, is_older=comes_back == "with older data", measured=measured)


async def test_sessions_go_on_when_redis_is_killed_and_keeps_its_data(
    measured: Callable[[str, float, str], None],
) -> None:
    with running(UNRULY, BRIEF, replicas=2, redis=partial(MortalRedis, keeps_all=True)) as world:
        await _is_killed(world, is_older=False, measured=measured)


async def _is_killed(world: World, *, is_older: bool, measured: Callable[[str, float, str], None]) -> None:
    async with crowd(world) as everybody, world.http(1) as http:
        await of_every_protocol(everybody)
        if is_older:
            await _older(everybody)
        idle = await opened(http, "brief")
        idle_at = time.monotonic()
        await everybody.goes_on()
        rebuilt_before = world.log.count("store_rebuilt")

        mortal(world).kill()
        await everybody.goes_on(10)
        wish = asyncio.create_task(patient_create(http))
        await asyncio.to_thread(mortal(world).start)
        began_at = time.monotonic()
        await is_whole(world, rebuilt_before)
        whole_at = time.monotonic()
        gone = asyncio.create_task(gone_at(world, idle.sid))
        measured("whole again after Redis' return", whole_at - began_at, "s")

        await everybody.goes_on()
        everybody.move()
        await everybody.goes_on()
        await delete_all([await wish])
        await eventually(lambda: no_slot_is_leased_twice(world))
        await _full_and_not_fuller(world, everybody)
        expired_at = await gone
        measured(f"an idle session (idle time {IDLE_S} s) ended after", expired_at - idle_at, "s")
        measured("the longest step", everybody.longest_s, "s")
        late = await step(idle, "count")
        await everybody.goes_on()
        await everybody.leave()

    assert expired_at >= idle_at + IDLE_S
    assert (late.status, "expired" in late.body) == (410, True)
    await _nobody_died(world)


async def _nobody_died(world: World) -> None:
    assert world.events.of("die") == []
    await eventually(lambda: no_slot_is_leased_twice(world))
    await at_rest(world)


async def test_sessions_go_on_while_redis_does_not_answer(
    world: World, measured: Callable[[str, float, str], None]
) -> None:
    """Redis accepts connections meanwhile, like a server whose machine hangs."""
    async with crowd(world) as everybody, world.http(1) as http:
        await of_every_protocol(everybody)
        idle = await opened(http, "brief")
        idle_at = time.monotonic()
        rebuilt_before = world.log.count("store_rebuilt")
        mortal(world).pause()
        paused_at = time.monotonic()
        wish = asyncio.create_task(patient_create(http))
        silent = [await _readiness(world, replica) for replica in (0, 1)]
        while time.monotonic() < paused_at + SILENT_S:
            await everybody.goes_on(1)
        mortal(world).go_on()
        gone = asyncio.create_task(gone_at(world, idle.sid))

        assert await counted(await wish) == 1
        ready = [await _readiness(world, replica) for replica in (0, 1)]
        everybody.move()
        await everybody.goes_on()
        await eventually(lambda: no_slot_is_leased_twice(world))
        expired_at = await gone
        measured(f"an idle session (idle time {IDLE_S} s) ended after", expired_at - idle_at, "s")
        measured("the longest step", everybody.longest_s, "s")
        await delete_all([await wish])
        await everybody.leave()

    # Steps go on, so a load balancer must keep the replicas.
    assert (silent, ready) == ([(200, "degraded")] * 2, [(200, "ok")] * 2)
    assert expired_at >= idle_at + IDLE_S
    assert world.log.count("store_rebuilt") == rebuilt_before
    assert world.events.of("die") == []
    await at_rest(world)


async def _readiness(world: World, replica: int) -> tuple[int, str]:
    async with world.http(replica) as http:
        answer = await http.get("/readyz")
    return answer.status_code, answer.json()["status"]


@pytest.mark.parametrize("worker", ["answers", "hangs meanwhile"])
async def test_a_slot_that_is_free_in_older_data_is_not_leased_again(world: World, worker: str) -> None:
    async with world.http(0) as http, world.http(1) as other:
        first = await opened(http, "tight")
        mortal(world).save()
        second = await opened(other, "tight", start=1000)
        assert [await counted(first), await counted(second)] == [1, 1001]
        rebuilt_before = world.log.count("store_rebuilt")
        (serving,) = {str(session["worker"]) for session in await world.sessions()}
        container = await asyncio.to_thread(world.container, serving)

        mortal(world).kill()
        if worker == "hangs meanwhile":
            await asyncio.to_thread(container.pause)  # it cannot report its sessions
        wishes = [asyncio.create_task(opened(client, "tight", start=2000)) for client in (http, other)]
        await asyncio.to_thread(mortal(world).start)
        await is_whole(world, rebuilt_before)
        if worker == "hangs meanwhile":
            await asyncio.to_thread(container.unpause)
        await eventually(lambda: _waits(world, len(wishes), "tight"))

        assert not any(wish.done() for wish in wishes)
        await eventually(lambda: no_slot_is_leased_twice(world))
        assert [await counted(first), await counted(second)] == [2, 1002]
        await delete_all([first, second])
        served = await asyncio.gather(*wishes)
        assert [await counted(one) for one in served] == [2001, 2001]
        await eventually(lambda: no_slot_is_leased_twice(world))
        await delete_all(served)
    await at_rest(world)


async def _older(everybody: Crowd) -> None:
    """Save data that contain sessions that end afterwards, and lack later sessions in the same slots."""
    mortal(everybody.world).save()
    await everybody.leave(*everybody.members[:4])
    await everybody.ors(0)
    await everybody.areal(1)


async def _full_and_not_fuller(world: World, everybody: Crowd) -> None:
    """Take every free slot, and check that one more create waits. Then release them."""
    free = SLOTS * WORKERS - len(everybody.members)
    async with world.http(0) as http:
        taken = await open_many(http, "unruly", free)
        more = asyncio.create_task(create(http, new_sid(), env_name="unruly", task_spec={}))
        await eventually(lambda: _waits(world, 1))
        await eventually(lambda: no_slot_is_leased_twice(world))
        await everybody.goes_on()
        assert not more.done()
        more.cancel()
        await asyncio.wait([more])
        await eventually(lambda: _waits(world, 0))
        await delete_all(taken)


async def _waits(world: World, number: int, environment: str = "unruly") -> None:
    assert await world.waiting(environment) == number


async def test_a_session_goes_on_whose_worker_was_starting_in_older_data() -> None:
    with running(LATER, replicas=2, redis=MortalRedis) as world:
        async with world.http(0) as http:
            session = await _opened_while_saving(world, http)
            assert await counted(session) == 1
            (serving,) = await world.workers()
            rebuilt_before = world.log.count("store_rebuilt")

            mortal(world).kill()
            await asyncio.to_thread(mortal(world).start)
            await is_whole(world, rebuilt_before)

            assert [(one["id"], one["state"]) for one in await world.workers()] == [(serving["id"], "ready")]
            assert await counted(session) == 2
            await delete_all([session])
        await nothing_left(world)


async def _opened_while_saving(world: World, http: httpx.AsyncClient) -> RawEpisode:
    """Open a session, and save the data while its worker starts. Repeat that if the worker was ready first."""
    for _ in range(5):
        opening = asyncio.create_task(opened(http, "later"))
        deadline = time.monotonic() + HANG_S
        while not await world.workers():
            assert time.monotonic() < deadline, "no worker starts"
            await asyncio.sleep(0)
        mortal(world).save()
        (worker,) = await world.workers()
        session = await opening
        if worker["state"] == "starting":
            return session
        await delete_all([session])
        await nothing_left(world)
    pytest.fail("each worker was ready before the data were saved")

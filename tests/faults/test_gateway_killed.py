"""The gateway gets SIGKILL with a hundred sessions live. The next gateway continues them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually, until
from tests.faults.invariants import at_rest, nothing_left
from tests.faults.players import counted, delete_all, open_many, opened, step
from tests.faults.world import World, environment_toml, running
from tests.wire.raw import RawEpisode

GATE = "gate"


async def test_sessions_go_on_after_a_kill_and_keys_return_the_outcomes_of_steps_in_flight(
    scaled: Callable[[int], int], measured: Callable[[str, float, str], None]
) -> None:
    number = scaled(100)
    pool = {"slots": number // 2, "max_workers": 2}
    with running(environment_toml("unruly", pool=pool)) as world:
        async with world.http() as http:
            episodes = await open_many(http, "unruly", number)
            before = {container.id for container in world.containers()}
            in_flight, at_leisure = episodes[: number // 4], episodes[number // 4 :]
            firsts = await asyncio.gather(*(counted(episode) for episode in at_leisure))
            cut_off = [
                asyncio.create_task(step(episode, "wait", {"gate": GATE}, key="the step")) for episode in in_flight
            ]
            await until(lambda: world.waiting_steps(GATE) == len(in_flight))
            world.gateway.kill()
            await asyncio.wait(cut_off)

            began_at = time.monotonic()
            world.gateway.restart()
            usable_at = await _answers(at_leisure[0], began_at)
            measured("from the restart's begin to the first step", usable_at, "s")
            # The client repeats each step while it still runs: the gateway must join it, not run it twice.
            again = [
                asyncio.create_task(step(episode, "wait", {"gate": GATE}, key="the step")) for episode in in_flight
            ]
            seconds = await asyncio.gather(*(counted(episode) for episode in at_leisure[1:]))
            world.open_gate(GATE)
            joined = [int((await taken).outcome.text) for taken in again]
            repeated = await asyncio.gather(
                *(step(episode, "wait", {"gate": GATE}, key="the step") for episode in in_flight)
            )
            following = await asyncio.gather(*(counted(episode) for episode in in_flight))

            assert all(isinstance(taken.exception(), httpx.TransportError) for taken in cut_off)
            assert firsts == [1000 * n + 1 for n in range(len(in_flight), number)]
            assert seconds == [first + 1 for first in firsts[1:]]
            assert joined == [1000 * n + 1 for n in range(len(in_flight))]
            assert [int(each.outcome.text) for each in repeated] == joined
            assert following == [count + 1 for count in joined]
            assert world.waiting_steps(GATE) == len(in_flight)
            assert {container.id for container in world.containers()} == before
            assert len(await world.sessions()) == number
            assert "worker_adopted" in world.log
            assert world.events.of("die") == []
            await at_rest(world)
            await delete_all(episodes)
        await nothing_left(world)


async def test_starts_that_a_killed_gateway_left_unfinished_leave_no_orphan(
    measured: Callable[[str, float, str], None],
) -> None:
    # Ten starts are under way: some containers are unknown to the store, some workers have no container. Openings for
    # them are still in the queue, and no client waits for their answers.
    pool = {"slots": 1, "max_workers": 10}
    timeouts = {"open_s": 10, "setup_s": 5, "idle_s": 5}
    with running(environment_toml("unruly", pool=pool, timeouts=timeouts)) as world:
        async with world.http() as http:
            waiting = [asyncio.create_task(opened(http, "unruly")) for _ in range(10)]
            await until(lambda: len(world.events.of("create")) >= 4)
            world.gateway.kill()
            await asyncio.wait(waiting)
            began_at = time.monotonic()
            world.gateway.restart()
            after = await opened(http, "unruly")
            measured("from the restart's begin to a new session", time.monotonic() - began_at, "s")
            assert await counted(after) == 1
            await delete_all([after])
        await nothing_left(world)


async def test_an_opening_of_a_killed_replica_is_released_long_before_its_setup_time() -> None:
    pool = {"slots": 1, "max_workers": 1, "idle_worker_s": 300}
    timeouts = {"open_s": 300, "setup_s": 300}
    with running(environment_toml("unruly", pool=pool, timeouts=timeouts), replicas=2) as world:
        async with world.http(0) as http, world.http(1) as doomed:
            await delete_all([await opened(http, "unruly")])
            (worker,) = await world.workers()
            container = await asyncio.to_thread(world.container, str(worker["id"]))
            await asyncio.to_thread(container.pause)  # so that the session stays in the state "opening"
            opening = asyncio.create_task(opened(doomed, "unruly"))
            await eventually(lambda: _is_opening(world))
            waiting = asyncio.create_task(opened(doomed, "unruly"))
            await eventually(lambda: _one_waits(world))
            world.gateways[1].kill()
            await asyncio.wait([opening, waiting])
            await asyncio.to_thread(container.unpause)

            async with asyncio.timeout(HANG_S):
                fresh = await opened(http, "unruly")
            assert await counted(fresh) == 1
            assert [session["name"] for session in await world.sessions()] == [fresh.sid]
            await delete_all([fresh])
        assert all(isinstance(cut_off.exception(), httpx.TransportError) for cut_off in (opening, waiting))
        await at_rest(world)


async def _is_opening(world: World) -> None:
    assert [session["state"] for session in await world.sessions()] == ["opening"]


async def _one_waits(world: World) -> None:
    assert await world.waiting("unruly") == 1


async def _answers(episode: RawEpisode, began_at: float) -> float:
    """Retry a step until the gateway serves it. Return the seconds since *began_at*."""

    async def answered() -> float:
        try:
            await counted(episode)
        except httpx.TransportError as error:
            raise AssertionError("nobody listens yet") from error
        return time.monotonic() - began_at

    return await eventually(answered)

"""A trainer that hangs up while its episode starts leaves nothing behind, at any call of the gateway."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest

from gateway.core.session import CloseReason, Session, SessionState
from tests.contract.store_worlds import RedisWorld
from tests.deadlines import HANG_S
from tests.fakes.eventually import until
from tests.service.openings_cases import CALLS_MAX, CASES, Case, as_ever, begun
from tests.service.openings_world import MATH, SUMS, Calls, Way, World
from tests.service.stack import OWNER

pytest_plugins = ["tests.contract.store_fixtures"]

TURNS: Final = 1000


async def is_stopped(request: asyncio.Task[Any], calls: Calls) -> bool:
    """Wait until a request reaches the call where it is to be stopped. Return False if it ends without that call."""
    stop = asyncio.ensure_future(calls.is_stopped.wait())
    await asyncio.wait({request, stop}, timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    return calls.is_stopped.is_set()


async def hang_up(request: asyncio.Task[Any], calls: Calls, *, times: int = 1) -> None:
    """Cancel a request at the call where it waits, then let that call continue."""
    for _ in range(times):
        if request.done():
            break
        request.cancel()
        await asyncio.sleep(0)
    calls.goes_on.set()
    await asyncio.wait({request}, timeout=HANG_S)
    assert request.done(), "it goes on though its trainer hung up"


@pytest.mark.parametrize("times", [1, TURNS], ids=["once", "again and again"])
@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_a_trainer_that_hangs_up_at_any_call_leaves_nothing_behind(case: Case, way: Way, times: int) -> None:
    stopped = set()
    for number in range(1, CALLS_MAX):
        calls = Calls(stop_at=number, way=way)
        world, request = await begun(case, calls)
        if not await is_stopped(request, calls):  # the request makes fewer calls
            break
        stopped.add(calls.names[-1])

        await hang_up(request, calls, times=times)

        assert request.cancelled()
        await world.holds_nothing()
    else:
        pytest.fail("it makes no end of calls")
    await as_ever(case, world, request)
    assert case.calls <= stopped


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("call", ["claim", "find"])
async def test_a_duplicate_create_that_hangs_up_does_not_affect_the_first_create(call: str, way: Way) -> None:
    calls = Calls(way=way)
    world, first, may_open = await opening(calls)
    calls.stop_on = call
    second = asyncio.ensure_future(world.open())
    assert await is_stopped(second, calls)

    await hang_up(second, calls)
    may_open.set()

    assert (await first).state is SessionState.OPEN
    await world.holds_one()


async def test_an_identical_create_opens_the_session_after_the_first_create_hung_up() -> None:
    calls = Calls()
    world, first, _ = await opening(calls)
    second = asyncio.ensure_future(world.open())
    await until(lambda: calls.names.count("find") >= 2)

    await hang_up(first, calls)

    assert (await second).state is SessionState.OPEN
    await world.holds_one()


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("call", ["begin_close", "close", "release"])
async def test_a_delete_completes_even_if_its_trainer_hangs_up(call: str, way: Way) -> None:
    calls = Calls(way=way)
    world = World(calls)
    await world.start()
    await world.open()
    calls.stop_on = call
    ending = asyncio.ensure_future(world.sessions.close(OWNER, "one"))
    assert await is_stopped(ending, calls)

    await hang_up(ending, calls)

    await world.holds_nothing()


async def test_a_slot_is_not_transferred_to_a_reset_that_hung_up_while_the_previous_episode_ended() -> None:
    """Otherwise another reset of the same name, which may have arrived by then, would find the slot taken."""
    calls = Calls(stop_on="close")
    world = World(calls)
    await world.start()
    await world.open()
    request = asyncio.ensure_future(world.reset())
    assert await is_stopped(request, calls)

    await hang_up(request, calls)

    await world.holds_nothing()
    assert "hand_over" not in calls.names


@pytest.mark.redis
@pytest.mark.parametrize("kind", ["open", "reset", "reset to another"])
async def test_a_trainer_that_hangs_up_at_any_moment_leaves_nothing_in_redis(
    redis_world: RedisWorld, kind: str
) -> None:
    world = World(Calls(), store=await redis_world.open())
    await world.start()
    moments = 0
    for turns in range(1, TURNS, 2):  # before its first turn the request has not started
        if kind != "open":
            await world.open()
        request = asyncio.ensure_future(world.open() if kind == "open" else world.reset(SUMS if "to" in kind else MATH))
        for _ in range(turns):
            await asyncio.sleep(0)

        request.cancel()
        await asyncio.wait({request}, timeout=HANG_S)

        if not request.cancelled():
            assert (await request).state is SessionState.OPEN
            break
        moments += 1
        await world.holds_nothing()
    assert moments > 1


async def test_a_hang_up_does_not_wait_for_a_store_that_is_away() -> None:
    calls = Calls()
    world, request, _ = await opening(calls)
    calls.is_away = True

    await hang_up(request, calls)

    assert await world.used() == 1
    calls.is_away = False
    await world.holds_nothing()


async def test_a_granted_claim_whose_answer_was_lost_is_released_when_its_trainer_hangs_up() -> None:
    calls = Calls(lose_at=1, way=Way.DONE, stop_on="find")
    world = World(calls)
    await world.start()
    request = asyncio.ensure_future(world.open())
    assert await is_stopped(request, calls)
    assert await world.used() == 1

    await hang_up(request, calls)

    await world.holds_nothing()


async def test_a_session_that_was_ended_during_its_opening_does_not_stay_in_its_worker() -> None:
    """The trainer deletes the session elsewhere and hangs up here, just after the worker has opened it."""
    calls = Calls(stop_at=2, way=Way.DONE)
    world = World(calls)
    await world.start()
    request = asyncio.ensure_future(world.open())
    assert await is_stopped(request, calls)
    (session,) = await world.store.sessions()
    await world.store.begin_close(session.id, CloseReason.DELETED)
    await world.store.release(session.id, session.lease)
    assert world.rooms.all() == [session.id]

    await hang_up(request, calls)

    await world.holds_nothing()


@pytest.mark.parametrize("way", Way)
async def test_a_client_that_hangs_up_during_a_query_leaves_nothing_behind(way: Way) -> None:
    for number in range(1, CALLS_MAX):
        calls = Calls(stop_at=number, way=way)
        world = World(calls)
        await world.start(idle=False)
        asking = asyncio.ensure_future(world.queries.tools(world.catalog.named("math")))
        if not await is_stopped(asking, calls):
            break

        await hang_up(asking, calls)

        await world.holds_nothing()
    else:
        pytest.fail("it makes no end of calls")
    assert await asking == b"[]"
    assert {"claim", "worker", "tools", "begin_close", "close", "release"} <= set(calls.names)


async def opening(calls: Calls) -> tuple[World, asyncio.Task[Session], asyncio.Event]:
    """Start the opening of a session that its worker completes only once the returned event is set."""
    world, may_open = World(calls), asyncio.Event()
    await world.start()

    async def wait(_: Session) -> None:
        await may_open.wait()

    world.rooms.before_open = wait
    request = asyncio.ensure_future(world.open())
    await until(lambda: world.rooms.before_open is None)
    return world, request, may_open

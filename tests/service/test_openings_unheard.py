"""Lost answers of the store while an episode starts: the gateway finds the effects of the operations or undoes them."""

from __future__ import annotations

import asyncio

import pytest

from gateway.core.errors import SessionError, StoreUnavailable
from gateway.core.session import CloseReason, SessionState
from tests.service.openings_cases import CALLS_MAX, CASES, Case, as_ever, begun
from tests.service.openings_world import STORE_CALLS, Calls, Way, World
from tests.service.stack import OWNER


@pytest.mark.parametrize("way", [Way.NEVER, Way.DONE])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_one_lost_answer_of_the_store_does_not_change_the_outcome(case: Case, way: Way) -> None:
    names = await _calls(case)

    # Concurrently, because each case waits a moment before its retry.
    await asyncio.gather(*(_lose(case, way, n) for n, name in enumerate(names, start=1) if name in STORE_CALLS))


async def _calls(case: Case) -> list[str]:
    calls = Calls()
    world, request = await begun(case, calls)
    await as_ever(case, world, request)
    assert len(calls.names) < CALLS_MAX
    return calls.names


async def _lose(case: Case, way: Way, number: int) -> None:
    world, request = await begun(case, Calls(lose_at=number, way=way))

    await as_ever(case, world, request)


@pytest.mark.parametrize("way", [Way.NEVER, Way.DONE])
async def test_a_claim_that_failed_with_the_store_is_released_once_the_store_answers(way: Way) -> None:
    calls = Calls(lose_at=1, way=way)
    world = World(calls, patience_s=0.0)
    await world.start()

    with pytest.raises(StoreUnavailable):
        await world.open()

    await world.holds_nothing()


IS_RELEASED = pytest.mark.parametrize("is_released", [False, True], ids=["closing", "released"])


async def _ended_while_it_opens(reason: CloseReason, *, is_released: bool, has_episode: bool = False) -> World:
    """Return a world in which the store ends the session of the next opening just before it is noted as open."""
    calls = Calls()
    world = World(calls)
    await world.start()
    if has_episode:
        await world.open()

    async def ends() -> None:
        (session,) = await world.store.sessions()
        await world.store.begin_close(session.id, reason)
        if is_released:
            await world.store.release(session.id, session.lease)

    calls.before["opened"] = ends
    return world


@IS_RELEASED
@pytest.mark.parametrize("kind", ["open", "reset"])
async def test_an_opening_that_the_store_gave_up_begins_again(kind: str, is_released: bool) -> None:
    """The leader takes a replica that is silent for some seconds for gone, and ends what it opens."""
    world = await _ended_while_it_opens(CloseReason.OPEN_FAILED, is_released=is_released, has_episode=kind == "reset")

    opened = await (world.open() if kind == "open" else world.reset())

    assert opened.state is SessionState.OPEN
    assert len(world.rooms.all()) == 1
    await world.holds_one()


@IS_RELEASED
async def test_an_opening_whose_session_was_ended_on_purpose_does_not_begin_again(is_released: bool) -> None:
    world = await _ended_while_it_opens(CloseReason.OPERATOR, is_released=is_released)

    with pytest.raises(SessionError):
        await world.open()

    await world.holds_nothing()


@pytest.mark.parametrize("way", [Way.NEVER, Way.DONE])
@pytest.mark.parametrize("call", ["begin_close", "release"])
async def test_a_close_whose_answer_is_lost_is_carried_out_once(call: str, way: Way) -> None:
    calls = Calls(way=way)
    world = World(calls)
    await world.start()
    await world.open()
    calls.lose_on = call

    await world.sessions.close(OWNER, "one")

    await world.holds_nothing()
    assert calls.names.count("close") == 1


@pytest.mark.parametrize("way", [Way.NEVER, Way.DONE])
@pytest.mark.parametrize("call", ["begin_close", "release"])
async def test_the_slot_of_a_query_is_released_although_an_answer_is_lost(call: str, way: Way) -> None:
    calls = Calls(way=way)
    world = World(calls)
    await world.start(idle=False)
    calls.lose_on = call

    assert await world.queries.tools(world.catalog.named("math")) == b"[]"

    await world.holds_nothing()


async def test_a_delete_does_not_close_a_session_that_the_expiry_already_closes() -> None:
    calls = Calls(way=Way.NEVER)
    world = World(calls)
    await world.start()
    session = await world.open()

    async def expires() -> None:
        await world.store.begin_close(session.id, CloseReason.EXPIRED)

    async def expires_before_the_second_try() -> None:
        calls.before["begin_close"] = expires

    calls.before["begin_close"] = expires_before_the_second_try
    calls.lose_on = "begin_close"

    assert await world.sessions.close(OWNER, "one") is None

    assert calls.names.count("begin_close") == 2
    assert (await world.store.find(session.id)).state is SessionState.CLOSING
    assert world.rooms.all() == [session.id]

"""Sixteen sessions play on an image that holds one session, in a container each or in turn. None is refused or left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.fakes.eventually import eventually
from tests.wire.any.cases import CASES
from tests.wire.any.places import EMBEDDED, STACK, Place, on
from tests.wire.any.players import TRAINERS, Played, Trainer, at_gateway, play
from tests.wire.openenv.clients import DriverOf

pytestmark = [pytest.mark.wire]

CROWD = 16
COUNTER = CASES["openenv-counter"]
SPARE_SOCKETS = 8
"""Sockets that may open or close between two counts: a kept-alive connection, a scrape, a connection to the store."""


class Meeting:
    """A barrier that all members of a crowd reach before any of them goes on."""

    def __init__(self, size: int) -> None:
        self._barrier = asyncio.Barrier(size)

    async def all_here(self, *, within_s: float) -> None:
        async with asyncio.timeout(within_s):
            await self._barrier.wait()


def played_by(
    client: str, place: Place, environment: str, driver_of: DriverOf, *, meeting: Meeting | None = None
) -> Coroutine[Any, Any, Played]:
    """Win an episode of *environment* with *client*. With a *meeting*, play once all episodes are open.

    The client's own processes start in this call, before any client has a connection: their start blocks the event
    loop, and the gateway closes a connection without a request after a minute.
    """
    return _played(TRAINERS[client](driver_of), place, environment, meeting)


async def _played(trainer: Trainer, place: Place, environment: str, meeting: Meeting | None) -> Played:
    async with trainer.open(at_gateway(place.url, environment), False) as episode:
        if meeting is not None:
            await meeting.all_here(within_s=120)
        return await play(episode, COUNTER.right, turns=COUNTER.turns)


def crowd() -> list[str]:
    """Return the names of as many clients as a crowd has, each kind in turn."""
    return [list(TRAINERS)[n % len(TRAINERS)] for n in range(CROWD)]


@on(STACK)
async def test_sixteen_sessions_run_in_sixteen_containers(place: Place, driver_of: DriverOf) -> None:
    meeting = Meeting(CROWD)

    played = await asyncio.gather(
        *(played_by(client, place, "counter-crowd", driver_of, meeting=meeting) for client in crowd())
    )

    assert [(each.reward, each.done) for each in played] == [(1.0, True)] * CROWD
    assert len(await place.workers("counter-crowd")) == CROWD
    assert place.stack is not None
    running = [one for one in place.stack.containers.list() if "counter-crowd" in one.name]
    assert len(running) >= CROWD  # a worker may have more than one container, but none is shared


@on(EMBEDDED, STACK)
async def test_sixteen_sessions_wait_their_turn_on_four_workers(place: Place, driver_of: DriverOf) -> None:
    played = await asyncio.gather(*(played_by(client, place, "counter-few", driver_of) for client in crowd()))

    assert [(each.reward, each.done) for each in played] == [(1.0, True)] * CROWD
    assert len(await place.workers("counter-few")) <= 4


@on(EMBEDDED)
async def test_a_crowd_leaves_no_socket_behind(place: Place, driver_of: DriverOf) -> None:
    async def round_of_a_crowd() -> None:
        await asyncio.gather(*(played_by(client, place, "counter-few", driver_of) for client in crowd()))
        await place.nothing_is_left()

    async def no_more_than(before: int) -> None:
        assert place.open_sockets() <= before + SPARE_SOCKETS

    await round_of_a_crowd()
    before = place.open_sockets()
    for _ in range(3):
        await round_of_a_crowd()
    await eventually(lambda: no_more_than(before))


@on(EMBEDDED)
async def test_the_gateway_learns_the_capacity_of_an_image(place: Place, driver_of: DriverOf) -> None:
    meeting = Meeting(2)

    played = await asyncio.gather(
        *(played_by("openenv-0.10.0", place, "openenv-counter", driver_of, meeting=meeting) for _ in range(2))
    )

    assert [each.reward for each in played] == [1.0, 1.0]
    workers = await place.gateway.workers("openenv-counter")
    assert [worker["slots"] for worker in workers] == [1, 1]


@on(EMBEDDED, STACK)
async def test_a_worker_of_an_image_with_four_slots_holds_four_sessions_concurrently(
    place: Place, driver_of: DriverOf
) -> None:
    meeting = Meeting(4)

    # One worker is allowed: the four clients meet only if it holds all four sessions concurrently.
    played = await asyncio.gather(
        *(played_by("openenv-0.10.0", place, "openenv-counter-020", driver_of, meeting=meeting) for _ in range(4))
    )

    assert [each.reward for each in played] == [1.0] * 4

"""Hundreds of creates on a pool of ten: served in order of arrival, a bounded queue, never an eleventh container."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.fakes.eventually import eventually
from tests.faults.invariants import at_rest, nothing_left
from tests.faults.players import counted, delete_all, open_many
from tests.faults.world import SCALE, World, environment_toml, running
from tests.wire.raw import RawEpisode, create, new_sid

WORKERS = 10
CREATES = round(250 * SCALE)
ROOM = CREATES * 4 // 5
IN_ORDER = 30
"""Number of creates that arrive one by one, so that their order is known."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    unruly = environment_toml("unruly", pool={"slots": 1, "max_workers": WORKERS, "idle_worker_s": 2})
    single = environment_toml("single", pool={"slots": 1, "max_workers": 1})
    with running(unruly, single, GATEWAY_QUEUE_MAX=str(ROOM)) as world:
        yield world


async def test_creates_are_served_in_order_of_arrival_or_refused_with_a_time_to_retry(
    world: World, measured: Callable[[str, float, str], None]
) -> None:
    async with world.http() as http:
        holders = await open_many(http, "unruly", WORKERS)
        served: list[int] = []
        queue = []
        for n in range(IN_ORDER):
            queue.append(asyncio.create_task(_play(http, "unruly", n, served)))
            await eventually(lambda n=n: _waiting(world, "unruly", n + 1))  # type: ignore[misc]
        crowd = [asyncio.create_task(_play(http, "unruly", n, served)) for n in range(IN_ORDER, CREATES - WORKERS)]
        refused = CREATES - WORKERS - ROOM
        await eventually(lambda: _ended(crowd, refused))

        # One slot first, the rest at the end: ten openings that are served concurrently may overtake each other.
        await delete_all(holders[:1])
        await asyncio.gather(*queue)
        await delete_all(holders[1:])
        answers = await asyncio.gather(*queue, *crowd)

    taken = [answer for answer in answers if answer.status_code == 200]
    told = [answer for answer in answers if answer.status_code != 200]
    measured("creates served", len(taken), "")
    assert served[:IN_ORDER] == list(range(IN_ORDER))
    assert len(taken) == ROOM
    assert {answer.status_code for answer in told} == {429}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in told)
    assert world.events.most_alive("unruly") == WORKERS
    await at_rest(world)
    assert await world.metric("gateway_sessions_refused_total", environment="unruly", code="pool_exhausted") == refused
    # The pool keeps workers after such a burst. A restarted gateway does not expect another one.
    assert world.gateway.stop() == 0
    world.gateway.restart()
    await nothing_left(world)


async def test_a_trainer_with_few_creates_is_not_behind_one_with_many(world: World) -> None:
    async with world.http() as alice, world.http(owner="bob") as bob:
        (holder,) = await open_many(alice, "single", 1)
        served: list[int] = []
        many = [asyncio.create_task(_play(alice, "single", n, served)) for n in range(40)]
        await eventually(lambda: _waiting(world, "single", 40))
        one = asyncio.create_task(_play(bob, "single", 1000, served))
        await eventually(lambda: _waiting(world, "single", 41))
        await delete_all([holder])
        answers = await asyncio.gather(one, *many)

    assert {answer.status_code for answer in answers} == {200}
    assert served.index(1000) <= 2, f"bob was served after {served.index(1000)} of alice's"
    await at_rest(world)


async def _play(http: httpx.AsyncClient, environment: str, n: int, served: list[int]) -> httpx.Response:
    """Create a session, record the order of service, take a step and delete it."""
    episode = RawEpisode(http, new_sid(), environment)
    answer = await create(http, episode.sid, env_name=environment, task_spec={"start": n})
    if answer.status_code == 200:
        served.append(n)
        assert await counted(episode) == n + 1
        await delete_all([episode])
    return answer


async def _waiting(world: World, environment: str, number: int) -> None:
    assert await world.waiting(environment) == number


async def _ended(tasks: list[asyncio.Task[httpx.Response]], number: int) -> None:
    assert len([task for task in tasks if task.done()]) == number

"""Redis is killed while a third-party server, which cannot report its sessions, holds some."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import httpx
import pytest

from tests.fakes.eventually import eventually, until
from tests.faults.invariants import nothing_left
from tests.faults.mortal_redis import MortalRedis, is_whole, mortal
from tests.faults.players import delete_all, step, workers_of
from tests.faults.world import World, environment_toml, running
from tests.wire.raw import RawEpisode, create, new_sid

pytestmark = pytest.mark.needs("third-party-images")

RIDDLES = environment_toml(
    "riddles",
    image="env-gateway-test/ors-sdk",
    head={"upstream_name": "riddles"},
    server={"port": 8080},
    pool={"slots": 4, "max_workers": 2},
    limits={"memory_mib": 512},
)


@pytest.mark.parametrize("keeps_all", [True, False], ids=["with its data", "without data"])
async def test_sessions_of_a_third_party_worker_go_on_and_it_is_replaced_if_redis_lost_its_data(
    keeps_all: bool,
) -> None:
    with running(RIDDLES, replicas=2, redis=partial(MortalRedis, keeps_all=keeps_all)) as world:
        async with world.http(0) as http, world.http(1) as other_http:
            old = [await _riddle(http), await _riddle(other_http)]
            (first,) = set(workers_of(await world.sessions(), old))
            rebuilt_before = world.log.count("store_rebuilt")
            mortal(world).kill()
            for episode in old:
                await _waited(episode)
            await asyncio.to_thread(mortal(world).start)
            await is_whole(world, rebuilt_before)

            await eventually(lambda: _is_known(world, old))
            await asyncio.gather(*(_waited(replace(episode, http=client)) for episode, client in _crossed(old)))
            fresh = [await _riddle(http) for _ in range(3)]
            assert (first in workers_of(await world.sessions(), fresh)) == keeps_all
            assert workers_of(await world.sessions(), old) == [first, first]
            await delete_all(old[:1])
            await _waited(old[1])
            await delete_all(old)
            if not keeps_all:
                await until(lambda: first in {event.worker for event in world.events.of("destroy")})
            for episode in fresh:
                await _waited(episode)
            await delete_all(fresh)
        await nothing_left(world)
        assert "worker_lost environment" not in world.log


def _crossed(episodes: list[RawEpisode]) -> list[tuple[RawEpisode, httpx.AsyncClient]]:
    """Pair each episode with the client of the other episode's replica."""
    return [(episodes[0], episodes[1].http), (episodes[1], episodes[0].http)]


async def _riddle(http: httpx.AsyncClient) -> RawEpisode:
    episode = RawEpisode(http, new_sid(), "riddles")
    answer = await create(http, episode.sid, env_name="riddles", task_spec={"word": "river"})
    assert answer.status_code == 200, answer.text
    return episode


async def _waited(episode: RawEpisode) -> None:
    """Take a step that this server serves in an open session only."""
    assert (await step(episode, "wait", {"seconds": 0.01})).outcome.text == "waited"


async def _is_known(world: World, episodes: list[RawEpisode]) -> None:
    """Assert that the store knows all episodes again. Replicas restore them."""
    assert {episode.sid for episode in episodes} <= {session["name"] for session in await world.sessions()}

"""A replica gets SIGTERM in the middle of steps: its notes up to its last answer are stored, and it releases the lead.

``tests/wire/test_rolling_restart.py`` tests that no step fails meanwhile.
"""

from __future__ import annotations

import asyncio

import httpx

from tests.faults.invariants import nothing_left
from tests.faults.players import counted, delete_all, open_many
from tests.faults.world import PREFIX, World, environment_toml, running
from tests.wire.raw import RawEpisode

SESSIONS = 4
IDLE_S = 300


async def test_after_sigterm_each_answered_step_counts_for_the_idle_time_and_the_lead_is_released() -> None:
    unruly = environment_toml("unruly", timeouts={"idle_s": IDLE_S})
    with running(unruly, GATEWAY_DRAIN_NOTICE_S="0.5") as world:
        async with world.http() as http:
            episodes = await open_many(http, "unruly", SESSIONS)
            ids = {str(session["name"]): str(session["id"]) for session in await world.sessions()}
            leaving = asyncio.create_task(asyncio.to_thread(world.gateway.stop))
            last_at = await asyncio.gather(*(_stepped_until_it_is_gone(world, episode) for episode in episodes))
            status = await leaving
        with world.database() as database:
            deadlines = dict(database.zrange(f"{PREFIX}deadlines", 0, -1, withscores=True))
            leader = database.get(f"{PREFIX}leader")

        world.gateway.restart()
        async with world.http() as http:
            await delete_all([RawEpisode(http, episode.sid, "unruly") for episode in episodes])
        await nothing_left(world)

    assert status == 0
    assert leader is None
    for episode, at in zip(episodes, last_at, strict=True):
        assert float(deadlines[ids[episode.sid]]) >= 1000 * (at + IDLE_S)


async def _stepped_until_it_is_gone(world: World, episode: RawEpisode) -> float:
    """Step until the gateway does not answer. Return the start of the last answered step (Redis' clock, s)."""
    last_at = 0.0
    with world.database() as database:
        while True:
            seconds, microseconds = database.time()
            try:
                await counted(episode)
            except httpx.TransportError:
                return last_at
            last_at = seconds + microseconds / 1e6

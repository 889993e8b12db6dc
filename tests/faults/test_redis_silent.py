"""Redis takes connections and says nothing for a while, then goes on: steps go on meanwhile, and nothing is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tests.fakes.eventually import eventually
from tests.faults.invariants import at_rest
from tests.faults.mortal_redis import MortalRedis, mortal
from tests.faults.players import counted, delete_all, opened
from tests.faults.steady import (
    LATE_S,
    brief_toml,
    crowd,
    gone_at,
    no_slot_is_leased_twice,
    of_every_protocol,
    patient_create,
    steady_toml,
)
from tests.faults.world import SCALE, running

IDLE_S = 8
SILENT_S = min(30.0, 6.0 * SCALE)
UNRULY = steady_toml(slots=10, min_workers=2, max_workers=2)
BRIEF = brief_toml(IDLE_S)


async def test_it_says_nothing_for_a_while(measured: Callable[[str, float, str], None]) -> None:
    with running(UNRULY, BRIEF, replicas=2, redis=MortalRedis) as world:
        async with crowd(world) as everybody, world.http(1) as http:
            await of_every_protocol(everybody)
            idle = await opened(http, "brief")
            idle_at = time.monotonic()
            rebuilt_before = world.log.count("store_rebuilt")
            mortal(world).pause()
            paused_at = time.monotonic()
            wish = asyncio.create_task(patient_create(http))
            while time.monotonic() < paused_at + SILENT_S:
                await everybody.goes_on(1)
            mortal(world).go_on()
            went_on_at = time.monotonic()
            gone = asyncio.create_task(gone_at(world, idle.sid))

            assert await counted(await wish) == 1
            everybody.move()
            await everybody.goes_on()
            await eventually(lambda: no_slot_is_leased_twice(world))
            expired_at = await gone
            measured(f"an idle session (idle time {IDLE_S} s) ended after", expired_at - idle_at, "s")
            measured("the longest step", everybody.longest_s, "s")
            await delete_all([await wish])
            await everybody.leave()

        assert idle_at + IDLE_S <= expired_at <= went_on_at + IDLE_S + LATE_S
        assert world.log.count("store_rebuilt") == rebuilt_before
        assert world.events.of("die") == []
        await at_rest(world)

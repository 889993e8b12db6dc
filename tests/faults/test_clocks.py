"""The wall clock of Redis, of all gateways or of one jumps by an hour: no session ends early or outlives its time."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.faults.invariants import at_rest
from tests.faults.mortal_redis import MortalRedis
from tests.faults.players import counted, delete_all, opened, step
from tests.faults.steady import PAUSE_S, Crowd, crowd, is_gone, no_slot_is_leased_twice, steady_toml
from tests.faults.wall_clock import WallClock
from tests.faults.world import World, environment_toml, running
from tests.wire.raw import RawEpisode

pytestmark = pytest.mark.needs("faketime")

HOUR_S = 3600
JUMPS = (HOUR_S, 0, -HOUR_S)
"""Seconds that the clock is ahead, in this order: an hour forward, and two back."""
IDLE_S = 4
UNRULY = steady_toml(slots=10, min_workers=1, max_workers=2, idle_worker_s=300)
BRIEF = environment_toml("brief", pool={"slots": 500, "min_workers": 1, "max_workers": 1}, timeouts={"idle_s": IDLE_S})
NOTICED_S = 2.0
"""Seconds after a jump during which the test opens sessions. Some are opened before a replica notices the jump."""
FULL = environment_toml("full", pool={"slots": 1, "min_workers": 1, "max_workers": 1}, timeouts={"open_s": HANG_S})


@pytest.mark.parametrize("whose", ["Redis'", "the gateways'", "one gateway's"])
async def test_no_session_ends_early_or_lives_on_when_a_wall_clock_jumps(
    whose: str, tmp_path: Path, measured: Callable[[str, float, str], None]
) -> None:
    clock = WallClock(tmp_path)
    server = partial(MortalRedis, variables=clock.variables if whose == "Redis'" else {})
    settings = clock.variables if whose == "the gateways'" else {}
    of_last = clock.variables if whose == "one gateway's" else {}
    with running(UNRULY, BRIEF, FULL, replicas=2, redis=server, of_last=of_last, **settings) as world:
        async with crowd(world) as everybody, world.http(0) as http:
            for replica in (0, 1):
                await everybody.ors(replica)
                await everybody.areal(replica)
                await everybody.openenv(replica)
            silent = await opened(http, "unruly")  # it takes no step: the store knows only its deadline
            holder = await opened(http, "full")
            waiting = asyncio.create_task(opened(http, "full"))
            await eventually(lambda: _waits(world))
            await everybody.goes_on()
            for ahead_s in JUMPS:
                await _jumps(world, everybody, clock, ahead_s, measured)
                everybody.move()  # replicas ask each other for sessions that they hold
                await everybody.goes_on()
                told = _time_of_redis(world) if whose == "Redis'" else _time_of_a_gateway(world)
                assert abs(told - time.time() - ahead_s) < 60, "the clock did not jump"
                assert silent.sid in {session["name"] for session in await world.sessions()}
                assert not waiting.done(), "an opening that waits was dropped"
            assert await counted(silent) == 1
            await delete_all([holder])
            assert await counted(await waiting) == 1
            everybody.move()
            await everybody.goes_on()
            await eventually(lambda: no_slot_is_leased_twice(world))
            await delete_all([silent, await waiting])
            await everybody.leave()
        assert world.events.of("die") == []
        await at_rest(world)


async def _jumps(
    world: World,
    everybody: Crowd,
    clock: WallClock,
    ahead_s: int,
    measured: Callable[[str, float, str], None],
) -> None:
    """Let the clock jump during the idle time of a session. The session must last as long as without a jump."""
    async with world.http(1) as http:
        await everybody.goes_on()
        idle = await opened(http, "brief")
        # The clock jumps between the end of its step and the note of it, which says how long ago the step ended.
        await counted(idle)
        idle_at = time.monotonic()
        clock.set(ahead_s)
        opened_after, queued = await _opened_on_and_on(http)
        while time.monotonic() < idle_at + IDLE_S / 2:
            await everybody.goes_on(1)
        fresh = await opened(http, "unruly")
        assert await counted(fresh) == 1
        await eventually(lambda: is_gone(world, idle.sid))
        lived_s = time.monotonic() - idle_at
        measured(f"clock {ahead_s:+d} s: an idle session (idle time {IDLE_S} s) ended after", lived_s, "s")
        assert lived_s >= IDLE_S
        assert "expired" in (await step(idle, "count")).error
        # A session dated by a wrong clock, before any replica noticed the jump, also lasts its idle time.
        await eventually(lambda: _are_gone(world, opened_after))
        await everybody.goes_on()
        assert not any(wish.done() for wish in queued), "an opening that began to wait meanwhile was dropped"
        for wish in queued:
            wish.cancel()
        await asyncio.wait(queued)
        await eventually(lambda: _waits(world))
        await delete_all([fresh])


async def _opened_on_and_on(http: httpx.AsyncClient) -> tuple[set[str], list[asyncio.Task[RawEpisode]]]:
    """Open sessions one by one for a while, and equally many openings that wait. Return the names of the sessions."""
    until, names, queued = time.monotonic() + NOTICED_S, set[str](), []
    while time.monotonic() < until:
        queued.append(asyncio.create_task(opened(http, "full")))
        names.add((await opened(http, "brief")).sid)
        await asyncio.sleep(PAUSE_S)  # a few sessions show as much as some hundreds
    return names, queued


async def _are_gone(world: World, names: set[str]) -> None:
    left = names & {str(session["name"]) for session in await world.sessions()}
    assert not left, f"{len(left)} of {len(names)} are left"


def _time_of_redis(world: World) -> float:
    with world.database() as database:
        seconds, _ = database.time()
    return float(seconds)


def _time_of_a_gateway(world: World) -> float:
    """Return the time of the gateway's last log line."""
    stamps = re.findall(r"^(\d+-\d+-\d+ \d+:\d+:\d+),", world.gateways[1].log, re.MULTILINE)
    return time.mktime(time.strptime(stamps[-1], "%Y-%m-%d %H:%M:%S"))


async def _waits(world: World) -> None:
    assert await world.waiting("full") == 1

"""A Redis that Sentinels watch dies, and its replica takes over with the data that it received.

Two replicas of the gateway serve sessions of each protocol, which step continuously. No step fails or runs twice, no
session is lost, no slot is leased twice. Sessions are opened again once the store is whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from tests.fakes.eventually import eventually
from tests.fakes.sentinels import Failover
from tests.faults.invariants import at_rest
from tests.faults.mortal_redis import is_whole
from tests.faults.players import delete_all, opened
from tests.faults.steady import crowd, no_slot_is_leased_twice, of_every_protocol, patient_create, steady_toml
from tests.faults.world import World, running
from tests.wire.stack import Redis

UNRULY = steady_toml(slots=10, min_workers=2, max_workers=2)


class WatchedRedis(Redis):
    """Two servers and their Sentinels, which a world starts and stops as one Redis."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "sentinels").mkdir()
        self.servers = Failover(folder / "sentinels")

    @property
    def url(self) -> str:
        return self.servers.url

    def start(self) -> None:
        self.servers.start()

    def stop(self) -> None:
        self.servers.stop()

    def database(self) -> redis.Redis:
        return self.servers.client(self.servers.master)


def watched(world: World) -> Failover:
    assert isinstance(world.redis, WatchedRedis)
    return world.redis.servers


@pytest.mark.parametrize("master", ["dies", "is silent for a while"])
async def test_sessions_go_on_when_another_redis_server_takes_over(
    master: str, measured: Callable[[str, float, str], None]
) -> None:
    with running(UNRULY, replicas=2, redis=WatchedRedis) as world:
        servers = watched(world)
        async with crowd(world) as everybody, world.http(1) as http:
            await of_every_protocol(everybody)
            await everybody.goes_on()
            rebuilt_before = world.log.count("store_rebuilt")
            before = servers.master

            began_at = time.monotonic()
            if master == "dies":
                servers.kill()
            else:
                servers.pause()
            await everybody.goes_on()
            wish = asyncio.create_task(patient_create(http))
            await asyncio.to_thread(servers.await_takeover, before)
            measured("another one is master", time.monotonic() - began_at, "s")
            if master != "dies":
                servers.go_on(before)
            await is_whole(world, rebuilt_before)
            measured("the store is whole", time.monotonic() - began_at, "s")

            await everybody.goes_on()
            everybody.move()
            await everybody.goes_on()
            await delete_all([await wish, await opened(http, "unruly")])
            await eventually(lambda: no_slot_is_leased_twice(world))
            measured("the longest step", everybody.longest_s, "s")
            await everybody.leave()
        assert world.events.of("die") == []
        await eventually(lambda: no_slot_is_leased_twice(world))
        await at_rest(world)

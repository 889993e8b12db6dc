"""What no event tells of: a container that nobody knows, a worker in the store that has none, a death nobody heard of.

The audit finds them, before a gateway that begins takes its first request, and while it runs.
"""

from __future__ import annotations

import asyncio

import pytest

from gateway.audit import EVERY_S, PATIENCE_S
from gateway.core.model import EnvironmentName, Opening, Owner, Worker, WorkerId, session_id
from gateway.stores.redis import RedisStore
from tests.fakes.eventually import WITHIN_S, eventually
from tests.faults.invariants import at_rest
from tests.faults.players import counted, delete_all, opened, step, workers_of
from tests.faults.world import IMAGE, PREFIX, WORKER_LABEL, World, environment_toml, running
from tests.wire.stack import INSTANCE_LABEL

STRAY = WorkerId("00000000000000aa")
"""A worker that is a container and a folder only."""
GHOST = WorkerId("00000000000000bb")
"""One that is in the store only."""
UNRULY = environment_toml("unruly", pool={"slots": 2, "min_workers": 1, "max_workers": 1})
HAUNTED = environment_toml("haunted", pool={"slots": 1, "max_workers": 1})


@pytest.mark.parametrize("when", ["at the start", "while it runs"])
async def test_what_one_side_alone_knows_is_found(when: str) -> None:
    with running(UNRULY, HAUNTED) as world:
        async with world.http() as http:
            live = await opened(http, "unruly")
            assert await counted(live) == 1
            digest = await _digest(world)
            if when == "at the start":
                world.gateway.kill()
                await _haunt(world, digest)
                world.gateway.restart()
                await _is_gone(world, GHOST)  # at once: it listens when it has looked
                await eventually(lambda: _is_exorcised(world), within_s=WITHIN_S)  # behind the first requests
            else:
                await _haunt(world, digest)
                await eventually(lambda: _is_exorcised(world), within_s=EVERY_S + PATIENCE_S + WITHIN_S)

            assert await counted(live) == 2
            fresh = await opened(http, "haunted")  # its one worker is not taken for there
            assert await counted(fresh) == 1
            await world.counts(1, "gateway_workers_lost_total", environment="haunted")
            await world.counts(1, "gateway_sessions_closed_total", environment="haunted", reason="worker_lost")
            assert f"worker_removed environment=unruly worker={STRAY} reason=orphan" in world.log
            assert f"worker_lost environment=haunted worker={GHOST}" in world.log
            await delete_all([live, fresh])
        await at_rest(world)


async def test_what_died_while_no_gateway_ran_is_told_at_once() -> None:
    with running(UNRULY) as world:
        async with world.http() as http:
            lost = await opened(http, "unruly")
            (worker,) = workers_of(await world.sessions(), [lost])
            world.gateway.kill()
            container = world.container(worker)
            container.kill()
            await asyncio.to_thread(container.wait, timeout=60)
            world.gateway.restart()

            assert "worker_lost" in (await step(lost, "count")).error
            assert worker not in {each["id"] for each in await world.workers()}
            fresh = await opened(http, "unruly")
            assert await counted(fresh) == 1
            await world.counts(1, "gateway_workers_lost_total", environment="unruly")
            await delete_all([fresh])
        await at_rest(world)


async def _digest(world: World) -> str:
    """The make of the second environment's workers, of which none is left."""
    async with world.http() as http:
        first = await opened(http, "haunted")
        (worker,) = workers_of(await world.sessions(), [first])
        with world.database() as database:
            digest = str(database.hget(f"{PREFIX}worker:{worker}", "digest"))
        await delete_all([first])
    await eventually(lambda: _is_gone(world, worker))
    return digest


async def _haunt(world: World, digest: str) -> None:
    """Plant a container that the store does not know, and a worker with a session that the engine does not know."""
    (world.sockets / STRAY).mkdir()
    labels = {INSTANCE_LABEL: world.instance, WORKER_LABEL: STRAY, "env-gateway.environment": "unruly"}
    world.engine.containers.run(IMAGE, ["sleep", "600"], labels=labels, detach=True, network_disabled=True)
    ghost = Worker(id=GHOST, environment=EnvironmentName("haunted"), digest=digest, slots=1)
    wish = Opening(
        id=session_id(Owner("alice"), "ghost"),
        name="ghost",
        owner=Owner("alice"),
        environment=ghost.environment,
        lease="lease",
        fingerprint="any",
        idle_s=300,
        setup_s=300,
    )
    store = RedisStore(url=world.redis.url, replica="test")
    await store.start()
    try:
        await store.add_worker(ghost)
        assert await store.worker_ready(GHOST, "unix:/nowhere")
        assert (await store.claim(wish, wait_s=0)).worker == GHOST
        await store.opened(wish.id, wish.lease)
    finally:
        await store.aclose()


async def _is_exorcised(world: World) -> None:
    assert STRAY not in {container.attrs["Labels"][WORKER_LABEL] for container in world.containers()}
    assert not (world.sockets / STRAY).exists()
    assert "ghost" not in {session["name"] for session in await world.sessions()}
    await _is_gone(world, GHOST)


async def _is_gone(world: World, id: str) -> None:
    assert id not in {worker["id"] for worker in await world.workers()}

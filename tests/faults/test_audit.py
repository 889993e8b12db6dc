"""The audit finds what no event reports: unknown containers, stored workers without a container, missed deaths.

It runs before a starting gateway takes its first request, and while the gateway runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from gateway.core.ids import EnvironmentName, Owner, WorkerId
from gateway.core.session import Session, SessionState
from gateway.core.worker import Worker, WorkerState
from gateway.sessions.cache import session_id
from gateway.stores.redis.sessions import RedisStore
from tests.contract.backend_world import new_id
from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually, until
from tests.faults.invariants import at_rest
from tests.faults.players import counted, delete_all, opened, step, workers_of
from tests.faults.world import IMAGE, PREFIX, WORKER_LABEL, World, environment_toml, running
from tests.wire.raw import new_sid
from tests.wire.stack import ENVIRONMENT_LABEL, INSTANCE_LABEL

OWNER_LABEL = "env-gateway.owner"
UNRULY = environment_toml("unruly", pool={"slots": 2, "min_workers": 1, "max_workers": 1})
HAUNTED = environment_toml("haunted", pool={"slots": 1, "max_workers": 1})


@dataclass(frozen=True)
class Ghosts:
    """Objects that only the engine or only the store knows."""

    stray: WorkerId
    """A worker that consists of a container and a folder only."""
    other: WorkerId
    """The same, created by another gateway whose instance has the same name."""
    ghost: WorkerId
    """A worker that only the store knows."""
    session: str
    """The trainer's name of the session that the store has in `ghost`."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with running(UNRULY, HAUNTED) as world:
        yield world


@pytest.mark.parametrize("when", ["at the start", "while it runs"])
async def test_a_worker_that_only_the_engine_or_only_the_store_knows_is_found(world: World, when: str) -> None:
    already_logged = len(world.log)
    async with world.http() as http:
        live = await opened(http, "unruly")
        assert await counted(live) == 1
        digest = await _digest(world)
        if when == "at the start":
            world.gateway.kill()
            lost, closed = 0.0, 0.0  # the process' metrics start at zero
            ghosts = await _haunt(world, digest)
            world.gateway.restart()
            await _is_gone(world, ghosts.ghost)  # immediately: the gateway listens after its first audit
            await eventually(lambda: _is_exorcised(world, ghosts))  # during the first requests
        else:
            lost, closed = await _lost(world), await _closed(world)
            ghosts = await _haunt(world, digest)
            # No request waits for this audit. Its last report is the container, after `PATIENCE_S`.
            removed = f"worker={ghosts.stray} reason=orphan"
            await until(lambda: removed in world.log[already_logged:])
            await eventually(lambda: _is_exorcised(world, ghosts))

        assert await counted(live) == 2
        fresh = await opened(http, "haunted")  # its one worker does not count as running
        assert await counted(fresh) == 1
        await world.counts(lost + 1, "gateway_workers_lost_total", environment="haunted")
        await world.counts(closed + 1, "gateway_sessions_closed_total", environment="haunted", reason="worker_lost")
        log = world.log[already_logged:]
        assert f"worker_removed environment=unruly worker={ghosts.stray} reason=orphan" in log
        assert f"worker_lost environment=haunted worker={ghosts.ghost}" in log
        assert ghosts.other not in log
        world.container(ghosts.other).remove(force=True)
        await delete_all([live, fresh])
    await at_rest(world)


async def test_a_worker_that_died_while_no_gateway_ran_is_reported_immediately(world: World) -> None:
    async with world.http() as http:
        lost = await opened(http, "unruly")
        (worker,) = workers_of(await world.sessions(), [lost])
        world.gateway.kill()
        container = world.container(worker)
        container.kill()
        await asyncio.to_thread(container.wait, timeout=HANG_S)
        world.gateway.restart()

        assert "worker_lost" in (await step(lost, "count")).error
        assert worker not in {each["id"] for each in await world.workers()}
        fresh = await opened(http, "unruly")
        assert await counted(fresh) == 1
        await world.counts(1, "gateway_workers_lost_total", environment="unruly")
        await delete_all([fresh])
    await at_rest(world)


async def _lost(world: World) -> float:
    return await world.metric("gateway_workers_lost_total", environment="haunted")


async def _closed(world: World) -> float:
    return await world.metric("gateway_sessions_closed_total", environment="haunted", reason="worker_lost")


async def _digest(world: World) -> str:
    """Return the digest of the second environment's workers, and wait until no such worker is left."""
    async with world.http() as http:
        first = await opened(http, "haunted")
        (worker,) = workers_of(await world.sessions(), [first])
        with world.database() as database:
            digest = str(database.hget(f"{PREFIX}worker:{worker}", "digest"))
        await delete_all([first])
    await eventually(lambda: _is_gone(world, worker))
    return digest


async def _haunt(world: World, digest: str) -> Ghosts:
    """Plant containers that the store does not know, and a worker with a session that the engine does not know.

    One operation of the store adds the worker and its session, because the running gateway ends anything half done.
    """
    ghosts = Ghosts(new_id(), new_id(), new_id(), new_sid())
    (world.sockets / ghosts.stray).mkdir()
    for id, owner in ((ghosts.stray, world.owner), (ghosts.other, "0" * 16)):
        labels = {INSTANCE_LABEL: world.instance, WORKER_LABEL: id, ENVIRONMENT_LABEL: "unruly", OWNER_LABEL: owner}
        world.engine.containers.run(IMAGE, ["sleep", "600"], labels=labels, detach=True, network_disabled=True)
    ghost = Worker(
        id=ghosts.ghost,
        environment=EnvironmentName("haunted"),
        digest=digest,
        slots=1,
        address="unix:/nowhere",
        state=WorkerState.READY,
    )
    session = Session(
        id=session_id(Owner("alice"), ghosts.session),
        name=ghosts.session,
        owner=Owner("alice"),
        environment=ghost.environment,
        lease="lease",
        fingerprint="any",
        idle_s=300,
        worker=ghost.id,
        address=ghost.address,
        state=SessionState.OPEN,
    )
    store = RedisStore(url=world.redis.url, replica="test")
    await store.start()
    try:
        assert await store.adopt(ghost, [session], fence=0) == [session.id]
    finally:
        await store.aclose()
    return ghosts


async def _is_exorcised(world: World, ghosts: Ghosts) -> None:
    assert ghosts.stray not in {container.attrs["Labels"][WORKER_LABEL] for container in world.containers()}
    assert not (world.sockets / ghosts.stray).exists()
    assert ghosts.session not in {session["name"] for session in await world.sessions()}
    await _is_gone(world, ghosts.ghost)


async def _is_gone(world: World, id: str) -> None:
    assert id not in {worker["id"] for worker in await world.workers()}

"""What no event tells of: a container that nobody knows, a worker in the store that has none, a death nobody heard of.

The audit finds them, before a gateway that begins takes its first request, and while it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from gateway.core.ids import EnvironmentName, Owner, WorkerId
from gateway.core.session import Session, SessionState
from gateway.core.worker import Worker, WorkerState
from gateway.pool.audit import EVERY_S, PATIENCE_S
from gateway.sessions.cache import session_id
from gateway.stores.redis.sessions import RedisStore
from tests.contract.backend_world import new_id
from tests.deadlines import scaled
from tests.fakes.eventually import WITHIN_S, eventually, until
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
    """What one side alone knows."""

    stray: WorkerId
    """A worker that is a container and a folder only."""
    other: WorkerId
    """The same, but another gateway made it, whose instance has the same name."""
    ghost: WorkerId
    """A worker that is in the store only."""
    session: str
    """What the trainer calls the session that the store has in that worker."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with running(UNRULY, HAUNTED) as world:
        yield world


@pytest.mark.parametrize("when", ["at the start", "while it runs"])
async def test_what_one_side_alone_knows_is_found(world: World, when: str) -> None:
    already_logged = len(world.log)
    async with world.http() as http:
        live = await opened(http, "unruly")
        assert await counted(live) == 1
        digest = await _digest(world)
        if when == "at the start":
            world.gateway.kill()
            lost, closed = 0.0, 0.0  # metrics begin with the process
            ghosts = await _haunt(world, digest)
            world.gateway.restart()
            await _is_gone(world, ghosts.ghost)  # at once: it listens when it has looked
            await eventually(lambda: _is_exorcised(world, ghosts), within_s=WITHIN_S)  # behind the first requests
        else:
            lost, closed = await _lost(world), await _closed(world)
            ghosts = await _haunt(world, digest)
            # An audit that nobody waits for: it tells of the container last, after `PATIENCE_S`.
            removed = f"worker={ghosts.stray} reason=orphan"
            await until(lambda: removed in world.log[already_logged:], within_s=EVERY_S + PATIENCE_S + WITHIN_S)
            await eventually(lambda: _is_exorcised(world, ghosts), within_s=WITHIN_S)

        assert await counted(live) == 2
        fresh = await opened(http, "haunted")  # its one worker is not taken for there
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


async def test_what_died_while_no_gateway_ran_is_told_at_once(world: World) -> None:
    async with world.http() as http:
        lost = await opened(http, "unruly")
        (worker,) = workers_of(await world.sessions(), [lost])
        world.gateway.kill()
        container = world.container(worker)
        container.kill()
        await asyncio.to_thread(container.wait, timeout=scaled(60))
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
    """The make of the second environment's workers, of which none is left."""
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

    The worker comes with its session in one step of the store: the gateway that looks on ends what it finds half done.
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

"""Tests of the invariants: each kind of leftover is found, and nothing else is reported."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.faults.invariants import at_rest, hold, no_bugs
from tests.faults.players import Ended, delete_all, opened
from tests.faults.steady import Steady, no_slot_is_leased_twice
from tests.faults.world import IMAGE, PREFIX, WORKER_LABEL, World, environment_toml, running
from tests.wire.stack import INSTANCE_LABEL

STRAY = "00000000000000ff"
NEVER = 1e15
"""A moment in milliseconds that never comes."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with running(environment_toml("unruly", pool={"min_workers": 1})) as world:
        yield world


def _key(world: World) -> Callable[[], object]:
    with world.database() as database:
        database.hset(f"{PREFIX}session:{STRAY}", "state", "closed")
    return lambda: _forget(world, f"{PREFIX}session:{STRAY}")


def _ticket(world: World) -> Callable[[], object]:
    with world.database() as database:
        database.zadd(f"{PREFIX}waits:unruly", {STRAY: NEVER})
    return lambda: _forget(world, f"{PREFIX}waits:unruly")


def _forget(world: World, key: str) -> None:
    with world.database() as database:
        database.delete(key)


def _the_worker(world: World) -> str:
    with world.database() as database:
        (worker,) = database.zrange(f"{PREFIX}workers", 0, -1)
    return str(worker)


def _slot(world: World) -> Callable[[], object]:
    """Let a session that does not exist hold a slot."""
    held = f"{PREFIX}held:{_the_worker(world)}"
    with world.database() as database:
        database.sadd(held, STRAY)
    return lambda: _forget(world, held)


def _free_slot(world: World) -> Callable[[], object]:
    """Remove a worker's free slots from the store's list, so that no opening can get them."""
    free = f"{PREFIX}free:unruly"
    with world.database() as database:
        members = database.zrange(free, 0, -1, withscores=True)
        database.delete(free)

    def list_it() -> None:
        with world.database() as database:
            database.zadd(free, dict(members))

    return list_it


def _session(world: World, state: str, worker: str) -> Callable[[], object]:
    fields = {
        "id": STRAY,
        "name": "stray",
        "owner": "alice",
        "environment": "unruly",
        "lease": "lease",
        "fingerprint": "any",
        "idle_s": "300",
        "task": "",
        "episode": "",
        "worker": worker,
        "address": "unix:/nowhere",
        "state": state,
    }
    with world.database() as database, database.pipeline() as writes:
        writes.hset(f"{PREFIX}session:{STRAY}", mapping=fields)
        writes.zadd(f"{PREFIX}deadlines", {STRAY: NEVER})
        writes.sadd(f"{PREFIX}held:{worker}", STRAY)
        writes.execute()

    def end() -> None:
        with world.database() as database:
            database.delete(f"{PREFIX}session:{STRAY}", f"{PREFIX}held:{worker}")
            database.zrem(f"{PREFIX}deadlines", STRAY)

    return end


def _opening(world: World) -> Callable[[], object]:
    return _session(world, "opening", _the_worker(world))


def _closing(world: World) -> Callable[[], object]:
    return _session(world, "closing", _the_worker(world))


def _lost_session(world: World) -> Callable[[], object]:
    return _session(world, "open", "00000000000000fe")


def _worker(world: World) -> Callable[[], object]:
    """Add a worker that only the store knows. The control loop ignores it until it was idle for a while."""
    with world.database() as database:
        like = database.hgetall(f"{PREFIX}worker:{_the_worker(world)}")
        rank = f"{10**15:016}{STRAY}"
        with database.pipeline() as writes:
            writes.hset(f"{PREFIX}worker:{STRAY}", mapping={**like, "id": STRAY, "rank": rank})
            writes.zadd(f"{PREFIX}workers", {STRAY: 10**15})
            writes.execute()

    def remove() -> None:
        with world.database() as database:
            database.delete(f"{PREFIX}worker:{STRAY}")
            database.zrem(f"{PREFIX}workers", STRAY)

    return remove


def _folder(world: World) -> Callable[[], object]:
    folder = world.sockets / STRAY
    folder.mkdir()
    return folder.rmdir


def _container(world: World) -> Callable[[], object]:
    labels = {INSTANCE_LABEL: world.instance, WORKER_LABEL: STRAY}
    container = world.engine.containers.create(IMAGE, labels=labels, network_disabled=True)
    return lambda: container.remove(force=True)


def _volume(world: World) -> Callable[[], object]:
    volume = world.engine.volumes.create(labels={INSTANCE_LABEL: world.instance})
    return volume.remove


def _network(world: World) -> Callable[[], object]:
    network = world.engine.networks.create(f"stray-{world.instance}", labels={INSTANCE_LABEL: world.instance})
    return network.remove


LEFT: dict[str, Callable[[World], Callable[[], object]]] = {
    "keys of nothing that lives": _key,
    "keys of nothing": _ticket,
    "holds 0 sessions": _slot,
    "not offered although it has room": _free_slot,
    "stuck sessions.*opening": _opening,
    "stuck sessions.*closing": _closing,
    "sessions of workers that are gone": _lost_session,
    "workers without a container": _worker,
    "socket folders without a worker": _folder,
    "containers that are no workers": _container,
    "volumes": _volume,
    "networks": _network,
}
"""Functions that plant a leftover, by the text that the invariants report for it."""


@pytest.mark.parametrize("said", LEFT)
async def test_each_kind_of_leftover_is_found(world: World, said: str) -> None:
    await at_rest(world)
    remove = LEFT[said](world)
    try:
        # Retry: a worker may start just then, and the check reports only the first finding.
        await eventually(partial(_is_said, world, said))
    finally:
        remove()
    async with world.http() as http:
        await delete_all([await opened(http, "unruly")])
    await at_rest(world)


async def _is_said(world: World, said: str) -> None:
    with pytest.raises(AssertionError) as found:
        await hold(world)
    assert re.search(said, str(found.value))


async def test_a_slot_that_is_leased_and_not_used_is_found(world: World) -> None:
    await at_rest(world)
    await no_slot_is_leased_twice(world)
    end = _session(world, "open", _the_worker(world))
    try:
        with pytest.raises(AssertionError):
            await no_slot_is_leased_twice(world)
    finally:
        end()


async def test_a_session_that_the_store_released_and_its_worker_still_holds_is_found(world: World) -> None:
    async with world.http() as http:
        episode = await opened(http, "unruly")
        (session,) = await world.sessions()
        with world.database() as database:
            database.zrem(f"{PREFIX}deadlines", session["id"])
        with pytest.raises(AssertionError):
            await no_slot_is_leased_twice(world)
        with world.database() as database:
            database.zadd(f"{PREFIX}deadlines", {session["id"]: NEVER})
        await no_slot_is_leased_twice(world)
        await delete_all([episode])


@pytest.mark.parametrize("numbers", [[1, 2, 2], [1, 2, 4]], ids=["lost", "run twice"])
async def test_a_step_that_is_lost_or_runs_twice_is_found(numbers: list[int]) -> None:
    left = iter(numbers)

    async def count(replica: int) -> int:
        return next(left)

    session = Steady("steady", 0, count, can_move=False)
    async with asyncio.timeout(HANG_S):
        await session.run()

    assert session.wrong == [f"steady: step {numbers[2]} follows step 2"]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, 'event: task_id\ndata: a\n\nevent: error\ndata: {"message": "gone", "reward": 0}\n\n'),
        (410, '{"detail": "worker_lost", "reward": 0.0}'),
        (200, "event: task_id\ndata: a\n\nevent: chunk\ndata: {}\n\nevent: end\ndata:\n\n"),
    ],
    ids=["in a stream", "in a status", "no error at all"],
)
def test_an_invented_reward_is_found(status: int, body: str) -> None:
    with pytest.raises(AssertionError):
        _ = Ended(status, body, 0.0).error


def test_a_bug_in_the_log_is_found() -> None:
    no_bugs("12:00 info gateway.sessions.service call_broken worker=a error=the worker is gone\n")
    with pytest.raises(AssertionError, match="tick_failed"):
        no_bugs("12:00 error gateway.pool.loop tick_failed\n")

"""The checks themselves: each thing that must not be left is found, and nothing else is complained of."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.faults.invariants import at_rest, no_bugs
from tests.faults.players import delete_all, opened
from tests.faults.world import IMAGE, PREFIX, WORKER_LABEL, World, environment_toml, running
from tests.wire.stack import INSTANCE_LABEL

STRAY = "00000000000000ff"


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
        database.zadd(f"{PREFIX}waits:unruly", {STRAY: 1e15})
    return lambda: _forget(world, f"{PREFIX}waits:unruly")


def _forget(world: World, key: str) -> None:
    with world.database() as database:
        database.delete(key)


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


@pytest.mark.parametrize("leave", [_key, _ticket, _folder, _container, _volume])
async def test_what_is_left_is_found(world: World, leave: Callable[[World], Callable[[], object]]) -> None:
    await at_rest(world)
    remove = leave(world)
    try:
        with pytest.raises(AssertionError):
            await at_rest(world, within_s=0)
    finally:
        remove()
    async with world.http() as http:
        await delete_all([await opened(http, "unruly")])
    await at_rest(world)


def test_a_bug_in_the_log_is_found() -> None:
    no_bugs("12:00 info gateway.sessions call_broken worker=a error=the worker is gone\n")
    with pytest.raises(AssertionError, match="tick_failed"):
        no_bugs("12:00 error gateway.pool tick_failed\n")

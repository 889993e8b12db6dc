"""What holds of a gateway at rest, whatever was done to it: nothing leaked, nothing stuck, nothing invented.

A key of Redis is at home if it runs out by itself, is the only one of its kind, or names something that lives; so
the checks need not know what kinds of keys there are.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import redis

from tests.deadlines import scaled
from tests.faults.world import PREFIX, WORKER_LABEL, World
from tests.wire.stack import INSTANCE_LABEL

WITHIN_S = 30.0
"""How long after a fault everything may take to be in order again."""
PAUSE_S = 0.2
"""Each look asks the engine, too, which has other things to do."""
BUGS = ("\nTraceback", "_broken ", "tick_failed", "audit_failed", "notes_failed", "pool_task_failed", "ping_failed")
"""In a log: an error that is a bug. A tool that fails in a worker is none."""
NOT_BUGS = ("call_broken", "engine_events_broken")


async def at_rest(world: World, *, within_s: float = WITHIN_S) -> None:
    """Return once all invariants hold.

    Raises:
        AssertionError: the first that does not, after *within_s* seconds.
    """
    deadline = time.monotonic() + scaled(within_s)
    while True:
        try:
            await _hold(world)
            break
        except AssertionError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(PAUSE_S)
    no_bugs(world.log)


async def nothing_left(world: World, *, within_s: float = WITHIN_S) -> None:
    """Return once no worker, session or key of one is left: of environments that keep no idle worker."""
    deadline = time.monotonic() + scaled(within_s)
    while True:
        try:
            await _hold(world)
            assert await world.sessions() == []
            assert await world.workers() == []
            assert await asyncio.to_thread(world.containers) == []
            break
        except AssertionError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(PAUSE_S)
    no_bugs(world.log)


def no_bugs(log: str) -> None:
    """Assert that no line tells of a fault of the gateway's own."""
    bad = [
        line
        for line in log.splitlines()
        if any(word in line for word in BUGS) and not any(word in line for word in NOT_BUGS)
    ]
    assert bad == [], "\n".join(bad[:20])


async def _hold(world: World) -> None:
    workers = await world.workers()
    sessions = await world.sessions()
    _sessions_live(workers, sessions)
    _slots_add_up(workers, sessions)
    containers = await asyncio.to_thread(world.containers)
    again = await world.workers()
    _containers_are_workers(containers, [worker for worker in workers if worker in again or _is_in(worker, again)])
    _nothing_else_is_left(world, {str(worker["id"]) for worker in again})
    await asyncio.to_thread(_keys_are_at_home, world, again, await world.sessions())


def _is_in(worker: dict[str, Any], workers: list[dict[str, Any]]) -> bool:
    return any(worker["id"] == other["id"] for other in workers)


def _sessions_live(workers: list[dict[str, Any]], sessions: list[dict[str, Any]]) -> None:
    stuck = [session for session in sessions if session["state"] in ("opening", "closing")]
    assert stuck == [], f"stuck sessions: {stuck}"
    ids = {worker["id"] for worker in workers}
    lost = [session for session in sessions if session["worker"] not in ids]
    assert lost == [], f"sessions of workers that are gone: {lost}"


def _slots_add_up(workers: list[dict[str, Any]], sessions: list[dict[str, Any]]) -> None:
    for worker in workers:
        held = [session for session in sessions if session["worker"] == worker["id"]]
        assert worker["used"] == len(held), f"{worker} holds {len(held)} sessions"
        assert worker["used"] <= worker["slots"], f"more sessions than slots: {worker}"
        assert worker["state"] != "starting", f"a worker still starts: {worker}"


def _containers_are_workers(containers: list[Any], workers: list[dict[str, Any]]) -> None:
    there = {container.attrs["Labels"].get(WORKER_LABEL) for container in containers}
    known = {worker["id"] for worker in workers}
    assert there - known == set(), f"containers that are no workers: {there - known}"
    assert known - there == set(), f"workers without a container: {known - there}"
    dead = [container.attrs.get("State") for container in containers if container.attrs.get("State") == "exited"]
    assert dead == [], f"dead containers: {dead}"


def _nothing_else_is_left(world: World, workers: set[str]) -> None:
    label = {"label": f"{INSTANCE_LABEL}={world.instance}"}
    assert world.engine.networks.list(filters=label) == [], "networks are left"
    assert world.engine.volumes.list(filters=label) == [], "volumes are left"
    folders = {entry.name for entry in world.sockets.iterdir()} if world.sockets.exists() else set()
    assert folders <= workers, f"socket folders without a worker: {folders - workers}"


def _keys_are_at_home(world: World, workers: list[dict[str, Any]], sessions: list[dict[str, Any]]) -> None:
    alive = {str(each["id"]) for each in [*workers, *sessions]} | set(world.environments)
    waits = {"ticket", "queue", "waits", "line", "queues"}
    with world.database() as database:
        keys = [str(key) for key in database.scan_iter(match="*", count=1000)]
        astray = [key for key in keys if not _is_at_home(key, alive, waits) and _lasts(database, key)]
        assert astray == [], f"keys of nothing that lives: {astray[:10]} ({len(astray)} of {len(keys)})"
        _free_slots_add_up(database, workers)


def _lasts(database: redis.Redis, key: str) -> bool:
    """Whether it is there and would stay; -2 is one that is gone by now."""
    return int(database.ttl(key)) == -1


def _is_at_home(key: str, alive: set[str], waits: set[str]) -> bool:
    kind, colon, name = key.removeprefix(PREFIX).partition(":")
    if not key.startswith(PREFIX) or kind in waits:
        return False  # nobody waits at rest
    return not colon or any(part in alive for part in name.split(":"))


def _free_slots_add_up(database: redis.Redis, workers: list[dict[str, Any]]) -> None:
    for worker in workers:
        offered: Any = database.zrange(f"{PREFIX}free:{worker['environment']}", 0, -1, withscores=True)
        # A member ends with the id; what stands before it is the store's own.
        score = next((score for member, score in offered if str(member).endswith(worker["id"])), None)
        has_room = worker["state"] == "ready" and worker["used"] < worker["slots"]
        assert score is None or has_room, f"offered although it has no room: {worker}"
        assert score is not None or not has_room, f"not offered although it has room: {worker}"
        assert score is None or int(score) == worker["used"], f"{worker} is listed with {score} held"

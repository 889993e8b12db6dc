"""Invariants of a gateway at rest after any fault: nothing leaked, nothing is stuck, nothing is invented.

A Redis key is in order if it expires, if it is the only one of its kind, or if it names something that exists. The
checks therefore need no list of all kinds of keys.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import redis

from gateway.adapters import IDENTITY
from tests.deadlines import HANG_S
from tests.faults.world import PREFIX, WORKER_LABEL, World
from tests.wire.stack import INSTANCE_LABEL

PAUSE_S = 0.2
"""Seconds between two checks. Each check also queries the engine, which has other work."""
BUGS = ("\nTraceback", "_broken ", "tick_failed", "audit_failed", "notes_failed", "pool_task_failed", "ping_failed")
"""Words of a log line that report a bug of the gateway. A tool that fails in a worker is not a bug."""
NOT_BUGS = ("call_broken", "engine_events_broken")


async def at_rest(world: World) -> None:
    """Return once all invariants hold.

    Raises:
        AssertionError: An invariant does not hold after `HANG_S`. The error names the first.
    """
    deadline = time.monotonic() + HANG_S
    while True:
        try:
            await hold(world)
            break
        except AssertionError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(PAUSE_S)
    no_bugs(world.log)


async def nothing_left(world: World) -> None:
    """Return once no worker, session or key of a session is left. Its environments must keep no idle worker."""
    deadline = time.monotonic() + HANG_S
    while True:
        try:
            await hold(world)
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
    """Assert that no log line reports a bug of the gateway."""
    bad = [
        line
        for line in log.splitlines()
        if any(word in line for word in BUGS) and not any(word in line for word in NOT_BUGS)
    ]
    assert bad == [], "\n".join(bad[:20])


async def hold(world: World) -> None:
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
        counted = {f"{PREFIX}owned:{session['owner']}" for session in sessions}
        astray = [key for key in keys if not _is_at_home(key, alive, waits) and _lasts(database, key)]
        astray = [key for key in astray if key not in counted]
        assert astray == [], f"keys of nothing that lives: {astray[:10]} ({len(astray)} of {len(keys)})"
        owned = {str(member) for key in counted for member in database.zrange(key, 0, -1)}
        held = {f"{session['environment']}:{session['id']}" for session in sessions}
        assert owned == held, f"the sessions of owners: {owned ^ held}"
        _free_slots_add_up(database, workers)


def _lasts(database: redis.Redis, key: str) -> bool:
    """Return True if the key exists and has no expiry. Redis answers -2 for a missing key."""
    return int(database.ttl(key)) == -1


def _is_at_home(key: str, alive: set[str], waits: set[str]) -> bool:
    kind, colon, name = key.removeprefix(PREFIX).partition(":")
    if not key.startswith(PREFIX) or kind in waits:
        return False  # no opening waits at rest
    if name == IDENTITY:
        return True  # lives as long as the store
    # Task records name the environment and the version of its scorer.
    return not colon or any(part in alive for part in re.split("[:#]", name))


def _free_slots_add_up(database: redis.Redis, workers: list[dict[str, Any]]) -> None:
    for worker in workers:
        offered: Any = database.zrange(f"{PREFIX}free:{worker['environment']}", 0, -1, withscores=True)
        # A member ends with the id. The store chooses the text before it.
        score = next((score for member, score in offered if str(member).endswith(worker["id"])), None)
        has_room = worker["state"] == "ready" and worker["used"] < worker["slots"]
        assert score is None or has_room, f"offered although it has no room: {worker}"
        assert score is not None or not has_room, f"not offered although it has room: {worker}"
        assert score is None or int(score) == worker["used"], f"{worker} is listed with {score} held"

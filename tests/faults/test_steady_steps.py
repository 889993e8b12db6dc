"""Steps of open sessions send nothing to the store: a replica writes its notes of all its sessions together."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import redis

from gateway.stores.redis.client import scripts
from tests.deadlines import HANG_S
from tests.fakes.eventually import until
from tests.faults.invariants import nothing_left
from tests.faults.players import counted, delete_all, open_many
from tests.faults.world import World, environment_toml, running

SESSIONS = 30
ROUNDS = 10
"""Number of rounds. In each round every session takes a step."""
NOTES = 3
"""Least number of writes of notes during the rounds."""
WITHIN_ROUNDS = 2000
MARK = "the-test-listens"


async def test_a_step_sends_nothing_to_the_store_and_the_notes_of_all_sessions_are_written_together() -> None:
    with running(environment_toml("unruly", pool={"slots": SESSIONS, "max_workers": 1})) as world:
        async with world.http() as http:
            episodes = await open_many(http, "unruly", SESSIONS)
            ids = {str(session["id"]) for session in await world.sessions()}
            with overheard(world) as commands:
                await until(lambda: any(MARK in command for command in commands))
                for done in range(WITHIN_ROUNDS):
                    if done >= ROUNDS and len(_naming(commands, ids)) >= NOTES:
                        break
                    await asyncio.gather(*(counted(episode) for episode in episodes))
                said = _naming(commands, ids)
            await delete_all(episodes)
        await nothing_left(world)

    assert len(said) >= NOTES
    assert {command.split()[1] for command in said} == {scripts()["touch"].sha}, said
    named = [sum(id in command for id in ids) for command in said]
    assert max(named) == SESSIONS, named
    assert sum(named) >= 5 * len(named), named  # also on a machine that needs more than a second for a round


def _naming(commands: list[str], ids: set[str]) -> list[str]:
    """Return the commands that contain one of these sessions' ids."""
    return [command for command in list(commands) if any(id in command for id in ids)]


@contextlib.contextmanager
def overheard(world: World) -> Iterator[list[str]]:
    """Yield all commands that Redis gets, except those inside scripts. `MARK` is the first."""
    heard: list[str] = []
    with world.database() as listening, listening.monitor() as monitor:
        following = threading.Thread(target=_follow, args=(monitor, heard), daemon=True)
        following.start()
        with world.database() as other:
            other.echo(MARK)
        try:
            yield heard
        finally:
            monitor.connection.disconnect()
            following.join(HANG_S)


def _follow(monitor: redis.client.Monitor, heard: list[str]) -> None:
    with contextlib.suppress(Exception):  # a closed connection may end with any error of the library
        for said in monitor.listen():  # type: ignore[no-untyped-call]  # redis-py's own gap
            if said["client_type"] != "lua":
                heard.append(said["command"])

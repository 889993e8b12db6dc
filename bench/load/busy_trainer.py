"""A trainer at the limits of its key. Run it as ``python -m bench.load.busy_trainer PORT KEY TOOL SESSIONS OPENERS``.

It holds all the sessions that its key may have and steps them without a pause. Many more of its openings wait all the
time. On SIGTERM it deletes its sessions, prints the number of its calls, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys

import uvloop

from bench.load.closed_loop import FAILURES
from bench.load.episodes import Episode
from bench.load.http1 import Address, connect

READY = r"busy_with port=(\d+)"
"""Pattern of the line that it prints when it is at its limits."""
CALLS = r"busy_calls=(\d+)"
"""Pattern of its last line."""
RETRY_S = (0.05, 0.15)
"""Shortest and longest pause of a waiting opener after a refusal. Equal pauses would send all retries together."""
SETTLE_S = 0.3
"""Seconds until the first openings of all openers have arrived and wait."""


async def run(address: Address, key: str, tool: str, *, sessions: int, openers: int) -> None:
    """Be busy with *tool* until SIGTERM.

    Raises:
        WrongAnswer, OSError, ProtocolError: A session did not open, or a call failed.
    """
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    counted, opened = [0], []
    try:
        for _ in range(sessions):
            episode = Episode(await connect(address), key=key, tool=tool)
            opened.append(episode)
            await episode.create()
            await episode.prompt()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_open(address, key)) for _ in range(openers)]
            await asyncio.sleep(SETTLE_S)
            tasks += [group.create_task(_step(episode, counted)) for episode in opened]
            print(f"busy_with port={address.port}", flush=True)
            await ended.wait()
            for task in tasks:
                task.cancel()
    finally:
        for episode in opened:
            episode.connection.close()
            # Over a new connection: the cancelled call may have left half an answer.
            with contextlib.suppress(*FAILURES):
                episode.attach(await connect(address))
                await episode.delete()
                episode.connection.close()
        print(f"busy_calls={counted[0]}", flush=True)


async def _step(episode: Episode, counted: list[int]) -> None:
    while True:
        await episode.call(counted[0])
        counted[0] += 1


async def _open(address: Address, key: str) -> None:
    """Try to open a session again and again. At the limit, each opening waits or is refused."""
    while True:
        connection = await connect(address)
        try:
            await Episode(connection, key=key).create()
        except FAILURES:
            await asyncio.sleep(random.uniform(*RETRY_S))
        finally:
            connection.close()


if __name__ == "__main__":
    _port, _key, _tool, _sessions, _openers = sys.argv[1:]
    uvloop.run(run(Address(port=int(_port)), _key, _tool, sessions=int(_sessions), openers=int(_openers)))

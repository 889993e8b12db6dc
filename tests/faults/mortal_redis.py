"""A Redis that tests kill, strip of all or part of its data, or suspend."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import redis

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually_now, until
from tests.faults.world import World
from tests.runner import logs
from tests.wire.stack import Redis

LOOK_EVERY_S = 0.05


class MortalRedis(Redis):
    """A Redis server on its own Unix socket. Its data are in a folder that is removed with it.

    Args:
        keeps_all: The server writes everything immediately: a kill loses no data. Otherwise it keeps what `save` wrote.
        variables: Environment variables of the server process.
    """

    def __init__(self, folder: Path, *, keeps_all: bool = False, variables: Mapping[str, str] | None = None) -> None:
        super().__init__(folder)
        self._at = folder
        self._keeps_all = keeps_all
        self._variables = dict(variables or {})
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server with the data on disk, and wait until it answers."""
        command = [
            "redis-server",
            "--port",
            "0",
            "--unixsocket",
            str(self.socket),
            "--dir",
            str(self._at),
            "--save",
            "",
        ]
        command += ["--appendonly", "yes" if self._keeps_all else "no", "--appendfsync", "always"]
        with (self._at / "redis.log").open("ab") as log:
            logs.follow(self._at / "redis.log")
            self._server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | self._variables)
        eventually_now(self._expect_answer)

    def stop(self) -> None:
        if self._server is not None:
            self._server.send_signal(signal.SIGCONT)
            self.kill()

    def kill(self) -> None:
        """Kill the server, as a crash would."""
        assert self._server is not None
        self._server.kill()
        self._server.wait(HANG_S)

    def save(self) -> None:
        """Save the present state. A later start restores it and nothing newer."""
        with redis.Redis(unix_socket_path=str(self.socket)) as client:
            client.save()

    def forget(self) -> None:
        """Delete the data that `save` wrote."""
        (self._at / "dump.rdb").unlink(missing_ok=True)

    def pause(self) -> None:
        """Suspend the server until `go_on`: it accepts connections and does not answer."""
        assert self._server is not None
        self._server.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._server is not None
        self._server.send_signal(signal.SIGCONT)

    def _expect_answer(self) -> None:
        assert self._server is not None
        if self._server.poll() is not None:
            raise RuntimeError((self._at / "redis.log").read_text()[-4000:])
        self._answers()


def mortal(world: World) -> MortalRedis:
    """Return the world's Redis."""
    assert isinstance(world.redis, MortalRedis)
    return world.redis


async def is_whole(world: World, rebuilt_before: int) -> None:
    """Return once the store was rebuilt after *rebuilt_before* rebuilds, and every replica reports it as whole."""
    await until(lambda: world.log.count("store_rebuilt") > rebuilt_before)
    deadline = time.monotonic() + HANG_S
    while await world.metric("gateway_store_whole") != len(world.gateways):
        assert time.monotonic() < deadline
        await asyncio.sleep(LOOK_EVERY_S)

"""A Redis that is killed, loses its data or a part of them, and is stopped in mid-life."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import redis

from tests.deadlines import scaled
from tests.fakes.eventually import eventually_now, until
from tests.faults.world import World
from tests.wire.stack import Redis

LOOK_EVERY_S = 0.05


class MortalRedis(Redis):
    """A server of its own on a Unix socket; its data lie in a folder that goes with it.

    Args:
        keeps_all: It writes everything at once, so that a kill loses nothing. Otherwise it keeps what `save` wrote.
        variables: Of its process.
    """

    def __init__(self, folder: Path, *, keeps_all: bool = False, variables: Mapping[str, str] | None = None) -> None:
        super().__init__(folder)
        self._at = folder
        self._keeps_all = keeps_all
        self._variables = dict(variables or {})
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it with the data that there are, and wait until it answers."""
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
            self._server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | self._variables)
        eventually_now(self._expect_answer)

    def stop(self) -> None:
        if self._server is not None:
            self._server.send_signal(signal.SIGCONT)
            self.kill()

    def kill(self) -> None:
        """End it as a crash would."""
        assert self._server is not None
        self._server.kill()
        self._server.wait(scaled(20))

    def save(self) -> None:
        """Keep the present state: it is what comes back, however much happens until it is killed."""
        with redis.Redis(unix_socket_path=str(self.socket)) as client:
            client.save()

    def forget(self) -> None:
        """Keep nothing of what `save` wrote."""
        (self._at / "dump.rdb").unlink(missing_ok=True)

    def pause(self) -> None:
        """Let it take connections and say nothing, until `go_on`."""
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
    """The world's Redis."""
    assert isinstance(world.redis, MortalRedis)
    return world.redis


async def is_whole(world: World, rebuilt_before: int) -> None:
    """Return when the store was rebuilt once more, and every replica knows."""
    await until(lambda: world.log.count("store_rebuilt") > rebuilt_before, within_s=60)
    deadline = time.monotonic() + scaled(60)
    while await world.metric("gateway_store_whole") != len(world.gateways):
        assert time.monotonic() < deadline
        await asyncio.sleep(LOOK_EVERY_S)

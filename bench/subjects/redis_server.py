"""A Redis of the run's own, on a Unix socket, and what it counts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import redis

from bench.subjects.processes import STOP_S, StartError, Usage, usage

START_S = 30.0
LOOK_S = 0.05
ANSWER_S = 10.0


@dataclass(frozen=True, slots=True)
class Counted:
    """What Redis had done at one moment."""

    reads: int
    """How often it read from a connection: a pipeline is read at once, so this counts round trips."""
    commands: int
    """Those within scripts, too."""


class RedisServer:
    """One server.

    Args:
        folder: For its socket, log and data; its path must fit into a socket's address.
        keeps: Whether it writes its data down, so that it has them again after a restart.
    """

    def __init__(self, folder: Path, *, keeps: bool = False) -> None:
        self._folder = folder
        self._keeps = keeps
        self._process: Process | None = None
        self.socket = folder / "redis.sock"

    @property
    def url(self) -> str:
        """What a gateway calls it by."""
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        """The process's number, 0 before it was started."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Start it, with the data that it had if it keeps them, and wait until it answers.

        Raises:
            StartError: there is no such program, or it does not answer within ``START_S``.
        """
        command = ["redis-server", "--port", "0", "--unixsocket", str(self.socket), "--save", ""]
        command += ["--appendonly", "yes" if self._keeps else "no", "--appendfsync", "always"]
        with (self._folder / "redis.log").open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *command, cwd=self._folder, stdin=DEVNULL, stdout=log, stderr=STDOUT, start_new_session=True
                )
            except FileNotFoundError as error:
                raise StartError("no redis-server; scripts/redis installs it") from error
        until = time.monotonic() + START_S
        while not await asyncio.to_thread(self._answers):
            if self._process.returncode is not None or time.monotonic() > until:
                await self.stop()
                raise StartError(f"redis-server is not ready: {(self._folder / 'redis.log').read_text()[-500:]}")
            await asyncio.sleep(LOOK_S)

    async def stop(self) -> None:
        """End it, also where it is paused; a second time does nothing."""
        if self._process is None or self._process.returncode is not None:
            return
        self.go_on()
        self._process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
                return
        self._process.kill()
        await self._process.wait()

    def pause(self) -> None:
        """Let it do nothing until `go_on`."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def usage(self) -> Usage:
        """What the process has used."""
        return usage(self.pid)

    async def counted(self) -> Counted:
        """What it has done so far; asking is counted, too: one of each.

        Raises:
            redis.RedisError: it does not answer.
        """
        return await asyncio.to_thread(self._counted)

    @contextlib.contextmanager
    def client(self) -> Iterator[redis.Redis]:
        """A connection past the gateway, for code that may block."""
        with redis.Redis(
            unix_socket_path=str(self.socket), decode_responses=True, socket_timeout=ANSWER_S
        ) as connection:
            yield connection

    def _counted(self) -> Counted:
        with self.client() as connection:
            stats = connection.info("stats")
        return Counted(int(stats["total_reads_processed"]), int(stats["total_commands_processed"]))

    def _answers(self) -> bool:
        try:
            with self.client() as connection:
                return bool(connection.ping())
        except redis.RedisError:
            return False


@contextlib.asynccontextmanager
async def redis_server(folder: Path, *, keeps: bool = False) -> AsyncIterator[RedisServer]:
    """Run a Redis; it is ended on leaving."""
    server = RedisServer(folder, keeps=keeps)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()

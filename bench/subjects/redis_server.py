"""The run's own Redis, on a Unix socket, and its counters."""

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
    """Redis' counters at one moment."""

    reads: int
    """Number of reads from a connection. Redis reads a pipeline in one read, so this counts round trips."""
    commands: int
    """Number of commands, including commands within scripts."""


class RedisServer:
    """One Redis server.

    Args:
        folder: Folder for its socket, log and data. Its path must fit into a socket's address.
        keeps: True to write the data to disk, so that they survive a restart.
    """

    def __init__(self, folder: Path, *, keeps: bool = False) -> None:
        self._folder = folder
        self._keeps = keeps
        self._process: Process | None = None
        self.socket = folder / "redis.sock"

    @property
    def url(self) -> str:
        """The store's URL for a gateway."""
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        """The process's number, or 0 before the start."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Start the server, with its kept data if any, and wait until it answers.

        Raises:
            StartError: There is no such program, or it does not answer within ``START_S``.
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
        """End the server, even if it is paused. A second call does nothing."""
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
        """Suspend the process until `go_on`."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Resume the process."""
        os.kill(self.pid, signal.SIGCONT)

    def usage(self) -> Usage:
        """Return the usage of the process."""
        return usage(self.pid)

    async def counted(self) -> Counted:
        """Return the counters so far. Each counter includes one for this request.

        Raises:
            redis.RedisError: It does not answer.
        """
        return await asyncio.to_thread(self._counted)

    @contextlib.contextmanager
    def client(self) -> Iterator[redis.Redis]:
        """Yield a direct connection to Redis, for code that may block."""
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
    """Run a Redis, and end it on leaving."""
    server = RedisServer(folder, keeps=keeps)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()

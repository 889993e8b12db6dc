"""The environment's side of the fork server: jobs with deadlines, and errors by their cause.

The server's own process never generates a puzzle and never scores an answer: both can take seconds, gigabytes, or
forever.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from puzzle_child import LENGTH

MOST_AT_ONCE = 3
"""The number of children at once. Further jobs wait, within their deadline."""
CHILD_MEMORY_BYTES = 256 * 2**20
"""The memory that a child may take beyond what it shares with the fork server."""
START_S = 50.0
"""The longest start of the fork server: its imports take 2 s on an idle core."""


class JobFailed(Exception):
    """The job has no result: the library raised an error, or a limit of CPU time or memory ended the child."""


class JobRefused(ValueError):
    """The job's parameters are wrong; the text states which and what is known."""


class ForksLost(RuntimeError):
    """The fork server or the machine is at fault: no result in time, or a child that something else killed."""


class Forks:
    """The fork server, started on demand, and a client of it. All jobs run on one event loop."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)
        self._starting = asyncio.Lock()

    def start(self) -> None:
        """Start the fork server and wait until it has imported the library.

        Raises:
            ForksLost: It did not start within `START_S`.
        """
        self.stop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # A fixed hash seed: some families iterate over sets. One thread: a fork copies only the thread that forks.
            variables = {
                "PYTHONHASHSEED": "0",
                "OPENBLAS_NUM_THREADS": "1",
                "OMP_NUM_THREADS": "1",
                "MPLBACKEND": "agg",
            }
            command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("puzzle_child.py"))]
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **variables},
            )
        self._control = ours
        ours.settimeout(START_S)
        try:
            said = ours.recv(16)
        except OSError:
            said = b""
        ours.setblocking(False)
        if said != b"ready":
            self.stop()
            raise ForksLost(f"the fork server did not start within {START_S:.0f} s; its standard error has the reason")

    def stop(self) -> None:
        """End the fork server and its children."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    async def run(self, job: Mapping[str, Any], *, cpu_s: int, within_s: float) -> dict[str, Any]:
        """Do *job* in a child that may use *cpu_s* seconds of CPU time, and return its answer.

        A cancelled call ends its child.

        Raises:
            JobFailed: The library raised an error, or the child exceeded a limit.
            JobRefused: The parameters are wrong.
            ForksLost: There was no answer within *within_s* seconds, with the wait for a free child.
        """
        limits = {"cpu_s": cpu_s, "memory_bytes": CHILD_MEMORY_BYTES}
        sent = json.dumps({**job, **limits}).encode()
        try:
            async with asyncio.timeout(within_s), self._slots:
                written = await self._exchange(LENGTH.pack(len(sent)) + sent)
        except TimeoutError:
            raise ForksLost(f"no answer within {within_s:.0f} s: the machine is too busy") from None
        lines = [line for line in written.split(b"\n") if line]
        if not lines:
            raise ForksLost("a child ended without an answer")
        answer: dict[str, Any] = json.loads(lines[-1])
        if "refused" in answer:
            raise JobRefused(answer["refused"])
        if "failed" in answer:
            raise JobFailed(answer["failed"])
        if how := answer.get("died"):
            if how == "SIGKILL":  # no limit of the child kills so, but the kernel's lack of memory does
                raise ForksLost("a child was killed from outside: the worker's memory is probably used up")
            raise JobFailed(f"it took more than {cpu_s} s of CPU time" if how == "SIGXCPU" else f"it died of {how}")
        return answer

    async def _exchange(self, sent: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                await self._hand_over(theirs)
            ours.setblocking(False)
            await loop.sock_sendall(ours, sent)
            received = bytearray()
            while part := await loop.sock_recv(ours, 2**16):
                received += part
        return bytes(received)

    async def _hand_over(self, theirs: socket.socket) -> None:
        async with self._starting:
            try:
                if self._control is not None:
                    socket.send_fds(self._control, [b"j"], [theirs.fileno()])
                    return
            except OSError:  # it has died
                pass
            await asyncio.to_thread(self.start)
            assert self._control is not None
            socket.send_fds(self._control, [b"j"], [theirs.fileno()])

"""Read the last part of a process' output, so that a flood exhausts neither memory nor the event loop.

Also give each local third-party server a port, and end it together with the gateway.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from gateway.core.errors import StartFailed

KEPT_BYTES = 64 * 1024
"""Bytes of output that are kept: about 600 lines, enough to see why a worker died."""
CHUNK_BYTES = 256 * 1024
PAUSE_S = 0.005
"""Seconds of pause after a large chunk, as in a flood. At most 50 MB/s are read, so the event loop stays responsive."""


class Tail:
    """Keeps the last ``KEPT_BYTES`` of a stream."""

    def __init__(self) -> None:
        self._kept = bytearray()

    async def read(self, descriptor: int) -> None:
        """Read a pipe to its end and close it; a flooding writer is slowed down, never stopped."""
        stream = asyncio.StreamReader(limit=CHUNK_BYTES)
        protocol = asyncio.StreamReaderProtocol(stream)
        pipe = os.fdopen(descriptor, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
        try:
            while chunk := await stream.read(CHUNK_BYTES):
                self._kept += chunk[-KEPT_BYTES:]
                del self._kept[:-KEPT_BYTES]
                if len(chunk) >= KEPT_BYTES:
                    await asyncio.sleep(PAUSE_S)
        finally:
            transport.close()

    def lines(self, count: int) -> str:
        """Return the last *count* lines with their line ends."""
        text = self._kept.decode("utf-8", "replace")
        return "".join(text.splitlines(keepends=True)[-count:]) if count > 0 else ""


PORTS_TRIED: Final = 200
PLACEHOLDER: Final = "{port}"
_TIED: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the gateway ended before its worker began")
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot run {sys.argv[2]}: {error.strerror}")
"""
"""Script that runs a command which the kernel kills when the gateway ends (``PR_SET_PDEATHSIG``)."""


PORTS: Final = range(10_000, 20_000)
"""Ports of local third-party servers. Until its server listens, a port of the kernel's ephemeral range (from 32768 on
Linux) could go to any outgoing connection, or to another program's server."""


def free_port(*, but: Collection[int] = ()) -> int:
    """Return a loopback port of `PORTS` that is free now and not in *but*, the ports of servers that may not listen.

    Raises:
        StartFailed: All of the ports that were tried are in use.
    """
    for port in random.sample(PORTS, PORTS_TRIED):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", port))
            if port not in but:
                return port
    raise StartFailed(f"no port from {PORTS.start} to {PORTS.stop - 1} is free for a third-party server")


def with_port(words: tuple[str, ...], port: int) -> tuple[str, ...]:
    """Replace each ``{port}`` in *words*."""
    return tuple(word.replace(PLACEHOLDER, str(port)) for word in words)


def is_program(program: str, folder: Path, path: str) -> bool:
    """Return True if *program* can be run in *folder* with *path* as ``PATH``."""
    if os.sep in program:
        return os.access(folder / program, os.X_OK)
    return shutil.which(program, path=path) is not None


def tied(command: tuple[str, ...], *, python: str) -> tuple[str, ...]:
    """Return *command* wrapped so that the kernel kills it whenever this process ends.

    Only Linux supports this. On other systems the server survives if this process is killed.
    """
    if not sys.platform.startswith("linux"):
        return command
    return (python, "-I", "-S", "-c", _TIED, str(os.getpid()), *command)

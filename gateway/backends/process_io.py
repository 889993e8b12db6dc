"""Read the last part of a process' output, so that a flood exhausts neither memory nor the event loop.

Also give each local third-party server a port, and end it together with the gateway.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Final

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


def free_port(*, but: Collection[int] = ()) -> int:
    """Return a free loopback port outside *but*, the ports of servers that may not listen yet.

    Another process may take the port first. The worker then does not become ready, and the next worker gets another
    port.
    """
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port not in but:
            return port


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

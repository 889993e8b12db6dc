"""The last part of a process' output, read so that a flood costs neither memory nor the event loop.

Local servers of somebody else's: a port for each, and an end together with the gateway.
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
"""About 600 lines: enough to see why a worker died."""
CHUNK_BYTES = 256 * 1024
PAUSE_S = 0.005
"""After a full chunk, so after a flood's: 50 MB/s are read at most, and the loop has most of its time for others."""


class Tail:
    """Keeps the last ``KEPT_BYTES`` of what a stream says."""

    def __init__(self) -> None:
        self._kept = bytearray()

    async def read(self, descriptor: int) -> None:
        """Read a pipe to its end and close it; a writer that floods is slowed down, and never stopped."""
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
        """The last *count* lines, each with its end."""
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
"""``PR_SET_PDEATHSIG``: the kernel kills this process, and what it becomes, when the one that started it ends."""


def free_port(*, but: Collection[int] = ()) -> int:
    """A port of loopback on which nobody listens now, and none of *but*, whose servers may not listen yet.

    Somebody else may be quicker to take it: then the worker does not get ready, and the next one gets another.
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
    """Whether *program* can be run in *folder* with that ``PATH``."""
    if os.sep in program:
        return os.access(folder / program, os.X_OK)
    return shutil.which(program, path=path) is not None


def tied(command: tuple[str, ...], *, python: str) -> tuple[str, ...]:
    """Let *command*, which knows nothing of us, end when this process does, however that ends.

    Where the kernel has no word for it (it is Linux'), it stays when this process is killed.
    """
    if not sys.platform.startswith("linux"):
        return command
    return (python, "-I", "-S", "-c", _TIED, str(os.getpid()), *command)

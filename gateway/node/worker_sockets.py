"""The way to a worker's socket, in a folder that the worker can change at any moment.

The folder itself is the gate's. What is in it may be a link to anywhere, and may be replaced between a look and a
connect: so the file is opened first, without following a link, and what was opened is looked at and connected to.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import Final

CONNECT_S: Final = 2.0
"""How long a worker may leave its queue of connections full."""
PAUSE_S: Final = 0.02
_PATH = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class Unreachable(Exception):
    """There is no way to the worker; with the reason."""


async def connected(sockets: Path, worker: str, name: str) -> socket.socket:
    """Connect to the socket *name* of *worker* (a safe id) below *sockets*; the caller's to close.

    Raises:
        Unreachable: it is not there, is no socket, nobody listens on it, or its queue is full.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + CONNECT_S
    while (connection := _try(sockets, worker, name)) is None:
        if loop.time() >= deadline:
            raise Unreachable(f"worker {worker} takes no connections at {name}")
        await asyncio.sleep(PAUSE_S)
    return connection


def _try(sockets: Path, worker: str, name: str) -> socket.socket | None:
    """Connect; None if the queue is full. A Unix socket connects at once or not at all, so this does not block."""
    with ExitStack() as undo:

        def opened(path: str | Path, flags: int, within: int | None) -> int:
            descriptor = os.open(path, flags, dir_fd=within)
            undo.callback(os.close, descriptor)
            return descriptor

        try:
            root = opened(sockets, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, None)
            folder = opened(worker, _PATH | os.O_DIRECTORY, root)
            file = opened(name, _PATH, folder)
        except OSError as error:
            raise Unreachable(f"worker {worker} has no {name} here: {error.strerror}") from error
        if not stat.S_ISSOCK(os.fstat(file).st_mode):
            raise Unreachable(f"{name} of worker {worker} is not a socket")
        return _connected(f"/proc/self/fd/{file}", f"worker {worker} does not listen at {name}")


def _connected(path: str, otherwise: str) -> socket.socket | None:
    connection: socket.socket | None = None
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        connection.connect(path)
    except OSError as error:
        if connection is not None:
            connection.close()
        if isinstance(error, BlockingIOError):
            return None
        raise Unreachable(f"{otherwise}: {error.strerror}") from error
    return connection

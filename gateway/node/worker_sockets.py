"""Connects to a worker's socket, in a folder that the worker can change at any moment, and tracks requests on it.

The gate owns the folder itself. A file in it may be a link to any path, and the worker may replace it between a check
and the connect. So `connected` opens the file first, without following links, then checks and connects to that file.

`UnderWay` tracks whether a request is under way on a relayed connection. The relay does not interpret HTTP otherwise.
But when its process ends it must know which connections are idle. A worker's response may pause for long between its
first and last byte (events, with a sign of life each 10 s). So `UnderWay` searches for the ends of responses only.
Where it finds no end, a request counts as under way.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import Final

CONNECT_S: Final = 2.0
"""Maximum seconds for which a worker's full connection queue is retried."""
PAUSE_S: Final = 0.02
_PATH = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class Unreachable(Exception):
    """The worker's socket can't be reached. The message has the reason."""


async def connected(sockets: Path, worker: str, name: str) -> socket.socket:
    """Connect to the socket *name* of *worker* (a safe id) below *sockets*. The caller closes the connection.

    Raises:
        Unreachable: The file does not exist or is not a socket, no process listens on it, or its queue stays full.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + CONNECT_S
    while (connection := _try(sockets, worker, name)) is None:
        if loop.time() >= deadline:
            raise Unreachable(f"worker {worker} takes no connections at {name}")
        await asyncio.sleep(PAUSE_S)
    return connection


def _try(sockets: Path, worker: str, name: str) -> socket.socket | None:
    """Return a connection, or None if the queue is full. A Unix socket connects immediately or not at all."""
    with ExitStack() as undo:

        def opened(path: str | Path, flags: int, within: int | None) -> int:
            descriptor = os.open(path, flags, dir_fd=within)
            undo.callback(os.close, descriptor)
            return descriptor

        try:
            root = opened(sockets, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, None)
            folder = opened(worker, _PATH | os.O_DIRECTORY, root)
            file = opened(name, _PATH, folder)
            connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        except OSError as error:
            raise Unreachable(f"worker {worker} has no {name} here: {error.strerror}") from error
        if not stat.S_ISSOCK(os.fstat(file).st_mode):
            raise Unreachable(f"{name} of worker {worker} is not a socket")
        try:
            connection.setblocking(False)
            connection.connect(f"/proc/self/fd/{file}")
        except BlockingIOError:
            return None
        except OSError as error:
            raise Unreachable(f"worker {worker} does not listen at {name}: {error.strerror}") from error
        return socket.socket(fileno=connection.detach())


HEAD_MAX_BYTES: Final = 256 * 1024
"""Maximum bytes of a response's head. The end of a response with a longer head is not searched for."""
_END: Final = b"\r\n0\r\n\r\n"
"""The end of a chunked body without trailers, with the CRLF that ends the previous chunk or the head."""
_BODY = re.compile(rb"\r\n(?:content-length:[ \t]*([0-9]{1,18})[ \t]*\r|transfer-encoding:[^\r]*chunked)", re.I)
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})")
_WITHOUT_BODY: Final = frozenset((b"204", b"304"))


class UnderWay:
    """Tracks whether a request is under way on one relayed connection."""

    __slots__ = ("_head", "_in_head", "_is_endless", "_left", "_tail", "is_under_way")

    def __init__(self) -> None:
        self.is_under_way = False
        """True from a request's first byte to the worker until the end of the response."""
        self._in_head = False
        self._is_endless = False
        self._head = b""
        self._left: int | None = 0
        """Remaining bytes of the body; None for a chunked body, whose last chunk is searched for."""
        self._tail = b""

    def asked(self) -> None:
        """Note that bytes go to the worker."""
        if not self.is_under_way:
            self.is_under_way = self._in_head = True
            self._head = self._tail = b""

    def answered(self, data: bytes) -> None:
        """Note that *data* comes from the worker."""
        if self._in_head:
            self._look_at_head(data)
        elif self._is_endless:
            return
        elif self._left is not None:
            self._left -= len(data)
            self.is_under_way = self._left > 0
        else:
            self._look_for_end(data)

    def _look_at_head(self, data: bytes) -> None:
        head = self._head + data
        end = head.find(b"\r\n\r\n")
        if end < 0:
            self._head = head
            if len(head) > HEAD_MAX_BYTES:
                self._never_ends()
            return
        status = _STATUS.match(head)
        rest = len(head) - end - 4
        if status is None or status[1] == b"101":
            self._never_ends()  # another protocol, which uses the connection until it closes
            return
        if status[1].startswith(b"1"):
            self._head = b""
            self._look_at_head(head[end + 4 :])  # an interim response; the final response follows
            return
        self._in_head, self._head = False, b""
        body = _BODY.search(head, 0, end + 4)
        if status[1] in _WITHOUT_BODY:
            self.is_under_way = False
        elif body is None:
            self._never_ends()  # the body ends with the connection
        elif body[1] is None:
            self._left = None
            self._look_for_end(head[end:])
        else:
            self._left = int(body[1]) - rest
            self.is_under_way = self._left > 0

    def _look_for_end(self, data: bytes) -> None:
        self._tail = data[-len(_END) :] if len(data) >= len(_END) else (self._tail + data)[-len(_END) :]
        self.is_under_way = self._tail != _END

    def _never_ends(self) -> None:
        self._in_head, self._head, self._is_endless = False, b"", True

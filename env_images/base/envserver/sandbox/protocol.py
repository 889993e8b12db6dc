"""Messages between the server and its spawner and supervisors: one JSON object and up to four open files each.

They travel over a ``SOCK_SEQPACKET`` pair, so a message arrives whole or not at all. A long message travels as a memory
file.
"""

import array
import json
import os
import socket
from collections.abc import Mapping, Sequence

MOST_FILES = 4
MOST_BYTES = 8 * 1024 * 1024
"""Maximum size of a message, including arguments and environment. The kernel accepts at most 6 MiB of them for one
program."""
_INLINE_BYTES = 60 * 1024
"""Maximum size of a message in the socket, well below the 208 KiB that a socket's buffer holds by default."""

Message = Mapping[str, object]


def send(sock: socket.socket, message: Message, files: Sequence[int] = ()) -> None:
    """Send *message*. *files* stay open in this process.

    Raises:
        ValueError: The message is longer than MOST_BYTES.
        OSError: The peer is gone, or has not read for a while on a non-blocking socket.
    """
    data = json.dumps(message, separators=(",", ":")).encode("utf-8", "surrogatepass")
    if len(data) > MOST_BYTES:
        raise ValueError(f"a request of {len(data)} bytes; at most {MOST_BYTES}")
    if len(data) <= _INLINE_BYTES:
        _send(sock, b"=" + data, files)
        return
    carrier = os.memfd_create("message", os.MFD_CLOEXEC)
    try:
        with open(carrier, "wb", closefd=False) as file:
            file.write(data)
        _send(sock, b"@", [*files, carrier])
    finally:
        os.close(carrier)


def _send(sock: socket.socket, data: bytes, files: Sequence[int]) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    sock.sendmsg([data], ancillary)


def receive(sock: socket.socket) -> tuple[dict[str, object], list[int]] | None:
    """Receive one message and its files, which the caller then owns. Return None at the end of the stream.

    Raises:
        BlockingIOError: No message is available now.
    """
    files = array.array("i")
    room = socket.CMSG_SPACE((MOST_FILES + 1) * files.itemsize)
    data, ancillary, _, _ = sock.recvmsg(_INLINE_BYTES + 1, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, body in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(body[: len(body) - len(body) % files.itemsize])
    if not data:
        return None
    fds = list(files)
    text = data[1:]
    if data[:1] == b"@":
        with open(fds.pop(), "rb") as carrier:
            carrier.seek(0)
            text = carrier.read(MOST_BYTES)
    message = json.loads(text)
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return message, fds


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new connection. Neither survives an exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

"""A Unix socket in front of an unmodified TCP server: ``--socket PATH --port N``.

The forwarder runs in its own container in the network namespace of a third-party image. That image therefore needs
neither a network nor a shared folder. The forwarder copies bytes and the end of each direction both ways, unchanged. If
one side does not read, the forwarder stops reading from the other. It holds at most `CHUNK_BYTES` per direction. The
kernel buffers the rest. If the server refuses a connection because it does not listen yet, the forwarder closes the
connection immediately.

Run this module as a file, because the import of its package takes five times as long as the whole module. Without
asyncio it needs half the memory and a fifth of the start time.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys

CHUNK_BYTES = 16 * 1024
MAX_CONNECTIONS = 2048
BACKLOG = 2048
PLACES = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
"""Addresses on which a server may listen that is configured for localhost."""

_READ, _WRITE = select.EPOLLIN, select.EPOLLOUT
_BROKEN = select.EPOLLHUP | select.EPOLLERR


class Side:
    """One end of a connection, with the bytes that wait to be sent to it."""

    __slots__ = ("awaits_place", "has_ended", "is_open", "mask", "other", "pending", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.other: Side = self
        self.pending = b""
        self.mask = -1
        """Watched epoll events. -1: none, not even the end of the connection."""
        self.has_ended = False
        """Whether this side has ended its sending direction."""
        self.is_open = True
        self.awaits_place = -1
        """Index in `PLACES` of the address being connected to. -1: no attempt is pending, or it is the client's
        side."""


class Forwarder:
    """Accepts connections on *listener* and connects to *port* in this network namespace."""

    def __init__(self, listener: socket.socket, port: int) -> None:
        self._listener = listener
        self._port = port
        self._poll = select.epoll()
        self._sides: dict[int, Side] = {}
        self._dropped: list[socket.socket] = []
        self._first_place = 0
        self._is_accepting = False

    def run(self) -> None:
        """Serve until a signal arrives."""
        self._accept_more()
        while True:
            for number, events in self._poll.poll():
                if number == self._listener.fileno():
                    self._accept()
                elif (side := self._sides.get(number)) is not None:  # else closed by an earlier event
                    self._turn(side, events)
            # Close only now. A new socket could reuse a closed socket's number, and this batch may still hold events of
            # the old one.
            while self._dropped:
                self._dropped.pop().close()

    def _accept_more(self) -> None:
        if not self._is_accepting and len(self._sides) < 2 * MAX_CONNECTIONS:
            self._poll.register(self._listener.fileno(), _READ)
            self._is_accepting = True

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # too many open files: without an open connection here, retry immediately
            self._accept_no_more()
            return
        sock.setblocking(False)
        client = Side(sock)
        self._sides[sock.fileno()] = client
        self._connect(client, self._first_place)
        if len(self._sides) >= 2 * MAX_CONNECTIONS:
            self._accept_no_more()

    def _accept_no_more(self) -> None:
        if self._is_accepting and self._sides:
            self._poll.unregister(self._listener.fileno())
            self._is_accepting = False

    def _connect(self, client: Side, place: int) -> None:
        family, host = PLACES[place]
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
            server = Side(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            refused = sock.connect_ex((host, self._port))
        except OSError:  # the address family is missing, or too many files are open
            refused, server = errno.ECONNREFUSED, client
        if refused not in (0, errno.EINPROGRESS):
            if server is not client:
                server.sock.close()
            self._refused(client, place)
            return
        server.other, client.other = client, server
        server.awaits_place = place
        self._sides[server.sock.fileno()] = server
        self._watch(client)  # for its end only, as long as no server is connected
        self._watch(server)

    def _refused(self, client: Side, place: int) -> None:
        """Try the place after *place*, or close the client if all places have failed."""
        following = (place + 1) % len(PLACES)
        if following == self._first_place:
            self._close(client)
        else:
            self._connect(client, following)

    def _turn(self, side: Side, events: int) -> None:
        if side.awaits_place >= 0:
            self._connected(side)
            return
        if side.other.awaits_place >= 0:
            self._close(side)  # the client disconnected before any of its bytes were forwarded
            return
        try:
            if events & _WRITE:
                self._flush(side)
            if events & (_READ | _BROKEN):
                self._read(side, events)
        except OSError:
            self._close(side)

    def _connected(self, server: Side) -> None:
        client, place = server.other, server.awaits_place
        error = server.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        server.awaits_place = -1
        if error:
            self._drop(server)
            client.other = client
            self._refused(client, place)
            return
        self._first_place = place
        self._watch(server)
        self._watch(client)

    def _read(self, side: Side, events: int) -> None:
        other = side.other
        if other.pending:
            # This side has closed, and its earlier bytes cannot be forwarded yet. Stop watching it until then, because
            # this event would repeat endlessly.
            self._forget(side)
            return
        if not side.has_ended:
            try:
                data = side.sock.recv(CHUNK_BYTES)
            except BlockingIOError:
                return
            if data:
                self._send(other, data)
                return
            side.has_ended = True
            other.sock.shutdown(socket.SHUT_WR)
            self._watch(side)
        if other.has_ended or events & _BROKEN:
            self._close(side)

    def _send(self, side: Side, data: bytes) -> None:
        try:
            sent = side.sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            side.pending = data[sent:]
            self._watch(side)
            self._watch(side.other)

    def _flush(self, side: Side) -> None:
        try:
            side.pending = side.pending[side.sock.send(side.pending) :]
        except BlockingIOError:
            return
        if not side.pending:
            self._watch(side)
            self._watch(side.other)

    def _watch(self, side: Side) -> None:
        """Watch for the operations that *side* allows now: reading if there is room, writing if bytes wait."""
        if not side.is_open:
            return
        mask = 0
        if side.awaits_place >= 0:
            mask = _WRITE
        elif side.other.awaits_place < 0:
            if not side.has_ended and not side.other.pending:
                mask |= _READ
            if side.pending:
                mask |= _WRITE
        if side.mask < 0:
            self._poll.register(side.sock.fileno(), mask)
        elif side.mask != mask:
            self._poll.modify(side.sock.fileno(), mask)
        side.mask = mask

    def _forget(self, side: Side) -> None:
        if side.mask >= 0:
            self._poll.unregister(side.sock.fileno())
            side.mask = -1

    def _close(self, side: Side) -> None:
        """Close both sides."""
        self._drop(side)
        self._drop(side.other)
        self._accept_more()

    def _drop(self, side: Side) -> None:
        if side.is_open:
            side.is_open = False
            self._forget(side)
            del self._sides[side.sock.fileno()]
            self._dropped.append(side.sock)


def listen(path: str) -> socket.socket:
    """Listen on the Unix socket *path*, open to every user because the gateway runs as another user."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    os.umask(0)
    listener.bind(path)
    listener.listen(BACKLOG)
    return listener


def main(arguments: list[str]) -> None:
    """Forward until SIGTERM."""
    if len(arguments) != 4 or arguments[0] != "--socket" or arguments[2] != "--port" or not arguments[3].isdigit():
        sys.exit("usage: forwarder --socket PATH --port N")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    Forwarder(listen(arguments[1]), int(arguments[3])).run()


if __name__ == "__main__":
    main(sys.argv[1:])

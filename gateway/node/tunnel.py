"""Relays connections of gateways on other machines, over TLS, to the Unix sockets of this machine's workers.

A connection starts with one line, ``EG1 WORKER/SOCKET``. The node answers ``+``, or ``-REASON`` and closes the
connection. After ``+`` bytes pass both ways until either side closes. There is no TLS half-close: when one side
finishes, the relay writes the buffered bytes and closes both sides.

A gateway may send a request at the moment at which the node's process ends. So the node never closes an idle connection
by itself: it writes `NODE_LEAVES`, forwards nothing that arrives afterwards, and waits until the gateway closes. A
gateway that reads this line instead of an answer may repeat its request.

A worker may be hostile and controls the content of its folder: see `gateway.node.worker_sockets`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Final, cast

from gateway.backends.folders import SOCKET_NAME, is_safe_id
from gateway.core.addresses import FOREIGN_SOCKET, NODE_LEAVES
from gateway.node.worker_sockets import UnderWay, Unreachable, connected

logger = logging.getLogger(__name__)

GREETING: Final = b"EG1 "
LINE_MAX_BYTES: Final = 200
LINE_S: Final = 5.0
"""Maximum seconds from the end of the handshake to the end of the first line."""
HANDSHAKE_S: Final = 10.0
LINGER_S: Final = 30.0
"""Maximum seconds to write the last bytes to a slow reader after the other side has closed, and for a gateway to close
a connection after `NODE_LEAVES`."""
CONNECTIONS_MAX: Final = 8192
HIGH_WATER_BYTES: Final = 256 * 1024
"""Bytes buffered for a side that does not read. Beyond them the relay stops reading from the other side."""
READ_MAX_BYTES: Final = 256 * 1024
"""Maximum bytes of one read, with any event loop."""
_SOCKETS = frozenset((SOCKET_NAME, FOREIGN_SOCKET))


class Tunnel:
    """Relays the connections of one listening socket."""

    def __init__(self, *, sockets: Path, tls: ssl.SSLContext, max_connections: int = CONNECTIONS_MAX) -> None:
        """Set up the relay without accepting connections.

        Args:
            sockets: The folder of the workers' folders.
            tls: The context with this node's certificate, which accepts only gateways.
            max_connections: Maximum number of concurrent connections; further connections are refused.
        """
        self.sockets = sockets
        self.max_connections = max_connections
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._channels: set[_Channel] = set()
        self._is_empty = asyncio.Event()
        self.is_leaving = False

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._channels)

    async def start(self, listener: socket.socket) -> None:
        """Accept connections on *listener* and relay them to workers' sockets, until `drain` closes it."""
        _keep_alive(listener)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Near(_Channel(self)),
            sock=listener,
            ssl=self._tls,
            ssl_handshake_timeout=HANDSHAKE_S,
            ssl_shutdown_timeout=LINGER_S,
        )

    async def drain(self, within_s: float) -> None:
        """Refuse new connections, give up idle ones, and wait at most *within_s* seconds for running requests."""
        self.is_leaving = True
        if self._server is not None:
            self._server.close()
        for channel in list(self._channels):
            channel.leave()
        if self._channels:
            logger.info("relay_draining connections=%d", len(self._channels))
            await self._emptied(within_s)
        if self._channels:
            logger.warning("relay_cut connections=%d", len(self._channels))
            for channel in list(self._channels):
                channel.abort()
            await self._emptied(LINGER_S)

    async def _emptied(self, within_s: float) -> None:
        self._is_empty.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._is_empty.wait()

    def admit(self, channel: _Channel) -> bool:
        """Count *channel*. Return True if it is within the limit."""
        self._channels.add(channel)
        return len(self._channels) <= self.max_connections

    def forget(self, channel: _Channel) -> None:
        """Drop *channel*, both sides of which are closed."""
        self._channels.discard(channel)
        if not self._channels:
            self._is_empty.set()


class _Channel:
    """A gateway's connection, joined to a connection to a worker."""

    def __init__(self, relay: Tunnel) -> None:
        self.relay = relay
        self._under_way = UnderWay()
        self.near: asyncio.Transport | None = None
        self.far: asyncio.Transport | None = None
        self._is_ending = False
        self._early = bytearray()
        """Bytes for the worker that arrived before its connection."""
        self._joining: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, near: asyncio.Transport) -> None:
        """Accept or refuse a gateway's new connection."""
        self.near = near
        near.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        has_room = self.relay.admit(self)
        if not has_room:
            self.refuse(f"this node passes on {self.relay.max_connections} connections already")
        elif self.relay.is_leaving:
            self._dismiss()
        else:
            self._timer = asyncio.get_running_loop().call_later(LINE_S, self.refuse, "the first line took too long")

    def join(self, line: bytes, rest: bytes) -> None:
        """Connect to the worker that *line* names. *rest* holds the first bytes for it."""
        self._stop_clock()
        text = line.decode("ascii", "replace")
        worker, slash, name = text.removeprefix(GREETING.decode()).partition("/")
        if not line.startswith(GREETING) or not slash or not is_safe_id(worker) or name not in _SOCKETS:
            self.refuse("the first line is not EG1 WORKER/SOCKET")
            return
        _pause(self.near)
        self._early += rest
        self._joining = asyncio.get_running_loop().create_task(self._join(worker, name))

    async def _join(self, worker: str, name: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection = await connected(self.relay.sockets, worker, name)
        except Unreachable as error:
            self.refuse(str(error))
            return
        if self._is_ending:
            connection.close()
            return
        try:
            # Never cancelled: uvloop would then not report the connection's end.
            await loop.create_unix_connection(lambda: _Far(self), sock=connection)
        except OSError as error:
            connection.close()
            self.refuse(f"worker {worker} hung up: {error.strerror}")

    def joined(self, far: asyncio.Transport) -> None:
        """Confirm the connection to the worker, and start passing bytes."""
        self.far = far
        if self._is_ending or self.near is None:
            far.abort()
            return
        far.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._under_way.asked()  # its gateway has opened the connection for a request
        self.near.write(b"+\n")
        _resume(self.near)
        if self._early:
            early, self._early = bytes(self._early), bytearray()
            self.to_worker(early)

    def to_worker(self, data: bytes) -> None:
        """Pass bytes from the gateway to the worker."""
        if self._is_ending:
            return
        if self.far is None:
            self._early += data
            if len(self._early) > HIGH_WATER_BYTES + READ_MAX_BYTES:
                self.refuse("too much was sent before this node had answered")
        elif not self.far.is_closing():
            self._under_way.asked()
            self.far.write(data)

    def to_gateway(self, data: bytes) -> None:
        """Pass bytes from the worker to the gateway."""
        if self.near is None or self.near.is_closing():
            return
        self._under_way.answered(data)
        self.near.write(data)
        if self.relay.is_leaving:
            self.leave()

    def refuse(self, reason: str) -> None:
        """Send the gateway the reason of a refusal, and close the connection."""
        if self.near is not None and not self.near.is_closing():
            logger.debug("relay_refused reason=%s", reason)  # debug: a gateway retries often while a worker starts
            self.near.write(f"-{reason}\n".encode("ascii", "replace"))
        self.end()

    def leave(self) -> None:
        """Write `NODE_LEAVES` and close the worker's side, unless a request is under way."""
        if not self._is_ending and not self._under_way.is_under_way:
            self._dismiss()

    def _dismiss(self) -> None:
        self._is_ending = True
        self._stop_clock()
        if self.near is not None:
            self.near.write(NODE_LEAVES)
            _resume(self.near)  # to notice that the gateway closes
        if self.far is not None:
            self.far.close()
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, self.abort)

    def end(self) -> None:
        """Write the buffered bytes and close both sides. Abort a side that does not read them within `LINGER_S`."""
        if self._is_ending:
            return
        self._is_ending = True
        self._stop_clock()
        for transport in (self.near, self.far):
            if transport is not None:
                transport.close()
        if self.near is not None or self.far is not None:
            self._timer = asyncio.get_running_loop().call_later(LINGER_S, self.abort)

    def abort(self) -> None:
        """Close both sides without writing buffered bytes."""
        self._is_ending = True
        for transport in (self.near, self.far):
            if transport is not None:
                transport.abort()

    def lost(self, *, near: bool, broken: bool) -> None:
        """Handle the loss of one side. *broken*: an error ended its connection, not a close."""
        if near:
            self.near = None
        else:
            self.far = None
        if self.near is None and self.far is None:
            self._is_ending = True
            self._stop_clock()
            self.relay.forget(self)
        elif broken:
            self.abort()
        else:
            self.end()

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Near(asyncio.Protocol):
    """The protocol of the gateway's side."""

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel
        self._line = b""
        self._has_line = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._channel.begin(cast(asyncio.Transport, transport))  # uvloop's transports are no subclass

    def data_received(self, data: bytes) -> None:
        if self._has_line:
            self._channel.to_worker(data)
            return
        self._line += data
        line, newline, rest = self._line.partition(b"\n")
        if len(line) >= LINE_MAX_BYTES:
            self._channel.refuse(f"the first line has more than {LINE_MAX_BYTES} bytes")
        elif newline:
            self._has_line, self._line = True, b""
            self._channel.join(line, rest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._channel.lost(near=True, broken=exc is not None)

    def pause_writing(self) -> None:
        _pause(self._channel.far)

    def resume_writing(self) -> None:
        _resume(self._channel.far)


class _Far(asyncio.Protocol):
    """The protocol of the worker's side."""

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._channel.joined(cast(asyncio.Transport, transport))  # uvloop's transports are no subclass

    def data_received(self, data: bytes) -> None:
        self._channel.to_gateway(data)

    def eof_received(self) -> bool:
        self._channel.end()
        return True  # the channel closes the transport after writing the buffered bytes

    def connection_lost(self, exc: Exception | None) -> None:
        # A killed worker breaks its connection, but the gateway must still get the bytes that it sent.
        self._channel.lost(near=False, broken=False)

    def pause_writing(self) -> None:
        _pause(self._channel.near)

    def resume_writing(self) -> None:
        _resume(self._channel.near)


def _pause(transport: asyncio.Transport | None) -> None:
    if transport is not None and not transport.is_closing():
        transport.pause_reading()


def _resume(transport: asyncio.Transport | None) -> None:
    if transport is not None and not transport.is_closing():
        transport.resume_reading()


def _keep_alive(listener: socket.socket) -> None:
    """Let the kernel detect lost gateways. Connections inherit these options from their listener."""
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    ):
        listener.setsockopt(level, option, value)

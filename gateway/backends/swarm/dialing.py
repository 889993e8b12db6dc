"""Connect to workers on other machines: a TLS connection to their node's relay, one line each way, and then raw bytes.

The line ``EG1 WORKER/SOCKET`` names the socket. The node answers ``+`` if it is connected to the socket, or
``-REASON`` if it is not. After ``+`` the caller uses the connection directly, without another protocol layer.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final, cast

from gateway.backends.swarm.gate_sockets import Pipe
from gateway.backends.swarm.nodes import Nodes
from gateway.backends.swarm.reports import Endpoint
from gateway.core.addresses import Address
from gateway.core.placement import NodeId
from gateway.core.ports.transport import P

CONNECT_S: Final = 5.0
"""Seconds for TCP, TLS and the node's connection to the socket. They take milliseconds, or some hundred under load."""
AWAY_S: Final = 60.0
"""Seconds for which a dial to a silent node is retried, unless the node is lost before. Its process may be restarting,
and a retry is safe because no data was sent."""
AWAY_PAUSE_S: Final = 0.1
REFUSED_PAUSE_S: Final = 0.03
"""Seconds of delay before a refusal is raised. A caller that waits for a worker's start retries immediately, and each
attempt costs a handshake."""
MAX_ANSWER_BYTES: Final = 1024
GREETING: Final = "EG1"
FULL: Final = "takes no connections"
"""Reason of a node's refusal if the worker exists but its accept queue is full."""


class NodeDialer:
    """Opens connections to ``node:`` addresses."""

    def __init__(self, nodes: Nodes, *, connect_s: float = CONNECT_S, away_s: float = AWAY_S) -> None:
        """Create the dialer; *connect_s* limits one attempt, and *away_s* all attempts, in seconds."""
        self._nodes = nodes
        self._connect_s = connect_s
        self._away_s = away_s

    async def dial(self, address: Address, factory: Callable[[], P]) -> tuple[asyncio.BaseTransport, P]:
        """Connect to *address*, with retries until the node answers or is lost; see ``core/ports.Dial``.

        Raises:
            ConnectionRefusedError: The node reports that no process listens on the worker's socket.
            OSError: The node is lost or unknown, or does not connect in time.
        """
        self._nodes.begin()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._away_s
        while True:
            endpoint = self._nodes.endpoint(NodeId(address.node))
            try:
                if endpoint is None:
                    raise OSError(f"node {address.node} is not there")
                return await self._dial(address, endpoint, factory)
            except ConnectionRefusedError:
                await asyncio.sleep(REFUSED_PAUSE_S)
                raise
            except OSError:
                if loop.time() >= deadline or not self._nodes.is_expected(NodeId(address.node)):
                    raise
            await asyncio.sleep(AWAY_PAUSE_S)

    async def _dial(
        self, address: Address, endpoint: Endpoint, factory: Callable[[], P]
    ) -> tuple[asyncio.BaseTransport, P]:
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[asyncio.BaseTransport, P]] = loop.create_future()
        hello = _Hello(address, factory, outcome)
        try:
            async with asyncio.timeout(self._connect_s):
                try:
                    await loop.create_connection(
                        lambda: hello,
                        endpoint.host,
                        endpoint.port + 1,
                        ssl=self._nodes.tls,
                        server_hostname=self._nodes.tls_name,
                    )
                except ConnectionRefusedError as error:  # the node's process is away; the worker may be well
                    raise OSError(f"node {address.node} takes no connections") from error
                return await outcome
        except TimeoutError as error:
            hello.abort()
            raise TimeoutError(f"node {address.node} did not connect within {self._connect_s:g} s") from error
        except BaseException:
            hello.abort()
            raise

    async def dial_socket(self, address: Address) -> socket.socket:
        """Return one end of a socket pair whose other end is spliced to the worker; see ``core/ports.DialSocket``."""
        _, far = await self.dial(address, Pipe)
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            theirs.setblocking(False)
            loop = asyncio.get_running_loop()
            _, near = await loop.create_unix_connection(Pipe, sock=theirs)
        except BaseException:
            far.abort()
            ours.close()
            theirs.close()
            raise
        near.join(far)
        return ours


class _Hello(asyncio.Protocol):
    """The connection's protocol until the node has answered."""

    def __init__(
        self, address: Address, factory: Callable[[], P], outcome: asyncio.Future[tuple[asyncio.BaseTransport, P]]
    ) -> None:
        self._address = address
        self._factory: Callable[[], Any] = factory
        self._outcome: asyncio.Future[Any] = outcome
        self._transport: asyncio.Transport | None = None
        self._answer = bytearray()

    def abort(self) -> None:
        """Cancel the dial and drop the connection."""
        if not self._outcome.cancel() and not self._outcome.cancelled():
            self._outcome.exception()  # retrieved here, because its caller has failed already
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass
        self._transport.write(f"{GREETING} {self._address.path}\n".encode("ascii"))

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._answer += data
        line, newline, rest = self._answer.partition(b"\n")
        if not newline and len(line) < MAX_ANSWER_BYTES:
            return
        if line == b"+" and not self._outcome.done():
            # Switch protocols immediately, because the next bytes belong to the new protocol.
            protocol = self._factory()
            self._transport.set_protocol(protocol)
            protocol.connection_made(self._transport)
            if rest:
                protocol.data_received(bytes(rest))
            self._outcome.set_result((self._transport, protocol))
            return
        reason = line.removeprefix(b"-").decode("utf-8", "replace")[:200]
        self._fail(_refusal(self._address, reason))
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionResetError(f"node {self._address.node} closed the connection"))

    def _fail(self, error: OSError) -> None:
        if not self._outcome.done():
            self._outcome.set_exception(error)


def _refusal(address: Address, reason: str) -> OSError:
    """Return the error of a node's refusal.

    It is ``ConnectionRefusedError`` if no process listens on the worker's socket, and ``OSError`` for a condition of
    the node itself, which may be temporary.
    """
    worker = address.path.partition("/")[0]
    text = f"node {address.node}: {reason or 'no reason given'}"
    if f"worker {worker}" in reason and FULL not in reason:
        return ConnectionRefusedError(text)
    return OSError(text)

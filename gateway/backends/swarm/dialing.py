"""The way to workers on other machines: a TLS connection to their node's relay, one line, and then bytes.

The line ``EG1 WORKER/SOCKET`` says which socket is meant; ``+`` says that the node is connected to it, ``-REASON`` that
it is not. From then on the connection is the caller's, without a layer of ours.
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
"""TCP, TLS and the node's own connection to the socket: milliseconds, on a loaded machine some hundred."""
AWAY_S: Final = 60.0
"""How long a node that does not answer is tried, unless it is lost before: its process may be replaced just now, and
nothing was sent yet."""
AWAY_PAUSE_S: Final = 0.1
REFUSED_PAUSE_S: Final = 0.03
"""Before the word that nobody listens there: who waits for a worker's start asks again at once, and each question is a
handshake."""
MAX_ANSWER_BYTES: Final = 1024
GREETING: Final = "EG1"
FULL: Final = "takes no connections"
"""Of a worker that is there, and has a full queue."""


class NodeDialer:
    """Opens connections to ``node:`` addresses."""

    def __init__(self, nodes: Nodes, *, connect_s: float = CONNECT_S, away_s: float = AWAY_S) -> None:
        """*nodes* knows where each node is; *connect_s* bounds one try, *away_s* all."""
        self._nodes = nodes
        self._connect_s = connect_s
        self._away_s = away_s

    async def dial(self, address: Address, factory: Callable[[], P]) -> tuple[asyncio.BaseTransport, P]:
        """Connect, as soon as the node answers if it is not lost; see ``core/ports.Dial``.

        Raises:
            ConnectionRefusedError: the node says that nobody listens there.
            OSError: the node is lost, unknown, or did not connect in time.
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
                except ConnectionRefusedError as error:  # the node's own process is away, and no word on the worker
                    raise OSError(f"node {address.node} takes no connections") from error
                return await outcome
        except TimeoutError as error:
            hello.abort()
            raise TimeoutError(f"node {address.node} did not connect within {self._connect_s:g} s") from error
        except BaseException:
            hello.abort()
            raise

    async def dial_socket(self, address: Address) -> socket.socket:
        """See ``core/ports.DialSocket``: one end of a pair of sockets, whose other end is spliced to the worker."""
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
    """What is on the connection until the node has said yes."""

    def __init__(
        self, address: Address, factory: Callable[[], P], outcome: asyncio.Future[tuple[asyncio.BaseTransport, P]]
    ) -> None:
        self._address = address
        self._factory: Callable[[], Any] = factory
        self._outcome: asyncio.Future[Any] = outcome
        self._transport: asyncio.Transport | None = None
        self._answer = bytearray()

    def abort(self) -> None:
        """Give up."""
        if not self._outcome.cancel() and not self._outcome.cancelled():
            self._outcome.exception()  # looked at: its waiter failed before
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._transport.write(f"{GREETING} {self._address.path}\n".encode("ascii"))

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._answer += data
        line, newline, rest = self._answer.partition(b"\n")
        if not newline and len(line) < MAX_ANSWER_BYTES:
            return
        if line == b"+" and not self._outcome.done():
            # At once: what comes next is the protocol's.
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
    """What a node's refusal means: that nobody listens there, or something about the node itself, which may pass."""
    worker = address.path.partition("/")[0]
    text = f"node {address.node}: {reason or 'no reason given'}"
    if f"worker {worker}" in reason and FULL not in reason:
        return ConnectionRefusedError(text)
    return OSError(text)

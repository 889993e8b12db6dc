"""Sends requests to workers over keep-alive connections and passes bodies as bytes: the hot path of every call.

A connection belongs to a worker's id, not to its address. A new worker at a reused address therefore never gets an old
connection. A request may have run once a byte of it was written, so the transport repeats none, with one exception: the
worker's node answered that its process ends and that it forwarded nothing.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from functools import cache
from typing import Final

import anyio

from gateway.core.addresses import parse_address
from gateway.core.errors import ReplicaLeft, UpstreamError, UpstreamGone, UpstreamTimeout
from gateway.core.faults import FAULTS_HEADER, RESULT_HEADER, Fault, read_faults
from gateway.core.ids import WorkerId
from gateway.core.ports.transport import Dial, Headers, Request
from gateway.upstreams.http1 import Http1Connection, NodeLeft, Target

CONNECT_S: Final = 5.0
"""Seconds to connect to a worker. A local worker accepts within microseconds, unless it is gone or stopped."""
NODE_CONNECT_S: Final = 65.0
"""Seconds to connect to a worker on another machine. The dialer waits for the node until the node counts as lost."""
KEEP_FOREIGN_S: Final = 2.0
"""Seconds for which an idle connection to a third-party server is reused.

Most third-party servers run uvicorn, which closes an idle connection after 5 s.
"""
MAX_CONNECTIONS: Final = 2048
"""Largest number of connections to one worker. Each call in progress holds one connection."""
MAX_IDLE: Final = 128
"""Idle connections to one worker that are kept without a time limit.

Further idle connections close after `REST_S`, not earlier. A thousand synchronized callers need all their connections
again immediately, and a new connection costs as much as a call.
"""
REST_S: Final = 5.0
"""Seconds for which idle connections beyond `MAX_IDLE` are kept."""


class RelayExchange:
    """A response that arrives over one connection."""

    def __init__(self, pool: _WorkerConnections, connection: Http1Connection) -> None:
        self._pool = pool
        self._connection: Http1Connection | None = connection
        self.status = connection.status
        self.headers: Headers = connection.headers
        self.is_whole = connection.is_complete

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The author faults that the worker reports; see ``Exchange.faults``. Complete after the body was read."""
        return tuple(fault for name, value in self.headers if name == FAULTS_HEADER for fault in read_faults(value))

    @property
    def result(self) -> bytes:
        """The result of an episode that ended; see ``Exchange.result``."""
        return next((value for name, value in self.headers if name == RESULT_HEADER), b"")

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives."""
        return self  # not a generator: the loop registers each one, which costs as much as parsing the response

    def __aiter__(self) -> RelayExchange:
        return self

    async def __anext__(self) -> bytes:
        if self._connection is None or not (chunk := await self._connection.next_chunk()):
            raise StopAsyncIteration
        return chunk

    async def read(self, limit_bytes: int) -> bytes:
        """Read the whole body. Raises ``UpstreamError`` if it exceeds *limit_bytes*."""
        connection = self._connection
        if connection is None:
            return b""
        # Most responses arrive complete, in one piece.
        body = await connection.next_chunk()
        if not connection.is_complete or connection.has_more:
            parts, size = [body], len(body)
            while size <= limit_bytes and (chunk := await connection.next_chunk()):
                parts.append(chunk)
                size += len(chunk)
            body = b"".join(parts)
        if len(body) > limit_bytes:
            raise UpstreamError(f"the worker's answer exceeds {limit_bytes} bytes")
        return body

    async def aclose(self) -> None:
        """Return the connection to the pool, or drop it if the body was not read completely."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.give_back(connection)


class _WorkerConnections:
    """The connections to one worker. The pool reuses the newest idle connection first."""

    def __init__(self, address: str, dial: Dial | None, kept_s: float) -> None:
        self.address = address
        self._dial = dial
        self._kept_s = kept_s
        self.place = Target(parse_address(address))
        self._idle: list[Http1Connection] = []
        self._busy: set[Http1Connection] = set()
        self._room = anyio.Semaphore(MAX_CONNECTIONS)
        self._takers = 0
        self._is_closed = False
        self._trim: asyncio.TimerHandle | None = None

    @property
    def is_unused(self) -> bool:
        """Return True if no connection is open, and no request waits for a connection."""
        return not (self._takers or self._busy or self._idle)

    async def take(self, deadline: float) -> Http1Connection:
        self._takers += 1
        try:
            return await self._take(deadline)
        finally:
            self._takers -= 1

    async def _take(self, deadline: float) -> Http1Connection:
        loop = asyncio.get_running_loop()
        try:
            self._room.acquire_nowait()  # nearly always succeeds, and costs less than a deadline for each request
        except anyio.WouldBlock:
            async with asyncio.timeout_at(deadline):
                await self._room.acquire()
        try:
            connection = self._reuse(loop.time()) or await self._connect(loop)
        except BaseException:
            self._room.release()
            raise
        if self._is_closed:
            connection.abort()
            self._room.release()
            raise UpstreamGone("the worker is gone", sent=False)
        self._busy.add(connection)
        return connection

    def give_back(self, connection: Http1Connection) -> None:
        if connection not in self._busy:
            return
        self._busy.discard(connection)
        self._room.release()
        connection.rest()
        if not connection.may_be_kept or self._is_closed:
            connection.abort()
            return
        self._idle.append(connection)
        if len(self._idle) > MAX_IDLE and self._trim is None:
            self._trim = asyncio.get_running_loop().call_later(REST_S, self._trim_idle)

    def close(self, error: UpstreamGone) -> None:
        self._is_closed = True
        for connection in (*self._idle, *self._busy):
            connection.break_off(error)
        self._idle.clear()
        if self._trim is not None:
            self._trim.cancel()

    def drop_idle(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _trim_idle(self) -> None:
        """Close connections beyond `MAX_IDLE` that were idle for `REST_S`, the oldest first.

        While more than `MAX_IDLE` connections are idle, the next check follows after `REST_S`.
        """
        loop = asyncio.get_running_loop()
        extra = self._idle[: max(0, len(self._idle) - MAX_IDLE)]
        rested = [connection for connection in extra if loop.time() - connection.idle_since >= REST_S]
        del self._idle[: len(rested)]  # the newest is reused first, so the longest idle are in front
        for connection in rested:
            connection.abort()
        self._trim = loop.call_later(REST_S, self._trim_idle) if len(self._idle) > MAX_IDLE else None

    def _reuse(self, now: float) -> Http1Connection | None:
        is_own = self.place.address.is_own
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable and (is_own or now - connection.idle_since < self._kept_s):
                return connection
            connection.abort()
        return None

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> Http1Connection:
        try:
            async with asyncio.timeout(NODE_CONNECT_S if self.place.address.is_on_node else CONNECT_S):
                while True:
                    try:
                        return await self._connected(loop)
                    except BlockingIOError:
                        await asyncio.sleep(0.005)  # the socket's backlog is full, and nothing was sent yet
        except (OSError, TimeoutError) as error:
            raise UpstreamGone(f"no connection to the worker: {error or 'timed out'}", sent=False) from error

    async def _connected(self, loop: asyncio.AbstractEventLoop) -> Http1Connection:
        address = self.place.address
        if address.is_unix:
            _, connection = await loop.create_unix_connection(lambda: Http1Connection(loop), address.path)
            return connection
        if address.is_on_node:
            if self._dial is None:
                raise OSError("this gateway has no nodes")
            _, connection = await self._dial(address, lambda: Http1Connection(loop, is_on_node=True))
            return connection
        tls = await asyncio.to_thread(_tls) if address.tls else None
        host, port = address.host, address.port
        _, connection = await loop.create_connection(lambda: Http1Connection(loop), host, port, ssl=tls)
        return connection


@cache
def _tls() -> ssl.SSLContext:
    """Load the system's certificates once, because loading takes 20 ms."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class HttpTransport:
    """The HTTP transport to all workers."""

    def __init__(self, *, dial: Dial | None = None, kept_s: float = KEEP_FOREIGN_S) -> None:
        """Create the transport without opening a connection.

        Args:
            dial: Connects to workers on other machines.
            kept_s: Seconds for which idle connections to third-party servers are reused.
        """
        self._dial = dial
        self._kept_s = kept_s
        self._workers: dict[WorkerId, _WorkerConnections] = {}

    async def send(self, worker: WorkerId, address: str, request: Request, *, silence_s: float) -> RelayExchange:
        """Send *request* and return when the head of the response has arrived; see `Transport.send`."""
        connections = self._workers.get(worker)
        if connections is None or connections.address != address:
            connections = self._moved(worker, address)
        try:
            return await self._exchange(worker, connections, request, silence_s)
        except NodeLeft:
            connections.drop_idle()  # they lead to the same process
        try:
            return await self._exchange(worker, connections, request, silence_s)
        except NodeLeft as error:
            raise UpstreamGone("the worker's node ended twice before it took the request", sent=False) from error

    async def _exchange(
        self, worker: WorkerId, connections: _WorkerConnections, request: Request, silence_s: float
    ) -> RelayExchange:
        loop = asyncio.get_running_loop()
        try:
            connection = await connections.take(loop.time() + silence_s)
        except TimeoutError as error:
            raise UpstreamTimeout(f"no connection to the worker was free for {silence_s:g} s") from error
        except UpstreamGone:
            if connections.is_unused and self._workers.get(worker) is connections:
                del self._workers[worker]  # the worker may have ended, and then no later `forget` removes the entry
            raise
        try:
            await connection.ask(request, connections.place, silence_s)
        except BaseException:
            connection.abort()
            connections.give_back(connection)
            raise
        return RelayExchange(connections, connection)

    def _moved(self, worker: WorkerId, address: str) -> _WorkerConnections:
        """Create the connections to a worker at *address*, and drop those to its previous address."""
        try:
            connections = _WorkerConnections(address, self._dial, self._kept_s)
        except ValueError as error:
            raise UpstreamGone(f"the worker can't be reached: {error}", sent=False) from error
        self.forget(worker)
        self._workers[worker] = connections
        return connections

    def forget(self, worker: WorkerId) -> None:
        """Drop a worker's connections. Requests in progress fail with ``UpstreamGone``."""
        self._drop(worker, UpstreamGone("the worker is gone", sent=True))

    def leave(self) -> None:
        """Fail requests in progress with ``ReplicaLeft``, because this process ends. Workers may still finish them."""
        for worker in list(self._workers):
            self._drop(worker, ReplicaLeft())

    async def aclose(self) -> None:
        """Drop all connections, as `leave` does."""
        self.leave()

    def _drop(self, worker: WorkerId, error: UpstreamGone) -> None:
        connections = self._workers.pop(worker, None)
        if connections is not None:
            connections.close(error)

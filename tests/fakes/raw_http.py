"""A server that accepts connections and runs a script on each, so that the test decides every byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

MAX_HEAD_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Request:
    """A received request, with header names in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True, eq=False)
class Connection:
    """One accepted connection, which a script serves."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    requests: list[Request] = field(default_factory=list)
    """Requests that this connection received so far."""

    async def request(self) -> Request:
        """Read the next request.

        Raises:
            EOFError: The client closed the connection.
        """
        head = await self.reader.readuntil(b"\r\n\r\n")
        line, *rest = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        method, target, _ = line.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (entry.partition(":") for entry in rest)}
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        request = Request(method, target, headers, body)
        self.requests.append(request)
        return request

    async def send(self, data: bytes) -> None:
        """Write *data*, waiting while the client does not read."""
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: bytes, *, status: int = 200, kind: str = "application/json", more: str = "") -> None:
        """Send a complete response that keeps the connection open. *more* holds further header lines."""
        head = f"HTTP/1.1 {status} Some Reason\r\ncontent-type: {kind}\r\n{more}content-length: {len(body)}\r\n\r\n"
        await self.send(head.encode() + body)

    async def left(self) -> None:
        """Wait until the client closes the connection, and drop the bytes that it sends until then."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(2**16):
                pass

    def abort(self) -> None:
        """Drop the connection immediately, with its unsent bytes."""
        self.writer.transport.abort()


Script = Callable[[Connection], Awaitable[None]]


class RawServer:
    """A server that runs *script* on every connection. ``async with`` starts and stops it."""

    def __init__(self, script: Script, *, path: Path | None = None, port: int = 0) -> None:
        """Make a server for the Unix socket *path*, or without it for *port* of loopback (0: any free port)."""
        self._script = script
        self._path = path
        self._port = port
        self._server: asyncio.Server | None = None
        self._is_closed = False
        self._tasks: dict[asyncio.Task[None], Connection] = {}
        self.connections: list[Connection] = []
        """All connections accepted so far."""

    @property
    def address(self) -> str:
        """The address, ``unix:PATH`` or ``tcp:HOST:PORT``."""
        return f"unix:{self._path}" if self._path is not None else f"tcp:127.0.0.1:{self._port}"

    @property
    def open_connections(self) -> int:
        """Number of connections that are being served."""
        return len(self._tasks)

    @property
    def requests(self) -> list[Request]:
        """All received requests, by connection."""
        return [request for connection in self.connections for request in connection.requests]

    async def start(self) -> None:
        """Listen."""
        self._is_closed = False
        if self._path is not None:
            self._server = await asyncio.start_unix_server(self._accept, self._path, limit=MAX_HEAD_BYTES)
        else:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port, limit=MAX_HEAD_BYTES)
            self._port = self._server.sockets[0].getsockname()[1]

    async def aclose(self) -> None:
        """Drop all connections and stop listening."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for connection in self.connections:  # also one whose script ended before its client read everything
            connection.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    async def __aenter__(self) -> RawServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_closed:  # the event loop accepted the connection before the close
            writer.transport.abort()
            return
        connection = Connection(reader, writer)
        self.connections.append(connection)
        task = asyncio.ensure_future(self._run(connection))
        self._tasks[task] = connection
        task.add_done_callback(self._tasks.pop)

    async def _run(self, connection: Connection) -> None:
        try:
            # An abort by a test or a client that left ends a script. IncompleteReadError is an EOFError.
            with contextlib.suppress(ConnectionError, EOFError):
                await self._script(connection)
        finally:
            connection.writer.close()

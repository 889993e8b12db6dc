"""The lower bound: uvloop and httptools forward bytes over kept connections. No sessions, no keys, no timeouts.

Run as ``bare_forwarder.py SOCKET``: it forwards requests unchanged to the server on that Unix socket. The additional
cost of a gateway in Python is the cost of its sessions.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import httptools
import uvloop

PREFIX = "bare_forwarder_ready url="


class Upstream(asyncio.Protocol):
    """One connection to the server, for one request at a time."""

    def __init__(self, idle: list[Upstream]) -> None:
        self._idle = idle
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport
        self.client: Client | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class is not a subclass

    def data_received(self, data: bytes) -> None:
        client = self.client
        if client is None:
            self.transport.abort()  # there is no request
            return
        client.transport.write(data)
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.client is not None:
            self.client.transport.abort()
        elif self in self._idle:
            self._idle.remove(self)

    def on_message_complete(self) -> None:
        client = self.client
        self.client = None
        self._parser = httptools.HttpResponseParser(self)
        self._idle.append(self)
        if client is not None:
            client.upstream = None


class Client(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, socket: str, idle: list[Upstream]) -> None:
        self._socket = socket
        self._idle = idle
        self._parser = httptools.HttpRequestParser(self)
        self._parts: list[bytes] = []
        self._connecting: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport
        self.upstream: Upstream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # as above

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self.upstream is not None:
            self.upstream.client = None
            self.upstream.transport.abort()

    def on_message_complete(self) -> None:
        """Forward the request over the most recently used connection."""
        self._parser = httptools.HttpRequestParser(self)
        while self._idle:
            upstream = self._idle.pop()
            if not upstream.transport.is_closing():
                self._send(upstream)
                return
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, upstream = await loop.create_unix_connection(lambda: Upstream(self._idle), self._socket)
            except BlockingIOError:
                await asyncio.sleep(0.005)  # the socket's backlog is full
            except OSError:
                self.transport.abort()
                return
            else:
                self._send(upstream)
                return

    def _send(self, upstream: Upstream) -> None:
        upstream.client, self.upstream = self, upstream
        upstream.transport.write(b"".join(self._parts))
        self._parts.clear()


async def serve(socket: str) -> None:
    """Serve until the process is ended."""
    idle: list[Upstream] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Client(socket, idle), "127.0.0.1", 0, backlog=2048)
    print(f"{PREFIX}http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))

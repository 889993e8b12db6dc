"""A relay between a client and a server that cuts connections on command, like a failing network."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

TASK_ID = b"event: task_id"
_PIECE_BYTES = 65_536


class Relay:
    """Passes bytes both ways, counts calls and task ids, and can drop all connections."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.calls = 0
        """The number of requests for a call that came from the client."""
        self.task_ids = 0
        """The number of streams that sent the client their ``task_id``, including those of new sessions."""
        self.url = ""
        self._is_mute = False

    def mute(self) -> None:
        """Withhold the server's bytes from now on. The next cut loses them."""
        self._is_mute = True

    def cut(self) -> None:
        """Drop every connection abruptly. Later connections work."""
        self._is_mute = False
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        both = {writer, there_writer}
        self._writers |= both
        try:
            await asyncio.gather(
                self._pass(reader, there_writer, is_answer=False), self._pass(there_reader, writer, is_answer=True)
            )
        finally:
            self._writers -= both
            for each in both:
                each.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(_PIECE_BYTES):
                self.calls += piece.startswith(b"POST ") and b"/call HTTP/1.1" in piece
                if is_answer and self._is_mute:
                    continue
                self.task_ids += piece.count(TASK_ID)
                writer.write(piece)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def relay(url: str) -> AsyncIterator[Relay]:
    """Yield a running relay in front of *url*."""
    there = httpx.URL(url)
    assert there.port is not None
    between = Relay(there.host, there.port)
    server = await asyncio.start_server(between._connected, "127.0.0.1", 0)
    between.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield between
    finally:
        server.close()
        between.cut()

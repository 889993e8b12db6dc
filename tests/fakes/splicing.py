"""TCP servers and proxies of tests: they end every connection, so that no socket outlives its test."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable

Serve = Callable[[StreamReader, StreamWriter], Awaitable[None]]


async def splice(near: tuple[StreamReader, StreamWriter], far: tuple[StreamReader, StreamWriter]) -> None:
    """Copy in both directions until both have ended, then close *far*. The caller closes *near*."""
    ways = [asyncio.ensure_future(_pipe(near[0], far[1])), asyncio.ensure_future(_pipe(far[0], near[1]))]
    try:
        await asyncio.wait(ways)
    finally:
        for way in ways:
            way.cancel()
        far[1].close()


async def _pipe(reader: StreamReader, writer: StreamWriter) -> None:
    """Copy in one direction, including the end of the stream."""
    with contextlib.suppress(OSError):  # a lost machine raises other errors than ConnectionError
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


@contextlib.asynccontextmanager
async def serving(serve: Serve, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[int]:
    """Run a TCP server on loopback that calls *serve* for each connection, and yield its port."""
    tasks: list[asyncio.Task[None]] = []
    writers: list[StreamWriter] = []

    async def run(reader: StreamReader, writer: StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await serve(reader, writer)
        finally:
            writer.close()

    def accepted(reader: StreamReader, writer: StreamWriter) -> None:
        writers.append(writer)
        tasks.append(asyncio.ensure_future(run(reader, writer)))

    server = await asyncio.start_server(accepted, host, port, backlog=512)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task, writer in zip(tasks, writers, strict=True):
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*tasks, *(writer.wait_closed() for writer in writers), return_exceptions=True)

"""Splices two connections, as a test's own proxy does once it has chosen the destination."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import StreamReader, StreamWriter


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

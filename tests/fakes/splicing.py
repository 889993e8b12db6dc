"""Two connections as one: what a proxy of a test's own does once it has chosen where to."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import StreamReader, StreamWriter


async def splice(near: tuple[StreamReader, StreamWriter], far: tuple[StreamReader, StreamWriter]) -> None:
    """Copy both ways until both have ended; *far* is closed then, *near* is the caller's to close."""
    ways = [asyncio.ensure_future(_pipe(near[0], far[1])), asyncio.ensure_future(_pipe(far[0], near[1]))]
    try:
        await asyncio.wait(ways)
    finally:
        for way in ways:
            way.cancel()
        far[1].close()


async def _pipe(reader: StreamReader, writer: StreamWriter) -> None:
    """Copy one way, the end of it included."""
    with contextlib.suppress(OSError):  # a machine that is gone is more than a broken connection
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()

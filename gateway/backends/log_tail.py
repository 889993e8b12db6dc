"""The last part of a process' output, read so that a flood costs neither memory nor the event loop."""

from __future__ import annotations

import asyncio
import os

KEPT_BYTES = 64 * 1024
"""About 600 lines: enough to see why a worker died."""
CHUNK_BYTES = 256 * 1024
PAUSE_S = 0.005
"""After a full chunk, so after a flood's: 50 MB/s are read at most, and the loop has most of its time for others."""


class Tail:
    """Keeps the last ``KEPT_BYTES`` of what a stream says."""

    def __init__(self) -> None:
        self._kept = bytearray()

    async def read(self, descriptor: int) -> None:
        """Read a pipe to its end and close it; a writer that floods is slowed down, and never stopped."""
        stream = asyncio.StreamReader(limit=CHUNK_BYTES)
        protocol = asyncio.StreamReaderProtocol(stream)
        pipe = os.fdopen(descriptor, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
        try:
            while chunk := await stream.read(CHUNK_BYTES):
                self._kept += chunk[-KEPT_BYTES:]
                del self._kept[:-KEPT_BYTES]
                if len(chunk) >= KEPT_BYTES:
                    await asyncio.sleep(PAUSE_S)
        finally:
            transport.close()

    def lines(self, count: int) -> str:
        """The last *count* lines, each with its end."""
        text = self._kept.decode("utf-8", "replace")
        return "".join(text.splitlines(keepends=True)[-count:]) if count > 0 else ""

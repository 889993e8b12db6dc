"""Waiting for what happens by itself."""

import asyncio
from collections.abc import Awaitable, Callable


async def eventually(claim: Callable[[], Awaitable[bool]], *, patience_s: float = 10.0) -> None:
    """Wait until *claim* is true."""
    async with asyncio.timeout(patience_s):
        while not await claim():  # noqa: ASYNC110  # what is claimed is told by another process or thread
            await asyncio.sleep(0.005)

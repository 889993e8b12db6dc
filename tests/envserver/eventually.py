"""Waits for events that happen in the background."""

import asyncio
from collections.abc import Awaitable, Callable


async def eventually(claim: Callable[[], Awaitable[bool]], *, patience_s: float = 10.0) -> None:
    """Wait until *claim* is true."""
    async with asyncio.timeout(patience_s):
        while not await claim():  # noqa: ASYNC110  # another process or thread makes the claim true
            await asyncio.sleep(0.005)

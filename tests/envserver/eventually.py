"""Waits for events that happen in the background."""

import asyncio
from collections.abc import Awaitable, Callable

from tests.deadlines import HANG_S


async def eventually(claim: Callable[[], Awaitable[bool]]) -> None:
    """Wait until *claim* is true."""
    async with asyncio.timeout(HANG_S):
        while not await claim():  # noqa: ASYNC110  # another process or thread makes the claim true
            await asyncio.sleep(0.005)

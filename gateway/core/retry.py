"""Patience with a store that does not answer, or is being rebuilt: it is asked again, for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gateway.core.errors import StoreUnavailable

T = TypeVar("T")

STORE_PATIENCE_S = 10.0
"""A Redis that is started again, or failed over, is there and rebuilt within this; a trainer would lose an episode."""
STORE_PAUSE_S = 0.25


async def patiently(
    ask: Callable[[], Awaitable[T]], *, for_s: float = STORE_PATIENCE_S, missed: Callable[[], None] | None = None
) -> T:
    """Ask the store, again while it does not answer, for *for_s* seconds; *missed* is called each time that it did not.

    Only what may be asked twice: its first try may have been done, and its answer lost.

    Raises:
        StoreUnavailable: it did not answer in all that time.
    """
    deadline = time.monotonic() + for_s
    while True:
        try:
            return await ask()
        except StoreUnavailable:
            if missed is not None:
                missed()
            if time.monotonic() + STORE_PAUSE_S > deadline:
                raise
        await asyncio.sleep(STORE_PAUSE_S)

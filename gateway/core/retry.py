"""Retries requests to a store that does not answer or is being rebuilt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gateway.core.errors import StoreUnavailable

T = TypeVar("T")

STORE_PATIENCE_S = 10.0
"""Seconds of retries, enough for a Redis restart or failover and the rebuild. Without retries a trainer would lose an
episode."""
STORE_PAUSE_S = 0.25


async def patiently(
    ask: Callable[[], Awaitable[T]], *, for_s: float = STORE_PATIENCE_S, missed: Callable[[], None] | None = None
) -> T:
    """Call *ask* until the store answers, for at most *for_s* seconds.

    *missed* is called after each attempt without an answer. Use this only for operations that may run twice: an attempt
    may have succeeded although its answer was lost.

    Raises:
        StoreUnavailable: The store did not answer in all that time.
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

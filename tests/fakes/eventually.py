"""Waits for a condition: repeated checks with a deadline, never a bare sleep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tests.deadlines import scaled

T = TypeVar("T")

PAUSES_S = (0.02, 0.2)
PAUSE_SHARE = 0.05
"""Pause as a share of the time waited so far. A long wait checks less often, because each check costs CPU time."""
WITHIN_S = 20.0
"""Deadline in seconds of the reference machine, as every ``within_s`` here. A passing test never waits that long."""


async def eventually(check: Callable[[], Awaitable[T]], *, within_s: float = WITHIN_S) -> T:
    """Repeat *check* until it raises no ``AssertionError``, and return its result.

    Raises:
        AssertionError: The check still fails after *within_s* seconds.
    """
    began = time.monotonic()
    while True:
        try:
            return await check()
        except AssertionError:
            if time.monotonic() >= began + scaled(within_s):
                raise
        await asyncio.sleep(_pause_s(began))


def eventually_now(check: Callable[[], T], *, within_s: float = WITHIN_S) -> T:
    """Do the same as `eventually` in code without an event loop, such as fixtures."""
    began = time.monotonic()
    while True:
        try:
            return check()
        except AssertionError:
            if time.monotonic() >= began + scaled(within_s):
                raise
        time.sleep(_pause_s(began))


async def until(claim: Callable[[], object], *, within_s: float = WITHIN_S) -> None:
    """Wait until *claim* is true.

    Raises:
        AssertionError: The claim is still false after *within_s* seconds.
    """

    async def check() -> None:
        assert claim(), "what was waited for did not happen"

    await eventually(check, within_s=within_s)


def _pause_s(began: float) -> float:
    least, most = PAUSES_S
    return min(most, max(least, (time.monotonic() - began) * PAUSE_SHARE))

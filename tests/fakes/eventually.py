"""Waits for a condition: repeated checks with a deadline, never a bare sleep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tests.deadlines import HANG_S

T = TypeVar("T")

PAUSES_S = (0.02, 0.2)
PAUSE_SHARE = 0.05
"""Pause as a share of the time waited so far. A long wait checks less often, because each check costs CPU time."""


async def eventually(check: Callable[[], Awaitable[T]]) -> T:
    """Repeat *check* until it raises no ``AssertionError``, and return its result.

    Raises:
        AssertionError: The check still fails after `HANG_S`.
    """
    began = time.monotonic()
    while True:
        try:
            return await check()
        except AssertionError:
            if time.monotonic() >= began + HANG_S:
                raise
        await asyncio.sleep(_pause_s(began))


def eventually_now(check: Callable[[], T]) -> T:
    """Do the same as `eventually` in code without an event loop, such as fixtures."""
    began = time.monotonic()
    while True:
        try:
            return check()
        except AssertionError:
            if time.monotonic() >= began + HANG_S:
                raise
        time.sleep(_pause_s(began))


def until_now(claim: Callable[[], object]) -> None:
    """Do the same as `until` in code without an event loop."""

    def check() -> None:
        assert claim(), "what was waited for did not happen"

    eventually_now(check)


async def until(claim: Callable[[], object]) -> None:
    """Wait until *claim* is true.

    Raises:
        AssertionError: The claim is still false after `HANG_S`.
    """

    async def check() -> None:
        assert claim(), "what was waited for did not happen"

    await eventually(check)


def _pause_s(began: float) -> float:
    least, most = PAUSES_S
    return min(most, max(least, (time.monotonic() - began) * PAUSE_SHARE))

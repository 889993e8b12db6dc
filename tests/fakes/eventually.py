"""Waiting for what happens by itself: asked again and again, with an end; never a bare sleep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tests.deadlines import scaled

T = TypeVar("T")

PAUSES_S = (0.02, 0.2)
PAUSE_SHARE = 0.05
"""Of the time that was waited so far: who waits long asks less often, as each question costs its answerer CPU time."""
WITHIN_S = 20.0
"""In seconds of the reference machine, as every ``within_s`` here. A test that passes never waits for it."""


async def eventually(check: Callable[[], Awaitable[T]], *, within_s: float = WITHIN_S) -> T:
    """Return what *check* returns as soon as it does so without an ``AssertionError``.

    Raises:
        AssertionError: the last one, if it still fails after *within_s* seconds.
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
    """`eventually` for code without an event loop: fixtures, mostly."""
    began = time.monotonic()
    while True:
        try:
            return check()
        except AssertionError:
            if time.monotonic() >= began + scaled(within_s):
                raise
        time.sleep(_pause_s(began))


async def until(claim: Callable[[], object], *, within_s: float = WITHIN_S) -> None:
    """Return as soon as *claim* is true.

    Raises:
        AssertionError: it is still false after *within_s* seconds.
    """

    async def check() -> None:
        assert claim(), "what was waited for did not happen"

    await eventually(check, within_s=within_s)


def _pause_s(began: float) -> float:
    least, most = PAUSES_S
    return min(most, max(least, (time.monotonic() - began) * PAUSE_SHARE))

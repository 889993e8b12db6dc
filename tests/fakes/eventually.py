"""Waiting for what happens by itself: asked again and again, with an end; never a bare sleep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tests.deadlines import scaled

T = TypeVar("T")

PAUSE_S = 0.02
WITHIN_S = 20.0
"""In seconds of the reference machine, as every ``within_s`` here. A test that passes never waits for it."""


async def eventually(check: Callable[[], Awaitable[T]], *, within_s: float = WITHIN_S) -> T:
    """Return what *check* returns as soon as it does so without an ``AssertionError``.

    Raises:
        AssertionError: the last one, if it still fails after *within_s* seconds.
    """
    deadline = time.monotonic() + scaled(within_s)
    while True:
        try:
            return await check()
        except AssertionError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(PAUSE_S)


def eventually_now(check: Callable[[], T], *, within_s: float = WITHIN_S) -> T:
    """`eventually` for code without an event loop: fixtures, mostly."""
    deadline = time.monotonic() + scaled(within_s)
    while True:
        try:
            return check()
        except AssertionError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(PAUSE_S)


async def until(claim: Callable[[], object], *, within_s: float = WITHIN_S) -> None:
    """Return as soon as *claim* is true.

    Raises:
        AssertionError: it is still false after *within_s* seconds.
    """

    async def check() -> None:
        assert claim(), "what was waited for did not happen"

    await eventually(check, within_s=within_s)

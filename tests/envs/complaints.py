"""Checks many items in one test. Each failing item is reported by name, and no failure hides another."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

T = TypeVar("T")
AT_ONCE = os.cpu_count() or 1
"""The default number of concurrent checks, for checks that mostly compute."""


async def complaints(
    check: Callable[[T], Awaitable[None]], items: Mapping[str, T], *, at_once: int = AT_ONCE
) -> dict[str, str]:
    """Check *items*, at most *at_once* concurrently, and return the errors of *check* by the item's name."""
    free = asyncio.Semaphore(at_once)
    found: dict[str, str] = {}

    async def one(name: str, item: T) -> None:
        async with free:
            try:
                await check(item)
            except Exception as error:  # noqa: BLE001 - the test fails with this item's name, after the others
                found[name] = repr(error)

    await asyncio.gather(*(one(name, item) for name, item in items.items()))
    return found

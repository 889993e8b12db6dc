"""Checking many items in one test: each item that fails is named, and none hides the others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

T = TypeVar("T")
AT_ONCE = os.cpu_count() or 1
"""For checks that mostly compute."""


async def complaints(
    check: Callable[[T], Awaitable[None]], items: Mapping[str, T], *, at_once: int = AT_ONCE
) -> dict[str, str]:
    """Check *items*, at most *at_once* at a time; return what *check* raised, by the item's name."""
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

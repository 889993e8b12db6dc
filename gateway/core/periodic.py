"""The rounds of loops that look at something regularly, such as every second.

These loops of a process look at the same moments. Waking an idle process costs more than a look: on a busy machine its
memory has left the caches. Each process has moments of its own, so that replicas do not ask the store together.
"""

from __future__ import annotations

import asyncio
import random
from typing import Final

_PHASE_S: Final = random.random()
"""Position of this process's rounds in a second."""
LEAST: Final = 0.5
"""Shortest pause, as a share of the interval. Otherwise a loop that ends just before a round would look twice."""


def until_next(every_s: float) -> float:
    """Return the seconds until the next round of a loop that looks every *every_s* seconds.

    They are between half of the interval and one and a half, and the whole interval on average.
    """
    left_s = every_s - (asyncio.get_running_loop().time() + _PHASE_S) % every_s
    return left_s if left_s >= LEAST * every_s else left_s + every_s


async def pause(every_s: float) -> None:
    """Sleep until the next round of a loop that looks every *every_s* seconds."""
    await asyncio.sleep(until_next(every_s))

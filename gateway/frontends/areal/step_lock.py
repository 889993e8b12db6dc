"""One step at a time in each episode: a second one waits, within bounds.

Of this replica only; a worker takes one action of a session after the other in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

from gateway.core.errors import InvalidRequest
from gateway.core.ids import Owner

AT_ONCE_MAX: Final = 8
"""Steps of one episode that run or wait; the known clients send one, and then wait for its answer."""


@dataclass(slots=True)
class _Place:
    """The steps of one episode."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    steps: int = 0


class StepLocks:
    """The steps under way in this replica."""

    def __init__(self) -> None:
        self._places: dict[tuple[Owner, str], _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    @contextlib.asynccontextmanager
    async def one(self, owner: Owner, episode: str, *, within_s: float) -> AsyncIterator[None]:
        """Be the only step of *episode* inside; waits for an earlier one, at most *within_s*.

        Raises:
            InvalidRequest: too many wait, or the earlier one took too long; nothing was done.
        """
        place = self._places.setdefault((owner, episode), _Place())
        if place.steps >= AT_ONCE_MAX:
            raise InvalidRequest(f"{place.steps} steps of this episode run or wait already")
        place.steps += 1
        try:
            try:
                async with asyncio.timeout(within_s):
                    await place.lock.acquire()
            except TimeoutError:
                raise InvalidRequest("another step of this episode runs") from None
            try:
                yield
            finally:
                place.lock.release()
        finally:
            place.steps -= 1
            if not place.steps:
                del self._places[owner, episode]

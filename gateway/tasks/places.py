"""Where a foreign image's own tasks stand, by what they say.

Trainers of one protocol are handed a task and give it back whole, where the image wants to be told its place.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from gateway.core.environment import TaskSpec

SEARCHED_MAX: Final = 20_000
"""Tasks of one image that are known by what they say."""
SEARCHED_S: Final = 60.0
"""How long a search that found nothing holds."""

Place = tuple[str, int]
"""Split and index."""


class TaskPlaces:
    """The places of one image's tasks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._places: dict[bytes, Place] = {}
        self._searched_at: float | None = None

    def get(self, task: TaskSpec) -> Place | None:
        """Where *task* stood when it was last seen."""
        return self._places.get(_digest(task))

    def outdated(self) -> None:
        """What is remembered is wrong: the next search looks again."""
        self._searched_at = None

    async def search(self, task: TaskSpec, tasks: AsyncIterator[tuple[Place, TaskSpec]]) -> Place | None:
        """Look for *task* among *tasks*, which are remembered; not at all where that was done just now."""
        now = self._clock()
        if self._searched_at is not None and now - self._searched_at < SEARCHED_S:
            return None
        places: dict[bytes, Place] = {}
        async for place, one in tasks:
            places.setdefault(_digest(one), place)
            if len(places) >= SEARCHED_MAX:
                break
        self._places = places
        self._searched_at = now
        return self.get(task)


def _digest(task: TaskSpec) -> bytes:
    return hashlib.blake2b(json.dumps(task, sort_keys=True).encode(), digest_size=16).digest()

"""Broadcast workers' deaths to any number of readers, each from the moment of its call on.

The buffer is bounded: a reader that falls far behind misses the oldest deaths, which ``Backend.deaths`` permits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from gateway.core.worker import Death

KEPT = 1024
"""Number of deaths by which a reader may lag without loss. An engine ends at most a few dozen containers per second."""


class DeathBroadcast:
    """Announces deaths to readers in one event loop."""

    def __init__(self) -> None:
        self._told: deque[Death] = deque(maxlen=KEPT)
        self._count = 0
        self._changed = asyncio.Event()
        self._closed = False

    def add(self, death: Death) -> None:
        """Announce *death*."""
        self._told.append(death)
        self._count += 1
        self._wake()

    def close(self) -> None:
        """End every reader after it has read the deaths announced so far."""
        self._closed = True
        self._wake()

    def follow(self) -> AsyncIterator[Death]:
        """Yield the deaths that are announced from now on, until `close`."""
        return self._follow(self._count)

    async def _follow(self, position: int) -> AsyncIterator[Death]:
        while True:
            changed = self._changed
            oldest = self._count - len(self._told)
            position = max(position, oldest)
            if position < self._count:
                position += 1
                yield self._told[position - 1 - oldest]
            elif self._closed:
                return
            else:
                await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

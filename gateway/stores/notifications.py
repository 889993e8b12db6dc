"""Distributes a store's notices to many followers. Each follower has a bounded queue; a slow follower loses the oldest.

A follower that is dropped without being closed (its task was cancelled) is forgotten with its last reference.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque

from gateway.core.session import Notice

KEPT = 10_000
"""Maximum number of notices queued for one follower: the sessions that end together when a large node is lost."""


class Following:
    """Iterates over the notices published since one follower started; ends when the store is closed."""

    def __init__(self, *, kept: int, closed: bool) -> None:
        self._notices: deque[Notice] = deque(maxlen=kept)
        self._news = asyncio.Event()
        self._closed = closed

    def __aiter__(self) -> Following:
        return self

    async def __anext__(self) -> Notice:
        while not self._notices:
            if self._closed:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._notices.popleft()

    def put(self, notice: Notice) -> None:
        """Append a notice. A full queue drops its oldest notice."""
        self._notices.append(notice)
        self._news.set()

    def close(self) -> None:
        """End the iteration after the queued notices."""
        self._closed = True
        self._news.set()


class Notices:
    """The followers of one store."""

    def __init__(self, *, kept: int = KEPT) -> None:
        self._kept = kept
        self._followers: weakref.WeakSet[Following] = weakref.WeakSet()
        self._closed = False

    def follow(self) -> Following:
        """Return a follower of the notices from this call on, not only from the first `anext`."""
        following = Following(kept=self._kept, closed=self._closed)
        self._followers.add(following)
        return following

    def publish(self, notice: Notice) -> None:
        """Add *notice* to every follower's queue. Never blocks."""
        for following in list(self._followers):
            following.put(notice)

    def close(self) -> None:
        """End every iteration, including iterations that start later."""
        self._closed = True
        for following in list(self._followers):
            following.close()

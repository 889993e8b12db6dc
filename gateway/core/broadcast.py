"""Distributes items to many followers. Each follower has a bounded queue; a slow follower loses the oldest items.

A follower that is dropped without being closed (its task was cancelled) is forgotten with its last reference.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")

KEPT = 10_000
"""Maximum number of items queued for one follower: the sessions that end together when a large node is lost."""


class Following(Generic[T]):
    """Iterates over the items published since one follower started; ends when the broadcast is closed."""

    def __init__(self, *, kept: int, closed: bool) -> None:
        self._items: deque[T] = deque(maxlen=kept)
        self._news = asyncio.Event()
        self._closed = closed

    def __aiter__(self) -> Following[T]:
        return self

    async def __anext__(self) -> T:
        while not self._items:
            if self._closed:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._items.popleft()

    def put(self, item: T) -> None:
        """Append an item. A full queue drops its oldest item."""
        self._items.append(item)
        self._news.set()

    def close(self) -> None:
        """End the iteration after the queued items."""
        self._closed = True
        self._news.set()


class Broadcast(Generic[T]):
    """The followers of one source of items."""

    def __init__(self, *, kept: int = KEPT) -> None:
        self._kept = kept
        self._followers: weakref.WeakSet[Following[T]] = weakref.WeakSet()
        self._closed = False

    def follow(self) -> Following[T]:
        """Return a follower of the items from this call on, not only from the first `anext`."""
        following: Following[T] = Following(kept=self._kept, closed=self._closed)
        self._followers.add(following)
        return following

    def publish(self, item: T) -> None:
        """Add *item* to every follower's queue. Never blocks."""
        for following in list(self._followers):
            following.put(item)

    def close(self) -> None:
        """End every iteration, including iterations that start later."""
        self._closed = True
        for following in list(self._followers):
            following.close()

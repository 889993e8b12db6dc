"""Notices to many followers: each has a bounded queue of its own, and a slow one loses its oldest.

A follower that is dropped without being closed (its task was cancelled) is forgotten with its last reference.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque

from gateway.core.session import Notice

KEPT = 10_000
"""Notices that wait for one follower; as many as sessions that end at once when a large machine goes away."""


class Following:
    """One follower's notices since it began; ends when the store is closed."""

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
        """Append a notice, dropping the oldest if the queue is full."""
        self._notices.append(notice)
        self._news.set()

    def close(self) -> None:
        """Let the iteration end after what is queued."""
        self._closed = True
        self._news.set()


class Notices:
    """The followers of one store."""

    def __init__(self, *, kept: int = KEPT) -> None:
        self._kept = kept
        self._followers: weakref.WeakSet[Following] = weakref.WeakSet()
        self._closed = False

    def follow(self) -> Following:
        """Follow from this moment on, not from the first `anext`."""
        following = Following(kept=self._kept, closed=self._closed)
        self._followers.add(following)
        return following

    def publish(self, notice: Notice) -> None:
        """Hand *notice* to every follower; never blocks."""
        for following in list(self._followers):
            following.put(notice)

    def close(self) -> None:
        """End every iteration, also those that begin later."""
        self._closed = True
        for following in list(self._followers):
            following.close()

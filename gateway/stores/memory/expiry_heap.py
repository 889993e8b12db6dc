"""Keys and the moments at which they are due: what the memory store expires by.

A deadline that moves later costs a dictionary write, not a heap entry: sessions are renewed far more often than they
end, so an entry that comes up too early is pushed back only when it is looked at.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

SLACK = 64
"""Stale heap entries that are tolerated besides as many as there are keys, before the heap is built anew."""


class Deadlines(Generic[K]):
    """A set of keys with one deadline each; moments are seconds of the owner's clock."""

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        #: Each key has an entry that is no later than its deadline; `pop` skips stale entries.
        self._heap: list[tuple[float, K]] = []

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: object) -> bool:
        return key in self._at

    def at(self, key: K) -> float:
        """The deadline of *key*; KeyError if it has none."""
        return self._at[key]

    def set(self, key: K, at: float) -> None:
        """Give *key* the deadline *at*, earlier or later than what it had."""
        before = self._at.get(key)
        self._at[key] = at
        if before is None or at < before:
            self._push(key, at)

    def discard(self, key: K) -> None:
        """Forget *key*, if it is known."""
        self._at.pop(key, None)

    def pop(self, now: float) -> tuple[K, float] | None:
        """Take out the earliest key whose deadline is not after *now*, with the deadline; None if there is none."""
        while self._heap and self._heap[0][0] <= now:
            listed, key = heapq.heappop(self._heap)
            at = self._at.get(key)
            if at is not None and listed < at:
                self._push(key, at)
            elif at is not None:
                del self._at[key]
                return key, at
        return None

    def _push(self, key: K, at: float) -> None:
        if len(self._heap) > 2 * len(self._at) + SLACK:
            self._heap = [(due, other) for other, due in self._at.items() if other != key]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (at, key))

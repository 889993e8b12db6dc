"""A clock that tests move."""

from __future__ import annotations


class Clock:
    """Seconds since some moment, like `time.monotonic`. Only `advance` moves the clock."""

    def __init__(self, now: float = 1_000.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward by *seconds*."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock does not go back: {seconds}")
        self._now += seconds

"""A clock that tests move."""

from __future__ import annotations


class Clock:
    """Seconds since some moment, like `time.monotonic`; stands still until it is told to move."""

    def __init__(self, now: float = 1_000.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on by *seconds*; never back."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock does not go back: {seconds}")
        self._now += seconds

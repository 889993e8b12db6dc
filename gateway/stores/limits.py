"""Applies the limits of a key to an opening, and words their errors, for both stores."""

from __future__ import annotations

import sys
from typing import Final

from gateway.core.errors import PoolExhausted
from gateway.core.ids import Owner
from gateway.core.session import SessionRequest

NO_LIMIT: Final = sys.maxsize
"""The room of an owner without limits."""


def room(opening: SessionRequest, held: int, held_here: int) -> int:
    """Return the number of further sessions that the limits of *opening* allow its owner. ``lua/shared`` repeats it.

    The owner holds *held* sessions, *held_here* of them in the opening's environment.
    """
    left = opening.max_sessions - held if opening.max_sessions else NO_LIMIT
    left_here = opening.max_here - held_here if opening.max_here else NO_LIMIT
    return max(0, min(left, left_here))


def reached(opening: SessionRequest, held: int, held_here: int, *, need: int = 1) -> str:
    """Return the message of the limit that allows the owner fewer than *need* further sessions, or an empty string."""
    if room(opening, held, held_here) >= need:
        return ""
    group = f", and this group needs {need}" if need > 1 else ""
    if opening.max_sessions and opening.max_sessions - held < need:
        return (
            f"the key {opening.owner!r} has {held} sessions, and its limit is {opening.max_sessions}{group}: "
            "close sessions, or raise the limit (max_sessions)"
        )
    return (
        f"the key {opening.owner!r} has {held_here} of its share of {opening.max_here} slots of "
        f"{opening.environment!r}{group}: close sessions there, or raise the share (pool_share)"
    )


def too_fast(owner: Owner, per_s: float, wait_s: float, within_s: float) -> PoolExhausted:
    """Return the error of an opening that would have to wait *wait_s* for its start, longer than *within_s*."""
    return PoolExhausted(
        f"the key {owner!r} may open {per_s:g} sessions a second, and its next opening would start in {wait_s:.1f} s, "
        f"later than the {within_s:g} s that it may wait: open sessions more slowly, or raise the limit (opens_per_s)",
        retry_after_s=wait_s,
    )

"""What both stores tell openings that get no slot: when to come again, and why.

The pace of an environment is the mean time between two slots that went to openings which waited: what went at once
tells how fast trainers ask, not how fast slots become free.
"""

from __future__ import annotations

PACE_WEIGHT = 0.2
"""What one interval weighs in the pace; about as if the last ten were averaged. Also in ``lua/shared``."""
PACE_KEPT_S = 600.0
"""A pace of which nothing was seen for this long is forgotten, and no interval counts as longer. Also there."""
GROUP_KEPT_S = 600.0
"""How long a group is remembered after one of it was granted a slot; longer than its members are apart. Also there."""
LAST_CALL_S = 3.0
"""A group is served as far as there are slots when one of it waits no longer than this: slots that are free should not
outlive its wait. More than the time between two looks of the control loop. Also there."""
RETRY_LEAST_S = 1.0
RETRY_MOST_S = 300.0
MESSAGE_BYTES = 8192
"""The longest message that is kept for openings that fail."""
_CUT = " … "


def mean(pace_s: float | None, interval_s: float, slots: int) -> float:
    """The pace after *slots* slots came *interval_s* apart; *pace_s* is the one before, None if it was not known."""
    interval_s = min(max(interval_s, 0.0), PACE_KEPT_S)
    before_s = interval_s if pace_s is None else pace_s
    return interval_s + (before_s - interval_s) * float((1 - PACE_WEIGHT) ** slots)


def retry_after(place: int, pace_s: float | None) -> float:
    """In how many seconds a slot may be had by who is, or would be, at *place* in the queue; 0: not known."""
    if pace_s is None:
        return 0.0
    return min(max(place * pace_s, RETRY_LEAST_S), RETRY_MOST_S)


def bounded(message: str) -> str:
    """*message*, of one that is too long its beginning, which says what happened, and its end, which may say why."""
    whole = message.encode("utf-8", "surrogatepass")
    if len(whole) <= MESSAGE_BYTES:
        return message
    head = MESSAGE_BYTES // 4
    tail = MESSAGE_BYTES - head - len(_CUT.encode())
    return whole[:head].decode("utf-8", "ignore") + _CUT + whole[-tail:].decode("utf-8", "ignore")

"""Computes the retry delay, and shortens the message, that both stores return to openings without a slot.

The pace of an environment is the mean time between two slots that went to waiting openings. Openings that get a slot
immediately do not count: they show how fast trainers ask, not how fast slots become free.
"""

from __future__ import annotations

PACE_WEIGHT = 0.2
"""Weight of one interval in the pace, roughly an average over the last ten. ``lua/shared`` repeats the value."""
PACE_KEPT_S = 600.0
"""Seconds without a new slot after which the pace is forgotten; also the longest interval. Also in ``lua/shared``."""
GROUP_KEPT_S = 600.0
"""Seconds for which a group is kept after its last grant; longer than its members are apart. Also in ``lua/shared``."""
LAST_CALL_S = 3.0
"""Seconds before a member's wait ends at which its group takes the slots that are free, so that they do not stay idle.
Longer than the interval between two checks of the control loop. Also in ``lua/shared``."""
UNFILLED_S = 60.0
"""Seconds for which openings of a key start individually after slots were kept for a group of the key of which less
than half came. Also in ``lua/shared``."""
RETRY_LEAST_S = 1.0
RETRY_MOST_S = 300.0
MESSAGE_BYTES = 8192
"""Maximum size in bytes of the message that is kept for failed openings."""
_CUT = " … "


def mean(pace_s: float | None, interval_s: float, slots: int) -> float:
    """Return the pace (s) after *slots* more slots, *interval_s* apart. *pace_s*: the previous pace; None: unknown."""
    interval_s = min(max(interval_s, 0.0), PACE_KEPT_S)
    before_s = interval_s if pace_s is None else pace_s
    return interval_s + (before_s - interval_s) * float((1 - PACE_WEIGHT) ** slots)


def retry_after(place: int, pace_s: float | None) -> float:
    """Return the estimated seconds (1 to 300) until the opening at *place* gets a slot; 0 if the pace is unknown."""
    if pace_s is None:
        return 0.0
    return min(max(place * pace_s, RETRY_LEAST_S), RETRY_MOST_S)


def bounded(message: str) -> str:
    """Return *message*, cut to `MESSAGE_BYTES` in the middle: the start names the failure, the end often its cause."""
    whole = message.encode("utf-8", "surrogatepass")
    if len(whole) <= MESSAGE_BYTES:
        return message
    head = MESSAGE_BYTES // 4
    tail = MESSAGE_BYTES - head - len(_CUT.encode())
    return whole[:head].decode("utf-8", "ignore") + _CUT + whole[-tail:].decode("utf-8", "ignore")

"""Delays the calls of keys that have a limit of calls per second, in this replica.

Without a limit, a trainer that calls without a pause in many sessions uses the CPU that calls of other keys need.
"""

from __future__ import annotations

import time

from gateway.core.environment import Environment
from gateway.core.errors import RateLimited
from gateway.core.ids import Owner


class CallRates:
    """Lets the calls of a limited key start at even intervals. A burst would delay the calls of other keys."""

    def __init__(self) -> None:
        self._booked_until: dict[Owner, float] = {}
        """End of the booked time of each limited key, on the monotonic clock."""

    def book(self, owner: Owner, per_s: float, environment: Environment) -> float:
        """Book the next call of *owner*, who may make *per_s* calls a second. Return the seconds that it has to wait.

        Raises:
            RateLimited: It would have to wait longer than a call may take in *environment*. Nothing is booked.
        """
        now, within_s = time.monotonic(), environment.timeouts.call_s
        until = max(now, self._booked_until.get(owner, now))
        wait_s = until - now
        if wait_s > within_s:
            raise RateLimited(
                f"the key {owner!r} may make {per_s:g} calls a second, and its next one would start in {wait_s:.1f} s, "
                f"later than the {within_s:g} s that a call may take: call more slowly, or raise calls_per_s",
                retry_after_s=wait_s,
            )
        self._booked_until[owner] = until + 1 / per_s
        return wait_s

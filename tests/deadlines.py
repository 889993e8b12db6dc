"""Deadlines of tests, scaled by the measured speed of the machine.

A deadline in a test ends a wait that would otherwise never end. It must not fail a test because the machine is slow or
shared. Tests state a deadline in seconds of the reference machine, two idle cores, and `scaled` stretches it.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache

SLOWNESS_VARIABLE = "TESTS_SLOWNESS"
"""Environment variable with the slowness. The runner measures it once, so that all pytest processes have the same
deadlines."""
REFERENCE_S = 0.2
"""Wall seconds that `_work` takes on each of the reference machine's cores, with all cores busy."""
_ROUNDS = 4_000_000
MOST = 10.0
"""Largest factor. On a machine that is even slower, a longer wait only hides a hang."""


def scaled(seconds: float) -> float:
    """Return *seconds* of the reference machine as seconds of this machine, never fewer."""
    return seconds * slowness()


@cache
def slowness() -> float:
    """Return the time of this machine relative to the reference machine, from 1 to `MOST`."""
    told = os.environ.get(SLOWNESS_VARIABLE)
    return _bounded(float(told) if told else _work() / REFERENCE_S)


def measure() -> float:
    """Measure `slowness` with a process on every core, so that other programs' load counts."""
    cores = os.cpu_count() or 1
    with ProcessPoolExecutor(cores) as pool:
        list(pool.map(_work, [1000] * cores))  # starts the processes before the measurement
        return _bounded(max(pool.map(_work, [_ROUNDS] * cores)) / REFERENCE_S)


def _work(rounds: int = _ROUNDS) -> float:
    """Count to *rounds*, and return the wall seconds that it took."""
    began = time.monotonic()
    number = 0
    while number < rounds:
        number += 1
    return time.monotonic() - began


def _bounded(factor: float) -> float:
    return min(max(factor, 1.0), MOST)

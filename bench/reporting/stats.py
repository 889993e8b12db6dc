"""Numbers from samples: percentiles, medians over rounds, ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the smallest sample that at least *share* (0 to 1) of all samples do not exceed (nearest rank).

    There is no interpolation: a p99 is the time of a real call.

    Raises:
        ValueError: There is no sample, or *share* is not between 0 and 1.
    """
    if not samples:
        raise ValueError("no samples")
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"{share} is not from 0 to 1")
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Latencies:
    """Percentiles and extremes of one set of samples."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float


def latencies(samples_s: Sequence[float]) -> Latencies:
    """Summarize samples in seconds.

    Raises:
        ValueError: There is no sample.
    """
    return Latencies(
        count=len(samples_s),
        p50_ms=percentile(samples_s, 0.5) * 1e3,
        p99_ms=percentile(samples_s, 0.99) * 1e3,
        max_ms=max(samples_s) * 1e3,
    )


def median_latencies(rounds: Sequence[Latencies]) -> Latencies:
    """Return the median over *rounds* of each figure. Counts are added. The maximum is that of all rounds.

    Raises:
        ValueError: There is no round.
    """
    if not rounds:
        raise ValueError("no rounds")
    return Latencies(
        count=sum(each.count for each in rounds),
        p50_ms=median(each.p50_ms for each in rounds),
        p99_ms=median(each.p99_ms for each in rounds),
        max_ms=max(each.max_ms for each in rounds),
    )


def ratio(measured: float, baseline: float) -> float:
    """Return *measured* as a multiple of *baseline*, or infinity if the baseline is 0."""
    return measured / baseline if baseline else math.inf

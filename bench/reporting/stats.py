"""Numbers from samples: percentiles, medians over rounds, ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least *share* (0 to 1) of all samples do not exceed (nearest rank).

    No interpolation: a p99 is a time that some call really took.

    Raises:
        ValueError: there is no sample, or *share* is no share.
    """
    if not samples:
        raise ValueError("no samples")
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"{share} is not from 0 to 1")
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Latencies:
    """What became of one set of samples."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float


def latencies(samples_s: Sequence[float]) -> Latencies:
    """Summarize samples in seconds.

    Raises:
        ValueError: there is none.
    """
    return Latencies(
        count=len(samples_s),
        p50_ms=percentile(samples_s, 0.5) * 1e3,
        p99_ms=percentile(samples_s, 0.99) * 1e3,
        max_ms=max(samples_s) * 1e3,
    )


def median_latencies(rounds: Sequence[Latencies]) -> Latencies:
    """The median over *rounds* of each figure; the counts are added, and the maximum is that of all.

    Raises:
        ValueError: there is no round.
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
    """*measured* as a multiple of *baseline*; infinite where the baseline is nothing."""
    return measured / baseline if baseline else math.inf

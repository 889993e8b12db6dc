"""What became of calls, and how long they took: counted by every step, so with as little as that can cost.

A histogram of prometheus_client takes a lock for each of its numbers and looks through its buckets one by one. All
steps are counted in one thread; here it is one search and three additions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.core.ids import EnvironmentName
from gateway.observe.outcomes import CALLS, bounded


@dataclass(slots=True)
class _Durations:
    """Those of one environment's calls, in seconds."""

    buckets: list[int]
    """How many there are up to each bound, and not up to the one before it; the last has none."""
    sum_s: float = 0.0


class Calls(Collector):
    """Counts calls by environment and outcome, and their durations by environment."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """*bounds* of the durations' buckets, in seconds, growing."""
        self._bounds = tuple(bounds)
        self._outcomes: Counter[tuple[EnvironmentName, str]] = Counter()
        self._durations: dict[EnvironmentName, _Durations] = {}

    def ended(self, environment: EnvironmentName, outcome: str, seconds: float) -> None:
        """Count a call that took so long."""
        self._outcomes[environment, outcome] += 1
        durations = self._durations.get(environment)
        if durations is None:
            durations = self._durations[environment] = _Durations([0] * (len(self._bounds) + 1))
        durations.buckets[bisect_left(self._bounds, seconds)] += 1
        durations.sum_s += seconds

    def collect(self) -> Iterator[Metric]:
        """The two metrics, as they are now."""
        counted: Counter[tuple[EnvironmentName, str]] = Counter()
        for (environment, outcome), count in self._outcomes.items():
            counted[environment, bounded(outcome, CALLS, "failed")] += count
        calls = CounterMetricFamily(
            "gateway_calls", "Calls passed to workers, by outcome.", labels=("environment", "outcome")
        )
        for labels, count in counted.items():
            calls.add_metric(labels, count)
        yield calls
        took = HistogramMetricFamily(
            "gateway_call_seconds", "From a call's arrival to its end.", labels=("environment",)
        )
        names = (*(str(float(bound)) for bound in self._bounds), "+Inf")
        for environment, durations in self._durations.items():
            buckets = list(zip(names, accumulate(durations.buckets), strict=True))
            took.add_metric((environment,), buckets, sum_value=durations.sum_s)
        yield took

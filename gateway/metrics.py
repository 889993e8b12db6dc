"""Prometheus metrics, labelled only with bounded sets: environments, reasons and outcomes, never ids.

Only the leader shows the metrics of pool and store (workers, slots, sizes, breakers), so that a sum over replicas
counts nothing twice.

Every step counts its outcome and duration, so `CallMetrics` minimizes the cost. A histogram of prometheus_client takes
a lock for each number and scans its buckets one by one. One thread counts all steps, so here a step costs one search
and three additions.

Calls, starts and claims each have a closed set of one-word outcomes.
"""

from __future__ import annotations

import asyncio
import collections
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.core.episode import TOOL_FAILED, StepResult
from gateway.core.errors import (
    AuthorFault,
    BackendError,
    GatewayError,
    InvalidRequest,
    RateLimited,
    SessionClosed,
    SessionError,
    SessionFailed,
    UpstreamGone,
    UpstreamTimeout,
)
from gateway.core.faults import Fault, FaultKind
from gateway.core.ids import EnvironmentName
from gateway.core.outcomes import EpisodeOutcome
from gateway.core.periodic import until_next
from gateway.core.session import CloseReason
from gateway.core.worker import EnvironmentLoad, WorkerState

CALLS: Final = (
    "ok",
    "refused",  #: the worker refused it, or its call id had another body: nothing ran
    "worker_lost",
    "out_of_memory",
    "timeout",  #: longer than the environment allows
    "author_fault",  #: the environment author's code raised an exception, or gave a reward that is not a number
    "session_failed",  #: a resource of its session in the worker broke
    "ended",  #: its session ended meanwhile: deleted, cancelled, or ended by an operator
    "left",  #: the trainer disconnected; the worker continues
    "failed",
)
STARTS: Final = ("ready", "failed", "timeout", "out_of_memory")
CLAIMS: Final = ("hit", "wait", "refused")
DEATHS: Final = (CloseReason.WORKER_LOST.value, CloseReason.OUT_OF_MEMORY.value)
_CALLS_BY_ERROR: Final[dict[type[BaseException], str]] = {
    asyncio.CancelledError: "left",
    TimeoutError: "timeout",
    InvalidRequest: "refused",
    RateLimited: "refused",
    UpstreamTimeout: "timeout",
    UpstreamGone: "worker_lost",
    AuthorFault: "author_fault",
    SessionFailed: "session_failed",
    SessionError: "ended",
    BaseException: "failed",
}


def call_outcome(error: BaseException) -> str:
    """Return the outcome of a call that failed with *error*, an element of `CALLS`."""
    if isinstance(error, SessionClosed):
        return error.reason if error.reason in CALLS else "ended"
    return next(_CALLS_BY_ERROR[kind] for kind in type(error).__mro__ if kind in _CALLS_BY_ERROR)


def answer_outcome(answer: object) -> str:
    """Return the outcome of a call with the answer *answer*, an element of `CALLS`."""
    if not isinstance(answer, StepResult):
        return "ok"
    return faults_outcome(answer.faults, other="author_fault" if answer.reason == TOOL_FAILED else "ok")


def faults_outcome(faults: Sequence[Fault], *, other: str) -> str:
    """Return the outcome of a call whose answer reports *faults*; return *other* if there are none. One of `CALLS`."""
    if not faults:
        return other
    return "author_fault" if any(fault.kind is FaultKind.AUTHOR for fault in faults) else "session_failed"


def start_outcome(error: BaseException) -> str:
    """Return the outcome of a start that failed with *error*, an element of `STARTS`."""
    if isinstance(error, (TimeoutError, UpstreamTimeout)):
        return "timeout"
    reason = getattr(error, "reason", "") if isinstance(error, (BackendError, GatewayError)) else ""
    return str(reason) if reason in STARTS else "failed"


def bounded(word: str, known: tuple[str, ...], other: str) -> str:
    """Return *word* if it is in *known*, otherwise *other*: labels must stay few."""
    return word if word in known else other


@dataclass(slots=True)
class _Durations:
    """Durations of one environment's calls, in seconds."""

    buckets: list[int]
    """Number of durations between each bound and the previous bound; the last bucket has no upper bound."""
    sum_s: float = 0.0


class CallMetrics(Collector):
    """Counts calls by environment and outcome, and their durations by environment."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Set the ascending *bounds* of the durations' buckets, in seconds."""
        self._bounds = tuple(bounds)
        self._outcomes: collections.Counter[tuple[EnvironmentName, str]] = collections.Counter()
        self._durations: dict[EnvironmentName, _Durations] = {}

    def ended(self, environment: EnvironmentName, outcome: str, seconds: float) -> None:
        """Count a call that took *seconds*."""
        self._outcomes[environment, outcome] += 1
        durations = self._durations.get(environment)
        if durations is None:
            durations = self._durations[environment] = _Durations([0] * (len(self._bounds) + 1))
        durations.buckets[bisect_left(self._bounds, seconds)] += 1
        durations.sum_s += seconds

    def of(self, environment: EnvironmentName) -> tuple[dict[str, int], Sequence[float], Sequence[int]]:
        """Return the calls of *environment* by outcome, the bounds of durations, and the numbers between them."""
        outcomes = {outcome: count for (name, outcome), count in self._outcomes.items() if name == environment}
        durations = self._durations.get(environment)
        return outcomes, self._bounds, () if durations is None else tuple(durations.buckets)

    def collect(self) -> Iterator[Metric]:
        """Yield the two metrics with their current values."""
        counted: collections.Counter[tuple[EnvironmentName, str]] = collections.Counter()
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


LAG_EVERY_S: Final = 0.5
"""Seconds between measurements of the event loop's lag."""
_CALL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """What this process has counted in one environment since its start."""

    opened: int
    refused: Mapping[str, int]
    """Openings that failed, by error code."""
    calls: Mapping[str, int]
    """Calls by outcome, as `CALLS` names them."""
    bounds: Sequence[float]
    """Upper bounds of calls' durations, in seconds."""
    buckets: Sequence[int]
    """Number of calls between each bound and the bound before it; the last bucket has no upper bound."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Objects of one environment that this process removed since it started."""

    expired: int
    """Sessions that expired because their trainers stopped using them."""
    leaked: int
    """Workers that the backend had and the store did not know."""


class Metrics:
    """All metrics of one gateway process, in their own registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._opened = self._counter("sessions_opened", "Sessions opened.", "environment")
        self._closed = self._counter("sessions_closed", "Sessions closed, by reason.", "environment", "reason")
        self._episodes = self._counter("episodes", "Episodes that ended, by outcome.", "environment", "outcome")
        self._refused = self._counter("sessions_refused", "Openings that failed, by error code.", "environment", "code")
        self._turned_away = self._counter(
            "requests_turned_away", "Requests without a valid key, or of a web page of another site.", "reason"
        )
        self._calls = calls = CallMetrics(_CALL_BUCKETS)
        self._registry.register(calls)
        self.call_ended = calls.ended
        """Counts a call: its environment, one of `CALLS` as `call_outcome` finds it, its seconds."""
        self._starts = self._counter(
            "worker_starts", "Workers asked of the backend, by outcome.", "environment", "outcome"
        )
        self._lost = self._counter("workers_lost", "Workers that died unasked, by reason.", "environment", "reason")
        self._claims = self._counter("claims", "Openings that asked for a slot, by outcome.", "environment", "outcome")
        self._orphans = self._counter(
            "workers_orphaned", "Workers removed that the backend had and the store did not.", "environment"
        )
        self._tally: collections.Counter[tuple[EnvironmentName, str]] = collections.Counter()
        self._open_s = self._histogram("open_seconds", "From a create's arrival to an open session.", _CALL_BUCKETS)
        self._start_s = self._histogram(
            "worker_start_seconds", "From asking for a worker to its readiness.", _CALL_BUCKETS
        )
        self._marked = self._counter("episodes_marked", "Episodes with an unexpected error of a tool.", "environment")
        self._reward = self._histogram(
            "episode_reward",
            "Sum of an episode's rewards, where the agent earned them.",
            (0, 0.25, 0.5, 0.75, 1, 2, 5, 10),
        )
        self._workers = self._gauge("workers", "Workers, by state.", "environment", "state")
        self._used = self._gauge("slots_used", "Slots that hold a session.", "environment")
        self._shown: set[EnvironmentName] = set()
        self._waiting = self._gauge("openings_waiting", "Openings that wait for a slot.", "environment")
        self._to_come = self._gauge(
            "openings_to_come",
            "Openings of groups that slots are kept or waited for and that have not come.",
            "environment",
        )
        self._claim_s = self._histogram(
            "claim_seconds", "From asking for a slot to having or not having one.", _CALL_BUCKETS
        )
        self._hit_ratio = self._gauge(
            "pool_hit_ratio", "Openings that got a slot at once, of all the store counted.", "environment"
        )
        self._arrival_rate = self._gauge("pool_arrival_rate", "Openings a second that are expected.", "environment")
        self._start_expected_s = self._gauge(
            "pool_start_seconds_expected", "How long a start is expected to take.", "environment"
        )
        self._warm_target = self._gauge("pool_warm_target", "Free slots that are kept ready.", "environment")
        self._breaker = self._gauge("breaker_open", "1 while openings without a free slot fail at once.", "environment")
        self._leader = self._gauge("leader", "1 in the replica that leads the control loop.")
        self._whole = self._gauge("store_whole", "0 while the store is rebuilt after a loss of data.")
        self._unlogged = self._gauge("step_log_lost", "Records that the step log lost since the start of this replica.")
        self._lag = Histogram(
            "gateway_event_loop_lag_seconds",
            "How late the event loop was.",
            buckets=_LAG_BUCKETS,
            registry=self._registry,
        )
        self._of_pool = (
            self._workers,
            self._used,
            self._waiting,
            self._to_come,
            self._hit_ratio,
            self._arrival_rate,
            self._start_expected_s,
            self._warm_target,
            self._breaker,
        )

    def show_step_log(self, lost: Callable[[], int]) -> None:
        """Show the number of records that the step log of this replica has lost."""
        self._unlogged.set_function(lost)

    def turned_away(self, reason: str) -> None:
        """Count a request that the authenticator refused: ``no_key``, ``wrong_key`` or ``other_site``."""
        self._turned_away.labels(reason).inc()

    def session_opened(self, environment: EnvironmentName, seconds: float) -> None:
        """Count an opened session that took *seconds*."""
        self._opened.labels(environment).inc()
        self._open_s.labels(environment).observe(seconds)

    def session_refused(self, environment: EnvironmentName, code: str) -> None:
        """Count an opening that failed with error *code*."""
        self._refused.labels(environment, code).inc()

    def session_closed(
        self, environment: EnvironmentName, reason: str, outcome: EpisodeOutcome, reward: float | None
    ) -> None:
        """Count a closed session, its episode's outcome and the reward if the agent earned it."""
        self._closed.labels(environment, reason).inc()
        self._episodes.labels(environment, outcome.value).inc()
        if reason == CloseReason.EXPIRED.value:
            self._tally[environment, "expired"] += 1
        if reward is not None:
            self._reward.labels(environment).observe(reward)

    def episode_marked(self, environment: EnvironmentName) -> None:
        """Count an ended episode in which a tool raised an unexpected exception."""
        self._marked.labels(environment).inc()

    def worker_started(self, environment: EnvironmentName, outcome: str, seconds: float) -> None:
        """Count a start; *outcome* is one of `STARTS`."""
        self._starts.labels(environment, bounded(outcome, STARTS, "failed")).inc()
        if outcome == "ready":
            self._start_s.labels(environment).observe(seconds)

    def worker_lost(self, environment: EnvironmentName, reason: str = CloseReason.WORKER_LOST.value) -> None:
        """Count a worker that died unexpectedly; *reason* is one of `DEATHS`."""
        self._lost.labels(environment, bounded(reason, DEATHS, DEATHS[0])).inc()

    def claimed(self, environment: EnvironmentName, outcome: str, seconds: float) -> None:
        """Count an opening that requested a slot.

        Args:
            environment: The opening's environment.
            outcome: ``hit``: it got a slot immediately; ``wait``: it got a slot later; ``refused``: it got no slot.
            seconds: Time from the request to the outcome.
        """
        self._claims.labels(environment, bounded(outcome, CLAIMS, "refused")).inc()
        self._claim_s.labels(environment).observe(seconds)

    def sized(self, environment: EnvironmentName, *, arrival_rate: float, start_s: float, warm: float) -> None:
        """Show the inputs of pool sizing: openings per second, seconds that a start takes, free slots to keep."""
        self._arrival_rate.labels(environment).set(arrival_rate)
        self._start_expected_s.labels(environment).set(start_s)
        self._warm_target.labels(environment).set(warm)

    def leads(self, is_leader: bool, *, is_whole: bool = True) -> None:
        """Show whether this replica leads, and whether the store holds everything; one reply of the store answers both.

        A replica that stops leading clears its metrics of the pool.
        """
        self._leader.set(is_leader)
        self._whole.set(is_whole)
        if not is_leader and self._shown:
            self._shown.clear()
            for gauge in self._of_pool:
                gauge.clear()

    async def watch_event_loop(self) -> None:
        """Measure the event loop's lag until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_at = loop.time() + (pause_s := until_next(LAG_EVERY_S))
            await asyncio.sleep(pause_s)
            self.lag(max(0.0, loop.time() - due_at))

    def lag(self, seconds: float) -> None:
        """Record the event loop's lag."""
        self._lag.observe(seconds)

    def worker_orphaned(self, environment: EnvironmentName) -> None:
        """Count a removed worker that the store did not know."""
        self._orphans.labels(environment).inc()
        self._tally[environment, "orphaned"] += 1

    def tally(self, environment: EnvironmentName) -> Tally:
        """Return the counts of removed objects of *environment* in this process."""
        return Tally(expired=self._tally[environment, "expired"], leaked=self._tally[environment, "orphaned"])

    def loaded(self, loads: Mapping[EnvironmentName, EnvironmentLoad]) -> None:
        """Show the store's current load."""
        self._shown |= loads.keys()
        for name in self._shown:  # also environments without load now: their last figures would stay
            load = loads.get(name, EnvironmentLoad())
            for state in WorkerState:
                count = sum(entry.worker.state is state for entry in load.workers)
                self._workers.labels(name, state.value).set(count)
            self._used.labels(name).set(sum(entry.used for entry in load.workers))
            self._waiting.labels(name).set(load.waiting)
            self._to_come.labels(name).set(load.to_come)
            self._breaker.labels(name).set(load.broken_s > 0)
            if load.arrivals:
                self._hit_ratio.labels(name).set(load.hits / load.arrivals)

    def overview(self, environment: EnvironmentName) -> Overview:
        """Return what this process has counted in *environment*."""
        calls, bounds, buckets = self._calls.of(environment)
        return Overview(
            opened=sum(_values(self._opened, environment).values()),
            refused=_values(self._refused, environment),
            calls=calls,
            bounds=bounds,
            buckets=buckets,
        )

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"gateway_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"gateway_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"gateway_{name}", text, ("environment",), buckets=buckets, registry=self._registry)


def _values(counter: Counter, environment: EnvironmentName) -> dict[str, int]:
    """Return a counter's values of *environment* by its second label; a counter without one has one value."""
    return {
        next((value for label, value in sample.labels.items() if label != "environment"), ""): int(sample.value)
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels.get("environment") == environment
    }

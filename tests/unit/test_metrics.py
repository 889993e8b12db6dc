"""What Prometheus gets to see."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.core.model import (
    EnvironmentLoad,
    EnvironmentName,
    Summary,
    Worker,
    WorkerId,
    WorkerLoad,
    WorkerState,
)
from gateway.observe.metrics import Metrics

MATH = EnvironmentName("math")


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """One sample, as Prometheus reads it; None if it is not shown."""
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            if sample.name == f"gateway_{name}" and sample.labels == labels:
                return float(sample.value)
    return None


def load(*states: WorkerState, used: int = 0, waiting: int = 0) -> EnvironmentLoad:
    workers = [
        WorkerLoad(
            worker=Worker(id=WorkerId(str(number)), environment=MATH, digest="d", slots=4, state=state),
            used=used,
            idle_s=0,
            age_s=0,
        )
        for number, state in enumerate(states)
    ]
    return EnvironmentLoad(workers=tuple(workers), waiting=waiting)


def test_episodes_are_counted_with_their_reasons_and_rewards() -> None:
    metrics = Metrics()

    metrics.session_opened(MATH, 0.002)
    metrics.session_closed(MATH, "deleted", Summary(reward=0.5, finished=True, steps=3, seconds=1))
    metrics.session_closed(MATH, "worker_lost", None)
    metrics.session_refused(MATH, "pool_exhausted")

    assert value(metrics, "sessions_opened_total", environment="math") == 1
    assert value(metrics, "sessions_closed_total", environment="math", reason="deleted") == 1
    assert value(metrics, "sessions_closed_total", environment="math", reason="worker_lost") == 1
    assert value(metrics, "sessions_refused_total", environment="math", code="pool_exhausted") == 1
    assert value(metrics, "episode_reward_sum", environment="math") == 0.5
    assert value(metrics, "episode_reward_count", environment="math") == 1  # an unknown reward is none, and not 0


def test_calls_and_starts_are_counted_by_outcome() -> None:
    metrics = Metrics()

    for outcome in ("ok", "ok", "broken", "left"):
        metrics.call_ended(MATH, outcome, 0.01)
    metrics.worker_started(MATH, "ready", 0.3)
    metrics.worker_started(MATH, "failed", 0.0)
    metrics.worker_lost(MATH)

    assert [value(metrics, "calls_total", environment="math", outcome=one) for one in ("ok", "broken", "left")] == [
        2,
        1,
        1,
    ]
    assert value(metrics, "call_seconds_count", environment="math") == 4
    assert value(metrics, "worker_starts_total", environment="math", outcome="failed") == 1
    assert value(metrics, "worker_start_seconds_count", environment="math") == 1
    assert value(metrics, "workers_lost_total", environment="math") == 1


def test_workers_are_shown_by_state_with_their_slots_and_queue() -> None:
    metrics = Metrics()

    metrics.loaded({MATH: load(WorkerState.READY, WorkerState.READY, WorkerState.STARTING, used=2, waiting=7)})

    assert [value(metrics, "workers", environment="math", state=state.value) for state in WorkerState] == [1, 2, 0]
    assert value(metrics, "slots_used", environment="math") == 6
    assert value(metrics, "openings_waiting", environment="math") == 7


@pytest.mark.parametrize("later", [{}, {EnvironmentName("coding"): load()}])
def test_an_environment_that_holds_nothing_any_more_is_shown_as_empty(
    later: dict[EnvironmentName, EnvironmentLoad],
) -> None:
    metrics = Metrics()
    metrics.loaded({MATH: load(WorkerState.READY, used=1, waiting=3)})

    metrics.loaded(later)

    assert not value(metrics, "workers", environment="math", state="ready")
    assert not value(metrics, "slots_used", environment="math")
    assert not value(metrics, "openings_waiting", environment="math")


def test_two_gateways_in_one_process_do_not_share_their_numbers() -> None:
    one, other = Metrics(), Metrics()

    one.worker_lost(MATH)

    assert value(other, "workers_lost_total", environment="math") is None

"""The metrics that Prometheus scrapes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.core import errors
from gateway.core.episode import StepResult
from gateway.core.faults import Fault, FaultKind
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.outcomes import EpisodeOutcome
from gateway.core.session import Session, SessionState
from gateway.core.worker import EnvironmentLoad, Worker, WorkerLoad, WorkerState
from gateway.metrics import CALLS, CLAIMS, STARTS, Metrics, answer_outcome, call_outcome, start_outcome
from gateway.sessions.closing import log_faults

MATH = EnvironmentName("math")


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Return the value of one sample as Prometheus reads it, or None if the sample is missing."""
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
    metrics.session_closed(MATH, "deleted", EpisodeOutcome.FINISHED, 0.5)
    metrics.session_closed(MATH, "worker_lost", EpisodeOutcome.INFRASTRUCTURE, None)
    metrics.session_refused(MATH, "pool_exhausted")

    assert value(metrics, "sessions_opened_total", environment="math") == 1
    assert value(metrics, "sessions_closed_total", environment="math", reason="deleted") == 1
    assert value(metrics, "sessions_closed_total", environment="math", reason="worker_lost") == 1
    assert value(metrics, "sessions_refused_total", environment="math", code="pool_exhausted") == 1
    assert value(metrics, "episodes_total", environment="math", outcome="finished") == 1
    assert value(metrics, "episodes_total", environment="math", outcome="infrastructure") == 1
    assert value(metrics, "episode_reward_sum", environment="math") == 0.5
    assert (
        value(metrics, "episode_reward_count", environment="math") == 1
    )  # an unknown reward is not counted, not even as 0


def test_calls_and_starts_are_counted_by_outcome() -> None:
    metrics = Metrics()

    for outcome in ("ok", "ok", "out_of_memory", "left", "no such outcome"):
        metrics.call_ended(MATH, outcome, 0.01)
    metrics.worker_started(MATH, "ready", 0.3)
    metrics.worker_started(MATH, "failed", 0.0)
    metrics.worker_started(MATH, "timeout", 0.0)
    metrics.worker_lost(MATH)
    metrics.worker_lost(MATH, "out_of_memory")

    counted = {one: value(metrics, "calls_total", environment="math", outcome=one) for one in CALLS}
    assert {one: count for one, count in counted.items() if count} == {
        "ok": 2,
        "out_of_memory": 1,
        "left": 1,
        "failed": 1,
    }
    assert value(metrics, "call_seconds_count", environment="math") == 5
    assert value(metrics, "worker_starts_total", environment="math", outcome="timeout") == 1
    assert value(metrics, "worker_starts_total", environment="math", outcome="failed") == 1
    assert value(metrics, "worker_start_seconds_count", environment="math") == 1
    assert value(metrics, "workers_lost_total", environment="math", reason="worker_lost") == 1
    assert value(metrics, "workers_lost_total", environment="math", reason="out_of_memory") == 1


def test_workers_are_shown_by_state_with_their_slots_and_queue() -> None:
    metrics = Metrics()

    metrics.loaded({MATH: load(WorkerState.READY, WorkerState.READY, WorkerState.STARTING, used=2, waiting=7)})

    shown = {state: value(metrics, "workers", environment="math", state=state.value) for state in WorkerState}
    assert {state: count for state, count in shown.items() if count} == {WorkerState.STARTING: 1, WorkerState.READY: 2}
    assert value(metrics, "slots_used", environment="math") == 6
    assert value(metrics, "openings_waiting", environment="math") == 7

    metrics.loaded({MATH: replace(load(waiting=1), to_come=3)})
    assert value(metrics, "openings_to_come", environment="math") == 3


@pytest.mark.parametrize("later", [{}, {EnvironmentName("coding"): load()}])
def test_an_environment_without_workers_and_openings_is_shown_as_empty(
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

    assert value(other, "workers_lost_total", environment="math", reason="worker_lost") is None


def test_claims_are_counted_by_outcome_with_their_duration() -> None:
    metrics = Metrics()

    for outcome, seconds in (("hit", 0.0), ("wait", 3.0), ("refused", 9.0)):
        metrics.claimed(MATH, outcome, seconds)

    assert [value(metrics, "claims_total", environment="math", outcome=one) for one in CLAIMS] == [1, 1, 1]
    assert value(metrics, "claim_seconds_sum", environment="math") == 12


def test_the_inputs_of_the_pools_sizing_are_shown() -> None:
    metrics = Metrics()

    metrics.sized(MATH, arrival_rate=2.5, start_s=0.4, warm=3)
    metrics.loaded({MATH: replace(load(), arrivals=8, hits=6, broken_s=12.0)})
    metrics.lag(0.02)

    assert value(metrics, "pool_arrival_rate", environment="math") == 2.5
    assert value(metrics, "pool_start_seconds_expected", environment="math") == 0.4
    assert value(metrics, "pool_warm_target", environment="math") == 3
    assert value(metrics, "pool_hit_ratio", environment="math") == 0.75
    assert value(metrics, "breaker_open", environment="math") == 1
    assert value(metrics, "event_loop_lag_seconds_count") == 1


def test_a_replica_that_no_longer_leads_removes_its_metrics_of_the_pool() -> None:
    metrics = Metrics()
    metrics.leads(True)
    metrics.loaded({MATH: load(WorkerState.READY, used=2)})
    assert value(metrics, "leader") == 1
    assert value(metrics, "slots_used", environment="math") == 2

    metrics.leads(False, is_whole=False)

    assert (value(metrics, "leader"), value(metrics, "store_whole")) == (0, 0)
    assert value(metrics, "slots_used", environment="math") is None
    assert value(metrics, "workers", environment="math", state="ready") is None


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (asyncio.CancelledError(), "left"),
        (TimeoutError(), "timeout"),
        (errors.UpstreamTimeout("slow"), "timeout"),
        (errors.UpstreamGone("gone", sent=True), "worker_lost"),
        (errors.AuthorFault("no judge"), "author_fault"),
        (errors.SessionFailed("no box"), "session_failed"),
        (errors.UpstreamError("nonsense"), "failed"),
        (errors.CallConflict("another body"), "refused"),
        (errors.SessionNotFound("one"), "ended"),
        (errors.StoreUnavailable("away"), "failed"),
        (ZeroDivisionError(), "failed"),
        (errors.SessionClosed("out_of_memory"), "out_of_memory"),
        (errors.SessionClosed("worker_lost"), "worker_lost"),
        (errors.SessionClosed("timeout"), "timeout"),
        (errors.SessionClosed("expired"), "ended"),
        (errors.SessionClosed("operator"), "ended"),
    ],
)
def test_each_error_of_a_call_has_its_outcome(error: BaseException, outcome: str) -> None:
    assert call_outcome(error) == outcome
    assert outcome in CALLS


MISTAKE = Fault(FaultKind.AUTHOR, "reset", "KeyError")
LOSS = Fault(FaultKind.INFRASTRUCTURE, "tool:act", "SessionLost")


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (StepResult(), "ok"),
        (StepResult(error="no such tool", reason="not_found"), "ok"),
        (StepResult(error="it raised", reason="tool_failed"), "author_fault"),
        (StepResult(error="it raised", reason="tool_failed", faults=(MISTAKE,)), "author_fault"),
        (StepResult(error="no thread", reason="tool_failed", faults=(LOSS,)), "session_failed"),
        (b"{}", "ok"),
        (StepResult(error="an illegal move", reason="tool_error"), "ok"),
        (StepResult(faults=(LOSS, MISTAKE)), "author_fault"),
        ([], "ok"),
    ],
)
def test_each_answer_of_a_call_has_its_outcome(answer: object, outcome: str) -> None:
    assert answer_outcome(answer) == outcome


def test_a_fault_is_logged_as_one_line_of_ascii(caplog: pytest.LogCaptureFixture) -> None:
    session = Session(
        id=SessionId("5e55"),
        name="one",
        owner=Owner(""),
        environment=MATH,
        lease="l",
        fingerprint="f",
        idle_s=1,
        worker=WorkerId("w"),
        address="",
        state=SessionState.OPEN,
        task="train/0",
    )

    log_faults(session, [MISTAKE._replace(traceback="Traceback:\n  File \ud800\x1b[0m"), LOSS])

    mistake, loss = caplog.records
    assert (mistake.levelname, loss.levelname) == ("ERROR", "WARNING")
    assert mistake.getMessage() == (
        "author_fault environment=math task='train/0' session=5e55 place='reset' error='KeyError' "
        r"traceback='Traceback:\n  File \ud800\x1b[0m'"
    )
    assert mistake.getMessage().isascii()
    assert loss.getMessage().startswith("infrastructure_fault environment=math ")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (errors.StartFailed("bad image"), "failed"),
        (errors.StartFailed("never ready", reason="timeout"), "timeout"),
        (errors.StartFailed("too big", reason="out_of_memory"), "out_of_memory"),
        (errors.StartFailed("odd", reason="never heard of"), "failed"),
        (errors.BackendError("the engine is away"), "failed"),
        (errors.UpstreamTimeout("slow"), "timeout"),
        (ZeroDivisionError(), "failed"),
    ],
)
def test_each_error_of_a_start_has_its_outcome(error: BaseException, outcome: str) -> None:
    assert start_outcome(error) == outcome
    assert outcome in STARTS

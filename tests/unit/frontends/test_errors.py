"""The hierarchy of errors and the tables that map errors to statuses."""

from __future__ import annotations

import inspect
import re

import pytest

from gateway.core import errors
from gateway.core.errors import GatewayError
from gateway.core.session import CloseReason
from gateway.frontends.errors import (
    AREAL_STATUS,
    LOSSES,
    ORS_STATUS,
    RETRY_AFTER_S,
    STATUS,
    WorkerDied,
    headers_of,
    marks,
    reason_of,
    retry_after_s,
    status_of,
    told,
    why_ended,
)


def tree(root: type[GatewayError] = GatewayError) -> list[type[GatewayError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in tree(child))]


OURS = [kind for kind in tree() if kind.__module__ == errors.__name__]


def made(kind: type[GatewayError]) -> GatewayError:
    match kind:
        case errors.SessionClosed:
            return errors.SessionClosed("expired")
        case errors.UpstreamGone:
            return errors.UpstreamGone("gone", sent=True)
        case errors.TaskInvalid:
            return errors.TaskInvalid([("config.x", "is wrong")])
        case errors.RateLimited:
            return errors.RateLimited("too often", retry_after_s=3.5)
    return kind("it went wrong")


def test_every_error_is_in_the_single_hierarchy() -> None:
    classes = [value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__]

    assert set(classes) == set(OURS)
    # An adapter may subclass an error for itself. An error with a code of its own belongs into core/errors.py.
    assert {kind for kind in tree() if "code" in vars(kind)} == set(OURS)


@pytest.mark.parametrize("kind", OURS)
def test_every_error_has_a_row_of_its_own_in_the_table_of_statuses(kind: type[GatewayError]) -> None:
    assert kind in STATUS


@pytest.mark.parametrize("kind", OURS)
def test_every_error_has_a_code_of_its_own(kind: type[GatewayError]) -> None:
    assert "code" in vars(kind)
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", kind.code)
    sharing = {other for other in OURS if other.code == kind.code}
    # Both describe one event: StartFailed for the control loop, EnvironmentUnavailable for trainers.
    assert sharing in ({kind}, {errors.StartFailed, errors.EnvironmentUnavailable})


def test_the_tables_name_only_errors_of_the_hierarchy() -> None:
    assert set(STATUS) == set(OURS)
    assert set(ORS_STATUS) <= set(OURS)
    assert set(AREAL_STATUS) <= set(OURS)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.GatewayError, 500),
        (errors.InvalidRequest, 400),
        (errors.UnknownEnvironment, 404),
        (errors.UnknownTask, 404),
        (errors.UnknownSplit, 404),
        (errors.CallConflict, 400),
        (errors.RateLimited, 503),
        (errors.SessionExists, 500),
        (errors.SessionNotFound, 404),
        (errors.SessionClosed, 404),
        (errors.PoolExhausted, 503),
        (errors.EnvironmentUnavailable, 500),
        (errors.StoreUnavailable, 503),
        (errors.UpstreamError, 500),
        (errors.UpstreamTimeout, 500),
        (errors.UpstreamGone, 500),
    ],
)
def test_areal_clients_get_one_of_five_statuses(kind: type[GatewayError], status: int) -> None:
    assert status_of(made(kind), AREAL_STATUS) == status


@pytest.mark.parametrize(
    ("kind", "status", "in_ors"),
    [
        (errors.GatewayError, 500, 500),
        (errors.InvalidRequest, 400, 400),
        (errors.UnknownEnvironment, 404, 404),
        (errors.UnknownTask, 404, 400),
        (errors.UnknownSplit, 404, 400),
        (errors.WrongEnvironment, 400, 400),
        (errors.TaskInvalid, 400, 400),
        (errors.TaskExists, 409, 409),
        (errors.RateLimited, 429, 429),
        (errors.CallConflict, 409, 409),
        (errors.NotAllowed, 401, 401),
        (errors.SessionExists, 400, 400),
        (errors.SessionNotFound, 404, 404),
        (errors.SessionClosed, 410, 410),
        (errors.PoolExhausted, 503, 429),
        (errors.EnvironmentUnavailable, 503, 503),
        (errors.StoreUnavailable, 503, 503),
        (errors.UpstreamError, 502, 500),
        (errors.UpstreamTimeout, 504, 504),
        (errors.UpstreamGone, 502, 502),
    ],
)
def test_each_error_has_its_status(kind: type[GatewayError], status: int, in_ors: int) -> None:
    assert status_of(made(kind)) == status
    assert status_of(made(kind), ORS_STATUS) == in_ors


def test_an_error_without_a_row_in_the_table_has_the_status_of_its_ancestor() -> None:
    # Defined in the function so that other tests do not find it: a class keeps only weak references to subclasses.
    newer = type("Newer", (errors.SessionClosed,), {"__module__": "tests"})

    assert status_of(newer("expired")) == 410


@pytest.mark.parametrize("kind", OURS)
def test_only_a_retryable_error_has_a_retry_after_header(kind: type[GatewayError]) -> None:
    header = [pair for pair in headers_of(made(kind)) if pair[0] == b"retry-after"]

    if kind is errors.RateLimited:
        assert header in ([(b"retry-after", b"4")], [(b"retry-after", b"5")])
    elif kind.retryable:
        [(name, value)] = header
        assert name == b"retry-after"
        assert RETRY_AFTER_S[0] <= int(value) <= RETRY_AFTER_S[1] <= 10  # one SDK waits at most 10 s
    else:
        assert header == []


def test_only_errors_of_capacity_and_of_the_store_are_retryable() -> None:
    passing = {kind.code for kind in OURS if kind.retryable}

    assert passing == {"pool_exhausted", "rate_limited", "start_failed", "store_unavailable", "too_many_bytes"}


def test_an_invalid_task_lists_every_problem_with_its_place() -> None:
    error = errors.TaskInvalid([("config.x", "is wrong"), ("", "is too large")], where="tasks[3]")

    assert error.detail == "tasks[3]: config.x: is wrong; is too large"
    assert error.problems == (("config.x", "is wrong"), ("", "is too large"))


def test_an_error_without_a_message_shows_its_code() -> None:
    assert errors.PoolExhausted("").detail == "pool_exhausted"
    assert errors.PoolExhausted("all are taken").detail == "all are taken"


def test_the_error_of_a_closed_session_states_the_reason() -> None:
    error = errors.SessionClosed("worker_lost")

    assert (error.reason, error.detail) == ("worker_lost", "the session was closed: worker_lost")


def of(reason: CloseReason) -> errors.SessionClosed:
    return errors.SessionClosed(reason.value)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        *((of(reason), reason.value) for reason in CloseReason),
        (errors.UpstreamGone("it broke", sent=True), "worker_lost"),
        (errors.UpstreamGone("it broke", sent=False), "worker_lost"),
        (WorkerDied("it broke", reason="out_of_memory"), "out_of_memory"),
        (errors.UpstreamTimeout("too slow"), "timeout"),
        (errors.AuthorFault("no judge"), "author_fault"),
        (errors.SessionFailed("no box"), "session_failed"),
        (errors.EnvironmentUnavailable("bad image"), "start_failed"),
        (errors.UpstreamError("the setup failed"), ""),
        (errors.PoolExhausted("no slot"), ""),
        (errors.StoreUnavailable("no store"), ""),
        (errors.InvalidRequest("no"), ""),
        (errors.SessionNotFound("one"), ""),
    ],
)
def test_each_error_has_its_reason_and_code(error: GatewayError, reason: str) -> None:
    assert reason_of(error) == reason
    assert marks(error) == {"code": error.code, **({"reason": reason} if reason else {})}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (of(CloseReason.OUT_OF_MEMORY), "out_of_memory: the session was closed"),
        (errors.UpstreamGone("it broke", sent=True), "worker_lost: it broke"),
        (errors.UpstreamTimeout("too slow"), "timeout: too slow"),
        (errors.UpstreamError("the setup failed"), "the setup failed"),
    ],
)
def test_the_text_of_an_error_begins_with_the_reason(error: GatewayError, text: str) -> None:
    assert told(error) == text


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.UpstreamGone("it broke", sent=True), CloseReason.WORKER_LOST),
        (errors.UpstreamTimeout("too slow"), CloseReason.TIMEOUT),
        (errors.AuthorFault("no judge"), CloseReason.AUTHOR_FAULT),
        (errors.SessionFailed("no box"), CloseReason.SESSION_FAILED),
        (errors.UpstreamError("nonsense"), CloseReason.WORKER_LOST),
    ],
)
def test_an_error_of_a_step_determines_the_close_reason_of_the_session(
    error: errors.UpstreamError, reason: CloseReason
) -> None:
    assert why_ended(error) is reason


@pytest.mark.parametrize("kind", [errors.PoolExhausted, errors.EnvironmentUnavailable])
@pytest.mark.parametrize(
    ("estimate_s", "least", "most"), [(0.01, 1, 1), (1.0, 1, 2), (7.2, 8, 9), (100.0, 100, 125), (9999.0, 600, 600)]
)
def test_an_estimate_is_rounded_up_to_whole_seconds_and_capped_at_600(
    kind: type[errors.PoolExhausted] | type[errors.EnvironmentUnavailable], estimate_s: float, least: int, most: int
) -> None:
    found = {retry_after_s(kind("later", retry_after_s=estimate_s)) for _ in range(200)}

    assert all(seconds is not None and least <= seconds <= most for seconds in found)
    assert len(found) > 1 or least == most or estimate_s < 10, "those refused together would return together"


def test_losses_are_the_close_reasons_of_a_lost_worker() -> None:
    assert {CloseReason.WORKER_LOST.value, CloseReason.OUT_OF_MEMORY.value} == LOSSES

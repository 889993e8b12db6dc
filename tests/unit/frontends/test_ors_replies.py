"""A worker's failure as an ORS answer. ORS clients run an operation again after a status of 500 or more."""

from __future__ import annotations

from itertools import product

import pytest

from gateway.core import errors
from gateway.core.errors import UpstreamError
from gateway.frontends.asgi import Refusal
from gateway.frontends.errors import ORS_STATUS, WorkerDied, status_of
from gateway.frontends.ors.app import ONCE, as_order

FAILURES: list[tuple[UpstreamError, int, str]] = [
    (errors.UpstreamGone("it broke", sent=True), 410, "worker_lost"),
    (errors.UpstreamGone("nobody there", sent=False), 503, "worker_lost"),
    (WorkerDied("it died", reason="out_of_memory"), 410, "out_of_memory"),
    (errors.UpstreamTimeout("too slow"), 410, "timeout"),
    (errors.AuthorFault("no judge"), 410, "author_fault"),
    (errors.SessionFailed("no box"), 410, "session_failed"),
    (errors.UpstreamError("nonsense"), 410, ""),
]


@pytest.mark.parametrize(("operation", "failure"), list(product(sorted(ONCE), FAILURES)), ids=lambda one: str(one)[:60])
def test_a_failure_of_a_call_that_may_have_run_never_has_a_status_that_clients_retry(
    operation: str, failure: tuple[UpstreamError, int, str]
) -> None:
    error, status, reason = failure

    answer = as_order(error, operation)

    assert isinstance(answer, Refusal)
    assert (answer.status, answer.body.get("reason", "")) == (status, reason)
    assert answer.body["code"] == error.code
    assert answer.body["detail"].startswith(f"{reason}: {error.detail}" if reason else error.detail)
    has_begun = status == 410 and not isinstance(
        error, errors.AuthorFault | errors.SessionFailed
    )  # such a session accepts no calls
    assert ("may have run" in answer.body["detail"]) is has_begun
    assert [name for name, _ in answer.extra] == ([b"retry-after"] if status == 503 else [])


@pytest.mark.parametrize("failure", FAILURES, ids=lambda one: str(one)[:60])
def test_a_failure_of_a_repeatable_operation_keeps_its_own_status(failure: tuple[UpstreamError, int, str]) -> None:
    error, _, _ = failure

    assert as_order(error, "prompt") is error
    assert status_of(error, ORS_STATUS) >= 500

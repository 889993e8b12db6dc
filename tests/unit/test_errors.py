"""The tree of errors and the tables from it to statuses."""

from __future__ import annotations

import inspect
import re

import pytest

from gateway.core import errors
from gateway.core.errors import GatewayError
from gateway.fronts.errors import AREAL_STATUS, ORS_STATUS, RETRY_AFTER_S, STATUS, retry_after, status_of


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
        case errors.TaskRateLimited:
            return errors.TaskRateLimited("too often", retry_after_s=3.5)
    return kind("it went wrong")


def test_every_error_stands_in_the_one_tree() -> None:
    classes = [value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__]

    assert set(classes) == set(OURS)
    # An adapter may refine one for itself; what others are to tell apart has a code, and belongs into core/errors.py.
    assert {kind for kind in tree() if "code" in vars(kind)} == set(OURS)


@pytest.mark.parametrize("kind", OURS)
def test_every_error_has_a_row_of_its_own_in_the_table_of_statuses(kind: type[GatewayError]) -> None:
    assert kind in STATUS


@pytest.mark.parametrize("kind", OURS)
def test_every_error_has_a_code_of_its_own(kind: type[GatewayError]) -> None:
    assert "code" in vars(kind)
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", kind.code)
    assert [other.code for other in OURS].count(kind.code) == 1


def test_the_tables_name_no_error_that_is_none() -> None:
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
        (errors.TaskRateLimited, 503),
        (errors.SessionExists, 500),
        (errors.SessionNotFound, 404),
        (errors.SessionClosed, 404),
        (errors.PoolExhausted, 503),
        (errors.EnvironmentUnavailable, 500),
        (errors.StoreUnavailable, 500),
        (errors.UpstreamError, 500),
        (errors.UpstreamTimeout, 500),
        (errors.UpstreamGone, 500),
    ],
)
def test_areals_clients_know_five_statuses(kind: type[GatewayError], status: int) -> None:
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
        (errors.TaskRateLimited, 429, 429),
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


def test_an_error_that_is_newer_than_the_tables_has_its_ancestor_s_status() -> None:
    # Made in a function so that no other test meets it; the tree keeps weak references only.
    newer = type("Newer", (errors.SessionClosed,), {"__module__": "tests"})

    assert status_of(newer("expired")) == 410


@pytest.mark.parametrize("kind", OURS)
def test_only_an_error_that_may_pass_says_when_to_come_again(kind: type[GatewayError]) -> None:
    header = retry_after(made(kind))

    if kind is errors.TaskRateLimited:
        assert header in ([(b"retry-after", b"4")], [(b"retry-after", b"5")])
    elif kind.retryable:
        [(name, value)] = header
        assert name == b"retry-after"
        assert RETRY_AFTER_S[0] <= int(value) <= RETRY_AFTER_S[1] <= 10  # one SDK waits for 10 s at most
    else:
        assert header == []


def test_errors_that_may_pass_are_those_of_capacity_and_of_the_store() -> None:
    passing = {kind.code for kind in OURS if kind.retryable}

    assert passing == {"pool_exhausted", "rate_limited", "environment_unavailable", "store_unavailable"}


def test_a_task_that_fails_its_schema_tells_every_problem_and_where_it_is() -> None:
    error = errors.TaskInvalid([("config.x", "is wrong"), ("", "is too large")], where="tasks[3]")

    assert error.detail == "tasks[3]: config.x: is wrong; is too large"
    assert error.problems == (("config.x", "is wrong"), ("", "is too large"))


def test_an_error_without_a_sentence_shows_its_code() -> None:
    assert errors.PoolExhausted().detail == "pool_exhausted"
    assert errors.PoolExhausted("all are taken").detail == "all are taken"


def test_a_closed_session_tells_why() -> None:
    error = errors.SessionClosed("worker_lost")

    assert (error.reason, error.detail) == ("worker_lost", "the session was closed: worker_lost")

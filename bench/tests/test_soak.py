"""A soak's evaluation of its observations: errors, counts, slopes."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.episodes import WrongAnswer
from bench.load.http1 import Response
from bench.load.steps import Stepped
from bench.soak.errors import AFTER_S, Failed, Fault, Ledger, Untyped, read_areal, read_frame, read_ors
from bench.soak.run import Found, results
from bench.soak.samples import Process, Sample, Samples, Verdict, flatness, slope
from bench.soak.trainers import Episode

# -- errors -------------------------------------------------------------------------------------------------------


def stream(*events: tuple[str, str]) -> Response:
    return Response(200, "".join(f"event: {name}\ndata: {data}\n\n" for name, data in events).encode())


def answer(status: int, body: object) -> Response:
    return Response(status, json.dumps(body).encode())


def test_an_error_event_of_a_stream_starts_with_its_kind() -> None:
    found = read_ors(stream(("task_id", "1"), ("error", "worker_lost: the session was closed")))

    assert found == Failed("worker_lost", "worker_lost: the session was closed")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        pytest.param(
            {"detail": "gone", "code": "session_closed", "reason": "worker_lost"},
            "worker_lost",
            id="the reason of an error",
        ),
        pytest.param({"detail": "full", "code": "pool_exhausted"}, "pool_exhausted", id="the code of an error"),
        pytest.param({"error": "x", "detail": "full", "status": "capacity"}, "capacity", id="the status of an error"),
        pytest.param(
            {"error": "x", "detail": "the store is away", "status": "internal"},
            "store_unavailable",
            id="an unavailable store",
        ),
    ],
)
def test_an_error_over_http_has_a_kind(body: object, kind: str) -> None:
    found = read_ors(answer(410, body))

    assert isinstance(found, Failed)
    assert (found.kind, found.is_over) == (kind, True)


@pytest.mark.parametrize(
    "response",
    [
        pytest.param(answer(500, {"detail": "what"}), id="no kind"),
        pytest.param(Response(502, b"Bad Gateway"), id="not JSON"),
        pytest.param(answer(500, {"detail": "x", "code": "internal", "reward": 0.0}), id="a reward"),
        pytest.param(stream(("task_id", "1"), ("error", "it broke")), id="an event without a kind"),
        pytest.param(stream(("chunk", '{"reward": 0}'), ("error", "worker_lost: x")), id="an event with a reward"),
        pytest.param(Response(200, b"event: chunk\ndata: {"), id="a truncated stream"),
        pytest.param(Response(200, b""), id="an empty body"),
    ],
)
def test_an_error_without_a_kind_is_untyped(response: Response) -> None:
    with pytest.raises(Untyped):
        read_ors(response)


def test_an_areal_step_with_another_reward_is_a_wrong_answer() -> None:
    right = {"observation": {"type": "text", "content": "7 8 0"}, "reward": 1.0, "done": False}

    assert read_areal(answer(200, right)) == Stepped("7", 8, 0)
    with pytest.raises(WrongAnswer):
        read_areal(answer(200, right | {"reward": 0.0}))


def test_the_reason_of_an_openenv_error_frame_takes_precedence_over_its_code() -> None:
    frame = {"type": "error", "data": {"message": "x", "code": "SESSION_ERROR", "reason": "worker_lost"}}

    found = read_frame(json.dumps(frame).encode())

    assert isinstance(found, Failed)
    assert (found.kind, found.is_over) == ("worker_lost", True)


@pytest.mark.parametrize(
    ("kind", "fault", "age_s", "violations"),
    [
        pytest.param("worker_lost", Fault.KILL_WORKER, 1.0, 0, id="a fault explains the error"),
        pytest.param("worker_lost", Fault.PAUSE_REDIS, 1.0, 1, id="another fault does not explain the error"),
        pytest.param("worker_lost", Fault.KILL_WORKER, AFTER_S + 1, 1, id="too long after the fault"),
        pytest.param("pool_exhausted", Fault.KILL_WORKER, AFTER_S + 1, 0, id="a full pool needs no fault"),
        pytest.param("internal", Fault.KILL_REPLICA, 1.0, 1, id="no fault explains the error"),
        pytest.param("session_not_found", Fault.RESTART_REDIS, 1.0, 1, id="an unknown session"),
    ],
)
def test_an_error_is_a_violation_unless_a_fault_explains_it(
    kind: str, fault: Fault, age_s: float, violations: int
) -> None:
    ledger = Ledger()
    ledger.recent.append((fault, time.monotonic() - age_s))

    ledger.add_error("ORS", Failed(kind, "some text"))

    assert ledger.errors[kind] == 1
    assert len(ledger.violations) == violations


def test_a_connection_that_breaks_without_a_fault_is_a_violation() -> None:
    ledger = Ledger()

    ledger.add_broken("ORS", ConnectionResetError(), is_explained=True)
    ledger.add_broken("ORS", ConnectionResetError(), is_explained=False)

    assert ledger.errors["connection"] == 2
    assert len(ledger.violations) == 1


# -- counts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "stepped", "violations"),
    [
        pytest.param(1, Stepped("0", 1, 0), 0, id="the first step"),
        pytest.param(3, Stepped("2", 1, 0), 0, id="the two earlier steps did not run"),
        pytest.param(3, Stepped("2", 3, 0), 0, id="the two earlier steps ran"),
        pytest.param(3, Stepped("2", 4, 0), 1, id="more steps than were sent"),
        pytest.param(1, Stepped("0", 0, 0), 1, id="no step was counted"),
        pytest.param(2, Stepped("0", 1, 0), 1, id="the answer to another step"),
        pytest.param(1, Stepped("0", 1, 1), 1, id="a step ran twice in its worker"),
    ],
)
def test_the_count_of_a_worker_lies_between_the_answered_and_the_sent_steps(
    sent: int, stepped: Stepped, violations: int
) -> None:
    ledger = Ledger()
    episode = Episode(ledger, "ORS")
    tokens = [episode.next_token() for _ in range(sent)]

    episode.check(tokens[-1], stepped)

    assert len(ledger.violations) == violations


def test_a_count_that_does_not_grow_is_a_violation() -> None:
    ledger = Ledger()
    episode = Episode(ledger, "ORS")
    for count in (1, 1):
        episode.check(episode.next_token(), Stepped("0" if not ledger.steps else "1", count, 0))

    assert len(ledger.violations) == 1


# -- slopes -------------------------------------------------------------------------------------------------------


@given(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.lists(st.integers(0, 1000), min_size=2, unique=True))
def test_the_slope_of_points_on_a_line_is_the_slope_of_the_line(rise: float, base: float, places: list[int]) -> None:
    assert slope([(x, base + rise * x) for x in places]) == pytest.approx(rise, abs=1e-6, rel=1e-6)


@pytest.mark.parametrize("points", [[], [(1.0, 5.0)], [(1.0, 5.0), (1.0, 9.0)]])
def test_the_slope_without_two_moments_is_0(points: list[tuple[float, float]]) -> None:
    assert slope(points) == 0.0


def sample(at_s: float, rss_mib: float, *, life: int = 1, redis_mib: float | None = 2.0) -> Sample:
    process = Process(life=life, rss_mib=rss_mib, files=20, threads=5)
    return Sample(at_s=at_s, replicas=[process], keys=9, redis_mib=redis_mib, containers=1, steps=0)


def growth(samples: list[Sample], *, what: str = "memory") -> Verdict:
    (found,) = [each for each in flatness(Samples(samples), 1200.0) if what in each.what]
    return found


def test_a_growth_in_the_first_half_only_is_flat() -> None:
    samples = [sample(at, 80.0 + min(at, 600.0) / 10) for at in range(0, 1201, 10)]

    assert growth(samples).value == pytest.approx(0.0, abs=1e-6)
    assert growth(samples).holds


def test_a_leak_is_not_flat() -> None:
    samples = [sample(at, 80.0 + at / 30) for at in range(0, 1201, 10)]  # 2 MiB a minute

    assert growth(samples).value == pytest.approx(20.0)
    assert not growth(samples).holds


def test_a_new_process_of_the_replica_does_not_count_as_growth() -> None:
    samples = [sample(at, 50.0 if at < 700 else 90.0, life=1 if at < 700 else 2) for at in range(600, 1201, 10)]

    assert growth(samples).value == pytest.approx(0.0)


def test_moments_without_redis_are_left_out() -> None:
    samples = [sample(at, 80.0, redis_mib=None if at % 20 else 2.0) for at in range(600, 1201, 10)]

    assert growth(samples, what="Redis").value == pytest.approx(0.0)


# -- the end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("violations", "value", "is_good"),
    [([], 0.0, True), (["a step ran twice"], 0.0, False), ([], 2.0, False)],
)
def test_a_soak_is_good_if_all_verdicts_hold_and_there_is_no_violation(
    violations: list[str], value: float, is_good: bool
) -> None:
    found = Found(verdicts=[Verdict("containers", value, 1.0)])
    found.ledger.violations.extend(violations)

    assert found.is_good is is_good
    assert results(found)["is_good"] is is_good

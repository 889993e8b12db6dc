"""Finished calls: what is kept of them, for how long, and in how much memory; the clock is the test's."""

import pytest
from envserver.errors import Refused
from envserver.sessions.outcomes import KEPT_S, KEYS_FOR_LIFE, KEYS_MAX, OVERHEAD_BYTES, Outcome, Outcomes

OUTCOME: Outcome = ("result", b"x" * 100)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def outcomes(clock: Clock) -> Outcomes:
    return Outcomes(max_bytes=100 * (100 + OVERHEAD_BYTES), clock=clock)


@pytest.mark.parametrize(("age_s", "is_known"), [(0, True), (55, True), (60, True), (60.1, False), (65, False)])
def test_an_outcome_is_kept_for_a_minute(outcomes: Outcomes, clock: Clock, age_s: float, is_known: bool) -> None:
    outcomes.keep(1, "t", OUTCOME, 3)

    clock.now = age_s

    assert outcomes.find(1, "t") == ((OUTCOME, 3) if is_known else None)


def test_an_outcome_belongs_to_its_owner_only(outcomes: Outcomes) -> None:
    outcomes.keep(1, "t", OUTCOME)

    assert outcomes.find(2, "t") is None
    assert outcomes.find(1, "other") is None


def test_old_outcomes_use_no_memory(outcomes: Outcomes, clock: Clock) -> None:
    for i in range(50):
        outcomes.keep(1, str(i), OUTCOME)

    clock.now = KEPT_S + 1
    outcomes.sweep()

    assert outcomes.total_bytes == 0


def test_over_the_bound_the_oldest_outcomes_are_dropped_first(outcomes: Outcomes) -> None:
    for i in range(150):
        outcomes.keep(1, str(i), OUTCOME)

    known = [i for i in range(150) if outcomes.find(1, str(i))]
    assert known == list(range(50, 150))
    assert outcomes.total_bytes == 100 * (100 + OVERHEAD_BYTES)


def test_a_key_leads_to_its_call(outcomes: Outcomes) -> None:
    assert outcomes.claim(1, "k", 7, "t") is None

    running = outcomes.claim(1, "k", 7, "t2")
    outcomes.hold(1, "k", OUTCOME)
    ended = outcomes.claim(1, "k", 7, "t3")

    assert running is not None
    assert (running.task_id, running.outcome) == ("t", None)
    assert ended is not None
    assert (ended.task_id, ended.outcome) == ("t", OUTCOME)


def test_the_turn_of_a_call_is_known_by_its_key_after_its_outcome_is_dropped(outcomes: Outcomes, clock: Clock) -> None:
    outcomes.claim(1, "k", 7, "t")
    outcomes.keep(1, "t", OUTCOME, 3)
    outcomes.hold(1, "k", OUTCOME, 3)
    clock.now = KEPT_S + 1
    outcomes.sweep()

    by_key = outcomes.claim(1, "k", 7, "t2")

    assert outcomes.find(1, "t") is None
    assert by_key is not None
    assert by_key.turn == 3


def test_a_key_with_another_body_is_a_conflict(outcomes: Outcomes) -> None:
    outcomes.claim(1, "k", 7, "t")

    with pytest.raises(Refused) as caught:
        outcomes.claim(1, "k", 8, "t2")

    assert caught.value.status == 409


def test_keys_belong_to_their_owner_and_are_forgotten_with_it(outcomes: Outcomes) -> None:
    outcomes.claim(1, "k", 7, "t")
    outcomes.hold(1, "k", OUTCOME)

    assert outcomes.claim(2, "k", 8, "t2") is None
    outcomes.forget(1)
    outcomes.forget(2)
    assert outcomes.total_bytes == 0
    outcomes.hold(1, "k", OUTCOME)
    assert outcomes.total_bytes == 0


def test_a_key_whose_call_never_ran_can_be_claimed_again(outcomes: Outcomes) -> None:
    outcomes.claim(1, "k", 7, "t")

    outcomes.abandon(1, "k")

    assert outcomes.claim(1, "k", 8, "t2") is None


def test_after_a_minute_only_the_last_keys_of_a_session_are_kept(outcomes: Outcomes, clock: Clock) -> None:
    for i in range(20):
        outcomes.claim(1, str(i), 7, str(i))
        outcomes.hold(1, str(i), OUTCOME)

    clock.now = 10 * KEPT_S
    known = [i for i in range(19, -1, -1) if outcomes.claim(1, str(i), 7, "new")]

    assert known == list(range(19, 19 - KEYS_FOR_LIFE, -1))


def test_within_a_minute_no_key_is_forgotten(outcomes: Outcomes, clock: Clock) -> None:
    for i in range(50):
        outcomes.claim(1, str(i), 7, str(i))
        outcomes.hold(1, str(i), OUTCOME)

    clock.now = KEPT_S - 1

    assert all(outcomes.claim(1, str(i), 7, "new") for i in range(50))


def test_a_call_whose_outcome_was_dropped_for_memory_is_refused_and_not_run_again(outcomes: Outcomes) -> None:
    for i in range(101):
        outcomes.claim(1, str(i), 7, str(i))
        outcomes.hold(1, str(i), OUTCOME)

    with pytest.raises(Refused) as caught:
        outcomes.claim(1, "0", 7, "new")

    assert caught.value.status == 409
    assert outcomes.claim(1, "100", 7, "new") is not None
    assert outcomes.total_bytes <= 100 * (100 + OVERHEAD_BYTES)


def test_the_number_of_keys_is_bounded(clock: Clock) -> None:
    outcomes = Outcomes(max_bytes=2**30, clock=clock)

    for i in range(KEYS_MAX + 10):
        outcomes.claim(1, str(i), 7, str(i))
        outcomes.hold(1, str(i), OUTCOME)

    assert outcomes.claim(1, str(KEYS_MAX + 9), 7, "new") is not None
    assert outcomes.claim(1, "0", 7, "new") is None

"""The outcome of an episode follows from its session's close reason and its worker's summary."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.episode import Summary, summary_to_json
from gateway.core.faults import FaultKind, read_faults
from gateway.core.outcomes import Comparable, EpisodeOutcome, comparable, kept_result, outcome_of, reward_of
from gateway.core.session import CloseReason

WON = Summary(reward=1.0, finished=True, steps=3, seconds=1.0)
SUMMARIES: dict[str, Summary | None] = {
    "nothing": None,
    "unplayed": Summary(reward=0.0, finished=False, steps=0, seconds=1.0),
    "begun": replace(WON, finished=False),
    "finished": WON,
    "authors": replace(WON, fault=FaultKind.AUTHOR),
    "lost": replace(WON, fault=FaultKind.INFRASTRUCTURE),
    "no number": replace(WON, reward=math.nan),
}
OUTCOMES = {
    # Close reason:           one outcome for each entry of SUMMARIES, in that order
    CloseReason.DELETED: "unplayed unplayed stopped finished author_fault infrastructure author_fault",
    CloseReason.CANCELLED: "unplayed unplayed unplayed unplayed author_fault infrastructure author_fault",
    CloseReason.EXPIRED: "unplayed unplayed unplayed finished author_fault infrastructure author_fault",
    CloseReason.OPEN_FAILED: "unplayed unplayed unplayed unplayed author_fault infrastructure author_fault",
    CloseReason.AUTHOR_FAULT: "author_fault " * 7,
    CloseReason.WORKER_LOST: "infrastructure " * 7,
    CloseReason.OUT_OF_MEMORY: "infrastructure " * 7,
    CloseReason.TIMEOUT: "infrastructure " * 7,
    CloseReason.SESSION_FAILED: "infrastructure " * 7,
    CloseReason.SHUTDOWN: "infrastructure " * 7,
    CloseReason.OPERATOR: "infrastructure " * 7,
}


@pytest.mark.parametrize("reason", CloseReason)
def test_each_close_reason_and_summary_has_its_outcome(reason: CloseReason) -> None:
    assert [outcome_of(reason, summary).value for summary in SUMMARIES.values()] == OUTCOMES[reason].split()


@pytest.mark.parametrize("reason", CloseReason)
def test_an_end_that_the_worker_did_not_answer_is_a_failure_of_infrastructure(reason: CloseReason) -> None:
    is_authors = reason is CloseReason.AUTHOR_FAULT
    expected = EpisodeOutcome.AUTHOR_FAULT if is_authors else EpisodeOutcome.INFRASTRUCTURE

    assert outcome_of(reason, None, is_answered=False) is expected


@pytest.mark.parametrize("reason", CloseReason)
def test_a_kept_result_stands_unless_the_episode_was_discarded_or_its_worker_has_a_newer_one(
    reason: CloseReason,
) -> None:
    kept = summary_to_json(WON).decode()
    is_discarded = reason in (CloseReason.CANCELLED, CloseReason.OPEN_FAILED)
    is_lost = OUTCOMES[reason].startswith("infrastructure")

    assert kept_result(reason, None, kept) == (None if is_discarded else WON)
    assert kept_result(reason, replace(WON, reward=2.0), kept) == (WON if is_lost else None)
    assert kept_result(reason, None, "") is None


@pytest.mark.parametrize(
    ("reason", "summary", "late", "expected"),
    [
        (CloseReason.DELETED, "begun", 3, EpisodeOutcome.INFRASTRUCTURE),
        (CloseReason.DELETED, "begun", 2, EpisodeOutcome.STOPPED),
        (CloseReason.DELETED, "unplayed", 0, EpisodeOutcome.INFRASTRUCTURE),
        (CloseReason.EXPIRED, "unplayed", 0, EpisodeOutcome.INFRASTRUCTURE),
        (CloseReason.DELETED, "finished", 3, EpisodeOutcome.FINISHED),
        (CloseReason.DELETED, "authors", 2, EpisodeOutcome.AUTHOR_FAULT),
    ],
)
def test_an_episode_without_a_step_after_a_late_call_is_a_failure_of_infrastructure(
    reason: CloseReason, summary: str, late: int, expected: EpisodeOutcome
) -> None:
    assert outcome_of(reason, SUMMARIES[summary], steps_before_late=late) is expected


def test_rewards_of_former_scorers_and_of_marked_episodes_share_no_mean() -> None:
    episodes: list[dict[str, Any]] = [
        {"environment": "math", "scorer": "2", "reward": 1.0},
        {"environment": "math", "scorer": "2", "reward": 0.5, "unexpected_error": "KeyError: 'x'"},
        {"environment": "math", "scorer": "2", "reward": None, "unexpected_error": "KeyError: 'x'"},
        {"environment": "math", "scorer": "1", "reward": 0.25, "unexpected_error": None},
        {"environment": "math", "scorer": "2", "reward": None, "unexpected_error": None},
    ]

    assert comparable(episodes) == Comparable([1.0], former=1, marked=2)


@pytest.mark.parametrize("outcome", EpisodeOutcome)
def test_only_an_outcome_that_the_agent_caused_has_a_reward(outcome: EpisodeOutcome) -> None:
    is_agents = outcome in (EpisodeOutcome.FINISHED, EpisodeOutcome.STOPPED)

    assert reward_of(outcome, WON) == (1.0 if is_agents else None)
    assert reward_of(outcome, None) is None


@pytest.mark.parametrize("outcome", EpisodeOutcome)
def test_an_unrewarded_episode_has_no_reward_unless_its_trainer_stopped_it(outcome: EpisodeOutcome) -> None:
    silent = replace(WON, reward=0.0, is_rewarded=False)

    # A trainer that stops an episode before its reward gets the sum so far.
    assert reward_of(outcome, silent) == (0.0 if outcome is EpisodeOutcome.STOPPED else None)


def test_an_environment_that_ends_an_episode_without_a_reward_is_at_fault_unless_a_judge_rewards_it() -> None:
    silent = replace(WON, reward=0.0, is_rewarded=False)

    assert outcome_of(CloseReason.DELETED, silent) is EpisodeOutcome.AUTHOR_FAULT
    assert outcome_of(CloseReason.DELETED, replace(silent, finished=False)) is EpisodeOutcome.STOPPED
    for blameless in (replace(silent, is_judged=True), replace(silent, is_whole=False)):
        assert outcome_of(CloseReason.DELETED, blameless) is EpisodeOutcome.FINISHED


def test_an_incomplete_sum_is_not_a_reward() -> None:
    part = replace(WON, is_whole=False)

    assert reward_of(outcome_of(CloseReason.DELETED, part), part) is None


@pytest.mark.parametrize("written", [b"", b"{", b"{}", b"[1]", b'[{"kind": "agent"}]', b"[" * 100_000])
def test_faults_that_cannot_be_parsed_are_ignored(written: bytes) -> None:
    assert read_faults(written) == ()


def test_a_fault_is_read_with_its_place_error_and_traceback() -> None:
    [fault] = read_faults(b'[{"kind":"author","place":"reset","error":"KeyError","traceback":"File \\ud800"}]')

    assert (fault.kind, fault.place, fault.error) == (FaultKind.AUTHOR, "reset", "KeyError")
    assert fault.traceback == "File \ud800"

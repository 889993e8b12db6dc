"""How an episode ended is decided in one place, from why its session ended and what its worker told."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gateway.core.episode import Summary
from gateway.core.faults import FaultKind, read_faults
from gateway.core.outcomes import EpisodeOutcome, outcome_of, reward_of
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
    # Why it ended:           what the worker told, in the order above
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
def test_how_an_episode_ended(reason: CloseReason) -> None:
    assert [outcome_of(reason, summary).value for summary in SUMMARIES.values()] == OUTCOMES[reason].split()


@pytest.mark.parametrize("reason", CloseReason)
def test_an_end_that_its_worker_did_not_take_is_a_failure_of_infrastructure(reason: CloseReason) -> None:
    is_authors = reason is CloseReason.AUTHOR_FAULT
    expected = EpisodeOutcome.AUTHOR_FAULT if is_authors else EpisodeOutcome.INFRASTRUCTURE

    assert outcome_of(reason, None, is_answered=False) is expected


@pytest.mark.parametrize("outcome", EpisodeOutcome)
def test_only_what_the_agent_did_has_a_reward(outcome: EpisodeOutcome) -> None:
    is_agents = outcome in (EpisodeOutcome.FINISHED, EpisodeOutcome.STOPPED)

    assert reward_of(outcome, WON) == (1.0 if is_agents else None)
    assert reward_of(outcome, None) is None


@pytest.mark.parametrize("outcome", EpisodeOutcome)
def test_an_episode_that_ended_without_a_word_of_its_reward_has_none(outcome: EpisodeOutcome) -> None:
    silent = replace(WON, reward=0.0, is_rewarded=False)

    # A trainer that stopped an episode before its reward has the sum so far, as ever.
    assert reward_of(outcome, silent) == (0.0 if outcome is EpisodeOutcome.STOPPED else None)


def test_an_environment_that_ends_an_episode_and_gave_no_reward_is_wrong_unless_a_judge_gives_it() -> None:
    silent = replace(WON, reward=0.0, is_rewarded=False)

    assert outcome_of(CloseReason.DELETED, silent) is EpisodeOutcome.AUTHOR_FAULT
    assert outcome_of(CloseReason.DELETED, replace(silent, finished=False)) is EpisodeOutcome.STOPPED
    for blameless in (replace(silent, is_judged=True), replace(silent, is_whole=False)):
        assert outcome_of(CloseReason.DELETED, blameless) is EpisodeOutcome.FINISHED


def test_a_sum_of_which_a_part_is_missing_is_no_reward() -> None:
    part = replace(WON, is_whole=False)

    assert reward_of(outcome_of(CloseReason.DELETED, part), part) is None


@pytest.mark.parametrize("written", [b"", b"{", b"{}", b"[1]", b'[{"kind": "agent"}]', b"[" * 100_000])
def test_faults_that_cannot_be_read_are_none(written: bytes) -> None:
    assert read_faults(written) == ()


def test_a_fault_is_read_with_what_it_tells() -> None:
    [fault] = read_faults(b'[{"kind":"author","place":"reset","error":"KeyError","traceback":"File \\ud800"}]')

    assert (fault.kind, fault.place, fault.error) == (FaultKind.AUTHOR, "reset", "KeyError")
    assert fault.traceback == "File \ud800"

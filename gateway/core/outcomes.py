"""Decides how episodes end and whether their rewards count; no other module decides this.

An episode ends because of the agent, the environment's author or the infrastructure. The author is at fault if the code
raises an exception or gives a reward that is not a number. The author is also at fault if the code ends the episode
without a reward. Only an end by the agent gives a reward, for trainers as well as in logs, metrics, task records and
curricula.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple

from gateway.core.episode import Summary, summary_of_json
from gateway.core.faults import FaultKind
from gateway.core.session import CloseReason


class EpisodeOutcome(StrEnum):
    """The outcome of an episode."""

    FINISHED = "finished"  #: the environment ended it
    STOPPED = "stopped"  #: its trainer ended it after at least one step
    UNPLAYED = "unplayed"  #: no agent acted in it, or its trainer cancelled it or let it expire
    AUTHOR_FAULT = "author_fault"  #: the environment author's code failed
    INFRASTRUCTURE = "infrastructure"  #: the worker, its sandbox, the engine or the gateway failed


EARNED: Final = frozenset((EpisodeOutcome.FINISHED, EpisodeOutcome.STOPPED))
"""Outcomes whose reward the agent earned."""
_INFRASTRUCTURE: Final = frozenset(
    (
        CloseReason.WORKER_LOST,
        CloseReason.OUT_OF_MEMORY,
        CloseReason.TIMEOUT,
        CloseReason.SESSION_FAILED,
        CloseReason.SHUTDOWN,
        CloseReason.OPERATOR,
    )
)


def outcome_of(
    reason: CloseReason, summary: Summary | None, *, is_answered: bool = True, steps_before_late: int | None = None
) -> EpisodeOutcome:
    """Decide the outcome of an episode.

    Args:
        reason: The reason why its session ended.
        summary: The worker's summary of the episode; None: the worker sent no summary.
        is_answered: False if the worker did not confirm the end of the session, so that the result is unknown.
        steps_before_late: Number of steps before the last call that took too long; None: no call did.
    """
    if reason in _INFRASTRUCTURE:
        return EpisodeOutcome.INFRASTRUCTURE
    if reason is CloseReason.AUTHOR_FAULT:
        return EpisodeOutcome.AUTHOR_FAULT
    if not is_answered:
        return EpisodeOutcome.INFRASTRUCTURE
    if summary is None:
        return EpisodeOutcome.UNPLAYED
    is_late = steps_before_late is not None and summary.steps <= steps_before_late  # and no later call has ended
    if summary.fault is FaultKind.INFRASTRUCTURE or (is_late and not summary.finished):
        return EpisodeOutcome.INFRASTRUCTURE
    if summary.fault is FaultKind.AUTHOR or not math.isfinite(summary.reward):
        return EpisodeOutcome.AUTHOR_FAULT
    if reason in (CloseReason.CANCELLED, CloseReason.OPEN_FAILED) or summary.steps < 1:
        return EpisodeOutcome.UNPLAYED
    if summary.finished:
        return EpisodeOutcome.AUTHOR_FAULT if is_without_reward(summary) else EpisodeOutcome.FINISHED
    return EpisodeOutcome.STOPPED if reason is CloseReason.DELETED else EpisodeOutcome.UNPLAYED


def kept_result(reason: CloseReason, summary: Summary | None, kept: str) -> Summary | None:
    """Return the result that stands whatever happened to the session after its environment had ended the episode.

    The trainer has its reward. None: the session's end decides.

    Args:
        reason: The reason why the session ended.
        summary: The worker's summary of the episode at that end, if it sent one.
        kept: ``Session.result``.
    """
    is_discarded = reason in (CloseReason.CANCELLED, CloseReason.OPEN_FAILED)
    if not kept or is_discarded or (summary is not None and reason not in _INFRASTRUCTURE):
        return None
    return summary_of_json(kept)


def is_without_reward(summary: Summary) -> bool:
    """Return True if the environment ended the episode without a reward in any step, which is its author's mistake.

    Third-party servers also write a reward that is not a number as null. An environment that judges groups of episodes
    may leave all rewards to the judge.
    """
    return summary.finished and summary.is_whole and not summary.is_rewarded and not summary.is_judged


def reward_of(outcome: EpisodeOutcome, summary: Summary | None) -> float | None:
    """Return the sum of an episode's rewards if the agent earned it.

    None means that there is no reward, which differs from 0.

    A finished episode without a reward in any step has none: a judge of groups may give it later.
    """
    if summary is None or outcome not in EARNED or not summary.is_whole:
        return None
    return summary.reward if summary.is_rewarded or outcome is not EpisodeOutcome.FINISHED else None


class Comparable(NamedTuple):
    """Rewards that may share a mean, and how many others there are."""

    rewards: list[float]
    former: int
    """Number of rewards that former versions of the scorer gave."""
    marked: int
    """Number of episodes with an unexpected error."""


def comparable(episodes: Iterable[Mapping[str, Any]]) -> Comparable:
    """Return the rewards of *episodes* that may share a mean, in order.

    They are of one version of each environment's scorer, that of the newest episode with a reward, and of episodes
    without an unexpected error.

    Args:
        episodes: Recorded episodes, newest first, with ``environment``, ``scorer``, ``unexpected_error`` and
            ``reward``.
    """
    newest: dict[str, str | None] = {}
    rewards, others, marked = [], 0, 0
    for episode in episodes:
        if episode.get("unexpected_error"):  # an older gateway sends none
            marked += 1
        elif episode["reward"] is not None:
            scorer = episode.get("scorer")  # an older gateway sends none
            if scorer == newest.setdefault(episode["environment"], scorer):
                rewards.append(episode["reward"])
            else:
                others += 1
    return Comparable(rewards, others, marked)

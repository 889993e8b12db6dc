"""How episodes end, and whether their rewards count: the one place where that is decided.

An episode ends because of the agent, which gives a reward; because of the environment's author, whose code raised an
exception, gave a reward that is no number, or ended the episode without any; or because of infrastructure. Only the
first gives a reward: to trainers, in logs, metrics, task records and curricula.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final

from gateway.core.episode import Summary
from gateway.core.faults import FaultKind
from gateway.core.session import CloseReason


class EpisodeOutcome(StrEnum):
    """How an episode ended."""

    FINISHED = "finished"  #: the environment ended it
    STOPPED = "stopped"  #: its trainer ended it, after at least one step
    UNPLAYED = "unplayed"  #: nobody acted in it, or its trainer cancelled it or let it expire
    AUTHOR_FAULT = "author_fault"  #: the environment author's code failed
    INFRASTRUCTURE = "infrastructure"  #: the worker, its sandbox, the engine or the gateway failed


EARNED: Final = frozenset((EpisodeOutcome.FINISHED, EpisodeOutcome.STOPPED))
"""Outcomes whose reward is the agent's own."""
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


def outcome_of(reason: CloseReason, summary: Summary | None, *, is_answered: bool = True) -> EpisodeOutcome:
    """Decide how an episode ended.

    Args:
        reason: why its session was ended.
        summary: what its worker told of it at the end; None: nothing.
        is_answered: False: the worker did not take the end of the session, so how the episode went is not known.
    """
    if reason in _INFRASTRUCTURE:
        return EpisodeOutcome.INFRASTRUCTURE
    if reason is CloseReason.AUTHOR_FAULT:
        return EpisodeOutcome.AUTHOR_FAULT
    if not is_answered:
        return EpisodeOutcome.INFRASTRUCTURE
    if summary is None:
        return EpisodeOutcome.UNPLAYED
    if summary.fault is FaultKind.INFRASTRUCTURE:
        return EpisodeOutcome.INFRASTRUCTURE
    if summary.fault is FaultKind.AUTHOR or not math.isfinite(summary.reward):
        return EpisodeOutcome.AUTHOR_FAULT
    if reason in (CloseReason.CANCELLED, CloseReason.OPEN_FAILED) or summary.steps < 1:
        return EpisodeOutcome.UNPLAYED
    if summary.finished:
        return EpisodeOutcome.AUTHOR_FAULT if is_without_reward(summary) else EpisodeOutcome.FINISHED
    return EpisodeOutcome.STOPPED if reason is CloseReason.DELETED else EpisodeOutcome.UNPLAYED


def is_without_reward(summary: Summary) -> bool:
    """Whether the environment ended the episode and gave no reward in any of its steps, which is its author's mistake.

    Servers of other people's write a reward that is no number as null, too. An environment that judges groups of
    episodes may leave all rewards to that.
    """
    return summary.finished and summary.is_whole and not summary.is_rewarded and not summary.is_judged


def reward_of(outcome: EpisodeOutcome, summary: Summary | None) -> float | None:
    """The sum of an episode's rewards, if the agent earned it; None says that there is no reward, which is not 0.

    One that ended without a word of its reward has none, where a judge of groups is to give it.
    """
    if summary is None or outcome not in EARNED or not summary.is_whole:
        return None
    return summary.reward if summary.is_rewarded or outcome is not EpisodeOutcome.FINISHED else None

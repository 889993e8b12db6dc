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
from typing import Any, Final

from gateway.core.episode import Summary
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


def outcome_of(reason: CloseReason, summary: Summary | None, *, is_answered: bool = True) -> EpisodeOutcome:
    """Decide the outcome of an episode.

    Args:
        reason: The reason why its session ended.
        summary: The worker's summary of the episode; None: the worker sent no summary.
        is_answered: False if the worker did not confirm the end of the session, so that the result is unknown.
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


def comparable(episodes: Iterable[Mapping[str, Any]]) -> tuple[list[float], int]:
    """Return the rewards of *episodes* that one version of each environment's scorer gave, in order.

    Rewards of two versions must not share a mean. The version is that of the newest episode with a reward.

    Args:
        episodes: Recorded episodes, newest first, with ``environment``, ``scorer`` and ``reward``.

    Returns:
        The rewards, and the number of further rewards, which other versions gave.
    """
    newest: dict[str, str | None] = {}
    rewards, others = [], 0
    for episode in episodes:
        if episode["reward"] is not None:
            scorer = episode.get("scorer")  # an older gateway sends none
            if scorer == newest.setdefault(episode["environment"], scorer):
                rewards.append(episode["reward"])
            else:
                others += 1
    return rewards, others

"""Inspects AReaL task servers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from gateway.catalog.inspect.findings import Capacity, Finding, Findings, FoundSplit, one_line
from gateway.catalog.inspect.probe import TRIAL_S, Probe, Unanswered
from gateway.core.environment import ActionType, ObservationType, ServerProtocol, SplitType

Word = TypeVar("Word", bound=StrEnum)

SLOTS = 16
"""Assumed capacity: the task server API does not report it."""
SPLIT = "train"
"""The gateway's name for the server's only set of samples, which has no name there."""


def is_info(info: Mapping[str, Any]) -> bool:
    """Return True if *info* is an answer to ``task/info``. Clients read only its name."""
    return isinstance(info.get("name"), str) and bool(info["name"])


async def look(server: Probe, info: Mapping[str, Any], *, prefix: str) -> Findings:
    """Read *info*, the answer to ``task/info``, and start one episode. The routes are below *prefix*.

    Raises:
        Unanswered: The server stopped answering.
    """
    remarks = ["AReaL servers do not report how many episodes they can hold: 16 is a guess."]
    if not prefix:
        remarks.append("Its routes are at the root, not below /api as in the written API; both are understood.")
    samples = _whole(info.get("num_samples"))
    if samples is None:
        remarks.append("It does not report its number of samples (num_samples).")
    health = f"{prefix}/health"
    ready = health if (await server.get(health)).status == 200 else f"{prefix}/task/info"
    trouble, has_names, start_s = await _try_episode(server, prefix)
    if has_names:
        remarks.append("Its samples are not counted from 0: name them in sample_ids, or tasks have to name theirs.")
    return Findings(
        protocol=ServerProtocol.AREAL,
        version="an AReaL task server",
        description=one_line(info["description"]) if isinstance(info.get("description"), str) else "",
        environments=(one_line(info["name"]),),
        chosen=one_line(info["name"]),
        ready=ready,
        capacity=Capacity(SLOTS, Finding.ASSUMED),
        splits=() if has_names else (FoundSplit(SPLIT, SplitType.TRAIN, samples),),
        has_named_samples=has_names,
        max_turns=_whole(info.get("max_episode_length")),
        observation_type=_member(ObservationType, info.get("observation_type")),
        action_type=_member(ActionType, info.get("action_type")),
        reset_s=start_s,
        trouble=trouble,
        remarks=tuple(remarks),
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


def _member(of: type[Word], value: object) -> Word | None:
    return of(value) if isinstance(value, str) and value in list(of) else None


async def _try_episode(server: Probe, prefix: str) -> tuple[str, bool, float | None]:
    """Start an episode of sample 0 and cancel it.

    Return the reason if that failed, else empty; whether the server has no sample of that number; and the seconds that
    the start took.
    """
    begun = time.monotonic()
    try:
        started = await server.post(f"{prefix}/episode/start", {"sample_id": "0", "config": {}}, within_s=TRIAL_S)
        if started.status == 404:
            return "", True, None
        episode = started.object().get("episode_id")
        if not isinstance(episode, str):
            return f"starting sample 0: {started.status} {started.text()}", False, None
        start_s = time.monotonic() - begun
        await server.post(f"{prefix}/episode/cancel", {"episode_id": episode})
    except Unanswered as error:
        return str(error), False, None
    return "", False, start_s

"""Finds the rollout that a trainer logged for an episode, by the actions in both."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

TOOL_CALL = "tool_call"


def rollout_of(steps: Sequence[Mapping[str, Any]], rollouts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the rollout whose tool calls are the *steps* of an episode; None if no rollout is that one.

    The client does not send the session's id. So the longest common beginning of the actions decides, and between equal
    ones the order of *rollouts*. A rollout with another action than the episode is not its rollout. Each side may lack
    the last actions: a trainer may log a step before or after it plays it.
    """
    played = [
        _named(step["action"])
        for step in steps
        if step["operation"] == "call" and not step.get("repeated") and isinstance(step["action"], Mapping)
    ]
    best, most = None, 0
    for rollout in rollouts:
        logged = [_of_message(one) for one in rollout["messages"] if one.get("type") == TOOL_CALL]
        common = min(len(played), len(logged))
        if common > most and all(_is_same(a, b) for a, b in zip(played, logged, strict=False)):
            best, most = rollout, common
    return best


def _named(action: Mapping[str, Any]) -> tuple[str, Any]:
    if "tool" in action:
        return str(action["tool"]), action.get("input")
    return "", action.get("fields", action.get("text", action.get("data")))


def _of_message(message: Mapping[str, Any]) -> tuple[str, Any]:
    content = message.get("content")
    try:
        return str(message.get("name") or ""), json.loads(content) if isinstance(content, str) else content
    except (ValueError, RecursionError):
        return str(message.get("name") or ""), content


def _is_same(played: tuple[str, Any], logged: tuple[str, Any]) -> bool:
    """Compare two actions. An action without a tool's name, for an environment's default tool, has any name."""
    return played[1] == logged[1] and (not played[0] or played[0] == logged[0])

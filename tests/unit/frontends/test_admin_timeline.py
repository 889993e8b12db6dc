"""Which rollout belongs to an episode."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.frontends.admin.timeline import rollout_of


def step(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"operation": "call", "action": {"tool": tool, "input": arguments}}


def rollout(id: str, *calls: tuple[str, Any]) -> dict[str, Any]:
    messages = [{"type": "tool_call", "name": name, "content": json.dumps(content)} for name, content in calls]
    return {"id": id, "messages": [{"type": "user_message", "content": "go"}, *messages]}


STEPS = [{"operation": "prompt", "action": None}, step("act", m="up"), step("act", m="down")]


@pytest.mark.parametrize(
    ("rollouts", "found"),
    [
        pytest.param([rollout("a", ("act", {"m": "up"}), ("act", {"m": "down"}))], "a", id="the same actions"),
        pytest.param([rollout("a", ("act", {"m": "up"}))], "a", id="the last action is not logged yet"),
        pytest.param(
            [rollout("a", ("act", {"m": "up"})), rollout("b", ("act", {"m": "up"}), ("act", {"m": "down"}))],
            "b",
            id="the longer common beginning",
        ),
        pytest.param([rollout("a", ("act", {"m": "up"}), ("act", {"m": "left"}))], None, id="another second action"),
        pytest.param([rollout("a", ("move", {"m": "up"}))], None, id="another tool"),
        pytest.param([rollout("a")], None, id="no action"),
        pytest.param([], None, id="no rollout"),
    ],
)
def test_the_actions_decide(rollouts: list[dict[str, Any]], found: str | None) -> None:
    chosen = rollout_of(STEPS, rollouts)

    assert (None if chosen is None else chosen["id"]) == found


def test_a_repeated_call_counts_once_and_a_plain_action_has_any_tool_s_name() -> None:
    steps = [
        step("act", m="up"),
        {**step("act", m="up"), "repeated": True},
        {"operation": "call", "action": {"fields": {"m": "down"}}},
    ]

    chosen = rollout_of(steps, [rollout("a", ("act", {"m": "up"}), ("act", {"m": "down"}))])

    assert chosen is not None

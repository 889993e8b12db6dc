"""The time limits of the bundled environments: a judge, and a tool that has a limit of its own, end within a step."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from gateway.catalog.toml import read_environment
from gateway.core.environment import Environment
from tests.envs.coding_world import judging
from tests.envs.os_sandboxes import os_module

PROJECT = Path(__file__).resolve().parents[2]
CODING: Any = importlib.import_module("coding_server")


def bundled(name: str) -> Environment:
    return read_environment(PROJECT / "env_images" / name / "environment.toml")


@pytest.mark.parametrize(
    ("name", "judge_s", "tool_s"),
    [
        ("coding", judging.TOTAL_S, CODING.MOST_EXECUTE_S),
        ("os", os_module("os_judge").JUDGE_TIMEOUT_S, os_module("os_shell").COMMAND_TIMEOUT_S),
    ],
)
def test_a_step_is_longer_than_its_judge_and_its_tool(name: str, judge_s: float, tool_s: float) -> None:
    environment = bundled(name)
    steps_s = (environment.timeouts.call_s, environment.areal.step_s, environment.openenv.step_s)

    assert environment.timeouts.judge_s == judge_s
    assert min(steps_s) > max(judge_s, tool_s)

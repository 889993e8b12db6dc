"""A user runs `examples/curriculum.py`: it starts its own gateway and scores the agent on tasks that it never saw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from examples.learner.report import are_plots_possible
from tests.deadlines import COMMAND_S

PROJECT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.wire]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "examples/curriculum.py", *arguments]
    return subprocess.run(command, cwd=PROJECT, env=os.environ, capture_output=True, text=True, timeout=COMMAND_S)


def test_the_math_agent_improves_on_tasks_that_it_never_saw(tmp_path: Path) -> None:
    told, drawn = tmp_path / "results.json", tmp_path / "plot.svg"

    done = run(
        *("--environment", "math", "--samplers", "uniform,staged", "--seeds", "1", "--episodes", "240"),
        *("--checkpoints", "2", "--out", str(drawn), "--json", str(told)),
    )

    assert done.returncode == 0, done.stderr
    assert "uniform" in done.stdout
    assert "staged" in done.stdout
    results = json.loads(told.read_text())
    uniform, staged = results["runs"]
    assert (uniform["sampler"], staged["sampler"]) == ("uniform", "staged")
    assert [episodes for episodes, _ in staged["curve"]] == [0, 120, 240]
    assert learnt(staged) > 0.2
    assert played(uniform) == played(staged) == 240
    assert all(uniform["drawn"].values()), "uniform looks at no level"
    assert staged["drawn"]["1"] > 2 * uniform["drawn"]["1"], "stages begin with the first level"
    assert staged["stage"] in {f"level-{level}" for level in (1, 2, 3, 4)}
    assert uniform["stage"] is None
    if are_plots_possible():
        assert ElementTree.parse(drawn).getroot().tag.endswith("svg")


def test_the_game_agent_improves_in_worlds_that_it_never_saw(tmp_path: Path) -> None:
    told = tmp_path / "results.json"

    done = run(
        *("--environment", "game", "--samplers", "staged", "--seeds", "1", "--episodes", "128"),
        *("--checkpoints", "1", "--json", str(told)),
    )

    assert done.returncode == 0, done.stderr
    (only,) = json.loads(told.read_text())["runs"]
    assert played(only) == 128
    assert only["groups"] == 16
    assert only["informative"] > 0
    assert only["drawn"]["1"] > 0, "stages begin with the first level"
    assert learnt(only) > 0.2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        pytest.param(
            ["--samplers", "uniform,best"],
            "'best' is not one of uniform, target_success, learning_progress, staged",
            id="an unknown sampler",
        ),
        pytest.param(["--url", "http://127.0.0.1:1"], "one sampler and one seed", id="many runs on one gateway"),
        pytest.param(["--episodes", "4"], "10 checkpoints need 40", id="too few episodes"),
    ],
)
def test_invalid_arguments_are_refused_with_a_reason(arguments: list[str], reason: str) -> None:
    done = run(*arguments)

    assert done.returncode == 2
    assert reason in done.stderr


def learnt(one: dict[str, Any]) -> float:
    return float(one["curve"][-1][1]) - float(one["curve"][0][1])


def played(one: dict[str, Any]) -> int:
    return sum(one["drawn"].values())

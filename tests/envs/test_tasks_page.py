"""docs/tasks.md: its example lines are valid tasks, and its commands exist."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from gateway.cli.imports import import_app
from gateway.tasks.split_view import read_split
from tests.envs.coding_world import tasks as coding
from tests.envs.os_sandboxes import os_module

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tasks.md").read_text("utf-8")
SHOWN = re.findall(r"^```json (\w+)\n(.+?)\n```$", PAGE, re.M | re.S)


def read_math(task: dict[str, Any]) -> object:
    """Read a task as the math environment does."""
    folder = str(ROOT / "env_images" / "math")
    if folder not in sys.path:
        sys.path.append(folder)
    scorers: Any = importlib.import_module("math_scorers")
    return scorers.Evaluation.read(task["evaluation"])


READERS: dict[str, Any] = {
    "math": read_math,
    "os": os_module("os_problem").Problem.read,
    "coding": coding.read_evaluation,
}


def test_each_environment_has_an_example() -> None:
    assert {environment for environment, _ in SHOWN} == set(READERS)


@pytest.mark.parametrize(("environment", "line"), SHOWN)
def test_each_example_line_is_a_valid_task(tmp_path: Path, environment: str, line: str) -> None:
    (tmp_path / "train.jsonl").write_text(line, "utf-8")

    (kept,) = filter(None, read_split(tmp_path / "train.jsonl").tasks)

    assert READERS[environment](json.loads(kept))


def importers() -> dict[str, set[str]]:
    """Return the options of each `gateway tasks import` command."""
    group: Any = typer.main.get_command(import_app)
    return {name: {option for p in command.params for option in p.opts} for name, command in group.commands.items()}


def test_every_importer_and_option_is_on_the_page() -> None:
    options = {option for some in importers().values() for option in some if option.startswith("--")}

    assert {name for name in importers() if f"`{name} " not in PAGE} == set()
    assert {
        option for option in options - {"--help"} if f"`{option}" not in PAGE and f" {option} " not in PAGE
    } == set()

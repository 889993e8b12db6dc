"""Checks of curricula against the available tasks: one pass reports all problems of a file or a request."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from gateway.core.errors import ConfigError, InvalidRequest, UnknownEnvironment
from gateway.core.ids import EnvironmentName
from gateway.tasks.curricula.definitions import from_document, read_curricula
from gateway.tasks.curricula.tables import Rows, TaskRow

MATH, GAME = EnvironmentName("math"), EnvironmentName("game")
COMPONENTS = '[[components]]\nenvironment = "math"\n'
WRONG = """seed = -1

[sampler]
kind = "staged"
demote_at = 0.9
target = 0.5

[[sampler.stages]]
name = "easy"
max_difficulty = 1

[[sampler.stages]]
name = "easy"
tags = ["geometrie"]

[[components]]
environment = "maths"
wieght = 2

[[components]]
environment = "math"
tags = ["algebar"]

[[components]]
environment = "math"
split = "trian"

[[components]]
environment = "math"
tags = ["odd"]
"""
TOLD = [
    "study.toml:1: seed: it must be at least 0, not -1",
    "study.toml:5: sampler.demote_at: demote_at (0.9) is not below promote_at (0.8)",
    "study.toml:6: sampler.target: the sampler staged does not use it",
    "study.toml:13: sampler.stages[1].name: two stages are named 'easy'",
    "study.toml:17: components[0].environment: no environment 'maths' is available",
    "study.toml:18: components[0].wieght: there is no such key (did you mean 'weight'?)",
    "study.toml:22: components[1].tags: no task of math/train is tagged algebar",
    "study.toml:26: components[2].split: math has no task in split 'trian'",
    "study.toml:28: components[3]: none of the component's tasks is in any stage",
]


def look(environment: EnvironmentName, split: str) -> Rows | None:
    """Return ten training tasks of math, the odd ones hard. Only workers know the tasks of game."""
    if environment == GAME:
        return None
    if environment != MATH:
        raise UnknownEnvironment(f"no environment {environment!r} is available")
    rows = [TaskRow(at, f"t{at}", ("odd" if at % 2 else "even",), 2.0 if at % 2 else 0.0) for at in range(10)]
    return tuple(rows) if split == "train" else ()


def test_all_problems_of_a_folder_are_reported_in_one_pass(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(WRONG)
    (tmp_path / "other.toml").write_text("seed = -1\ngroup_size = 0\n" + COMPONENTS)

    with pytest.raises(ConfigError) as refusal:
        read_curricula(tmp_path, look)

    told = [line.removeprefix(f"{tmp_path}{os.sep}") for line in refusal.value.detail.splitlines()]
    assert [line.split(": ")[:2] for line in told[:2]] == [["other.toml:1", "seed"], ["other.toml:2", "group_size"]]
    assert told[2:] == TOLD


def test_a_request_is_refused_for_the_same_reasons_as_a_file() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        from_document("study", tomllib.loads(WRONG), look)

    assert sorted(refusal.value.detail.split("; ")) == sorted(line.split(": ", 1)[1] for line in TOLD)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param('environment = "math"\ntags = ["prime"]\n', "2: tags: no task of math/train is tagged prime"),
        pytest.param(
            COMPONENTS + '[sampler]\nkind = "staged"\nstages = [{name = "a"}, {name = "b", min_difficulty = 3}]\n',
            "5: sampler.stages[1]: no task is in the stage 'b'",
            id="a stage without a task",
        ),
    ],
)
def test_a_reference_to_missing_tasks_is_reported_with_its_key(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "study.toml").write_text(text)

    with pytest.raises(ConfigError) as refusal:
        read_curricula(tmp_path, look)

    assert refusal.value.detail == f"{tmp_path}{os.sep}study.toml:{told}"


def test_tasks_that_only_workers_know_may_be_in_any_stage(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(
        COMPONENTS
        + '[[components]]\nenvironment = "game"\ntags = ["any"]\n'
        + '[sampler]\nkind = "staged"\nstages = [{name = "a"}, {name = "b", min_difficulty = 3}]\n'
    )

    assert len(read_curricula(tmp_path, look)["study"].components) == 2

"""Mapping of a task to the reset data of an OpenEnv server; unmappable content is refused instead of dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.core.environment import Environment, ResetMapping, Server, ServerProtocol
from gateway.core.errors import InvalidRequest
from gateway.core.ids import EnvironmentName
from gateway.core.session import SessionSetup
from gateway.upstreams.openenv.tasks import reset_data

PLAIN = Environment(
    name=EnvironmentName("maze"),
    image="maze",
    directory=Path("/"),
    command=(),
    protocol=ServerProtocol.OPENENV,
    server=Server(port=8000),
)


def looking_at(*keys: str, **from_task: str) -> Environment:
    return replace(PLAIN, resets=ResetMapping(keys=keys, from_task=from_task))


PLACED = looking_at("seed", "episode_id", "split", "index")
GAME = looking_at("seed", "dataset_name", "size", task_name="environment_config.page")


@pytest.mark.parametrize(
    ("environment", "setup", "data"),
    [
        pytest.param(PLAIN, SessionSetup(spec={}), {}, id="no request, no data"),
        pytest.param(
            PLAIN, SessionSetup(spec={}, seed=3, episode="e"), {"seed": 3, "episode_id": "e"}, id="seed and episode"
        ),
        pytest.param(
            looking_at("level"),
            SessionSetup(spec={}, seed=3, episode="e"),
            {},
            id="an image that reads neither gets neither",
        ),
        pytest.param(
            PLACED,
            SessionSetup(spec={"id": "x", "target": 4}, split="test", index=2),
            {"split": "test", "index": 2},
            id="the image's own task needs only split and index",
        ),
        pytest.param(
            PLACED,
            SessionSetup(spec={"seed": 7}, split="train", index=7, seed=99),
            {"split": "train", "index": 7, "seed": 99},
            id="with its place, the trainer's seed is used",
        ),
        pytest.param(
            PLAIN,
            SessionSetup(spec={"seed": 7}, split="train", index=7, seed=99),
            {"seed": 7},
            id="a task that consists of a seed",
        ),
        pytest.param(
            PLAIN,
            SessionSetup(spec={"seed": 7}, seed=99),
            {"seed": 99},
            id="the trainer's seed without a place",
        ),
        pytest.param(
            GAME,
            SessionSetup(spec={"dataset_name": "sum", "size": 4}),
            {"dataset_name": "sum", "size": 4},
            id="key by key",
        ),
        pytest.param(
            GAME,
            SessionSetup(spec={"env_type": "maze", "environment_config": {"page": "p1", "size": 2}, "tags": ["a"]}),
            {"task_name": "p1", "size": 2},
            id="a generic task's configuration",
        ),
        pytest.param(
            GAME,
            SessionSetup(spec={"config": {"size": 2}, "name": "n"}),
            {"size": 2},
            id="the configuration of a task in a file",
        ),
        pytest.param(
            looking_at(goal="instruction", fen="environment_config.board.fen"),
            SessionSetup(spec={"instruction": "win", "environment_config": {"board": {"fen": "8/8"}}}),
            {"goal": "win", "fen": "8/8"},
            id="nested paths in the task",
        ),
        pytest.param(
            looking_at(task="environment_config"),
            SessionSetup(spec={"environment_config": {"a": 1, "b": 2}}),
            {"task": {"a": 1, "b": 2}},
            id="the configuration as a whole",
        ),
        pytest.param(
            GAME,
            SessionSetup(spec={"size": 4}, config={"size": 9, "anything": [1]}),
            {"size": 9, "anything": [1]},
            id="the trainer's own keys are passed unchanged",
        ),
        pytest.param(
            PLAIN,
            SessionSetup(spec={"id": "t", "instruction": "", "evaluation": {}}),
            {},
            id="empty values may be dropped",
        ),
        pytest.param(PLAIN, SessionSetup(spec={}, secrets={"api_key": "k"}), {}, id="a platform's key is left out"),
    ],
)
def test_a_reset_contains_the_keys_that_the_image_reads(
    environment: Environment, setup: SessionSetup, data: Mapping[str, Any]
) -> None:
    assert reset_data(environment, setup) == data


@pytest.mark.parametrize(
    ("environment", "spec", "named"),
    [
        pytest.param(PLAIN, {"instruction": "Win."}, "instruction", id="an instruction"),
        pytest.param(PLAIN, {"evaluation": {"reward_function": "f"}}, "evaluation", id="a judge"),
        pytest.param(PLAIN, {"level": 3}, "level", id="an unknown key"),
        pytest.param(GAME, {"environment_config": {"size": 1, "hue": 2}}, "environment_config.hue", id="configuration"),
        pytest.param(PLAIN, {"config": {"name": "x"}}, "config.name", id="a name inside the configuration"),
        pytest.param(PLAIN, {"config": "x"}, "config", id="configuration that is not an object"),
    ],
)
def test_a_task_with_content_that_would_be_dropped_is_refused_with_a_hint_for_resets(
    environment: Environment, spec: Mapping[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        reset_data(environment, SessionSetup(spec=spec))

    assert f"the task says {named}, which 'maze' would drop" in refused.value.detail
    assert "[resets]" in refused.value.detail
    assert named in refused.value.detail.partition("[resets]")[2]


def test_a_place_that_the_image_does_not_read_does_not_excuse_dropped_content() -> None:
    with pytest.raises(InvalidRequest, match="target"):
        reset_data(PLAIN, SessionSetup(spec={"id": "x", "target": 4}, split="test", index=2))


def test_a_task_in_a_file_is_checked_although_it_has_a_place() -> None:
    in_files = replace(PLACED, tasks=Path("/tasks"))

    with pytest.raises(InvalidRequest, match="target"):
        reset_data(in_files, SessionSetup(spec={"id": "x", "target": 4}, split="test", index=2))


def test_secrets_are_refused_by_name_and_never_shown() -> None:
    with pytest.raises(InvalidRequest) as refused:
        reset_data(PLAIN, SessionSetup(spec={}, secrets={"api_key": "k", "TOKEN": "hush"}))

    assert "TOKEN" in refused.value.detail
    assert "hush" not in refused.value.detail

"""What a task becomes in the reset of an OpenEnv server, and what is refused rather than dropped."""

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
        pytest.param(PLAIN, SessionSetup(spec={}), {}, id="nothing asked for, nothing said"),
        pytest.param(
            PLAIN, SessionSetup(spec={}, seed=3, episode="e"), {"seed": 3, "episode_id": "e"}, id="seed and episode"
        ),
        pytest.param(
            looking_at("level"),
            SessionSetup(spec={}, seed=3, episode="e"),
            {},
            id="an image that looks at neither gets none",
        ),
        pytest.param(
            PLACED,
            SessionSetup(spec={"id": "x", "target": 4}, split="test", index=2),
            {"split": "test", "index": 2},
            id="a task of the image's own needs its place only",
        ),
        pytest.param(
            PLACED,
            SessionSetup(spec={"seed": 7}, split="train", index=7, seed=99),
            {"split": "train", "index": 7, "seed": 99},
            id="its seed is the trainer's",
        ),
        pytest.param(
            PLAIN,
            SessionSetup(spec={"seed": 7}, split="train", index=7, seed=99),
            {"seed": 7},
            id="a task that is a seed",
        ),
        pytest.param(
            PLAIN,
            SessionSetup(spec={"seed": 7}, seed=99),
            {"seed": 99},
            id="a trainer's seed, where no place was asked for",
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
            GAME, SessionSetup(spec={"config": {"size": 2}, "name": "n"}), {"size": 2}, id="and that of one in a file"
        ),
        pytest.param(
            looking_at(goal="instruction", fen="environment_config.board.fen"),
            SessionSetup(spec={"instruction": "win", "environment_config": {"board": {"fen": "8/8"}}}),
            {"goal": "win", "fen": "8/8"},
            id="places in it, as deep as they are",
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
            id="the trainer's own keys are passed as they are",
        ),
        pytest.param(
            PLAIN,
            SessionSetup(spec={"id": "t", "instruction": "", "evaluation": {}}),
            {},
            id="what is empty is not lost",
        ),
        pytest.param(PLAIN, SessionSetup(spec={}, secrets={"api_key": "k"}), {}, id="a platform's key is left out"),
    ],
)
def test_a_reset_says_what_the_image_looks_at(
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
        pytest.param(PLAIN, {"config": {"name": "x"}}, "config.name", id="a name that is no name for people"),
        pytest.param(PLAIN, {"config": "x"}, "config", id="configuration that is no object"),
    ],
)
def test_a_task_that_would_be_dropped_is_refused_with_what_to_write(
    environment: Environment, spec: Mapping[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        reset_data(environment, SessionSetup(spec=spec))

    assert f"the task says {named}, which 'maze' would drop" in refused.value.detail
    assert "[resets]" in refused.value.detail
    assert named in refused.value.detail.partition("[resets]")[2]


def test_a_place_that_the_image_does_not_look_at_does_not_make_a_task_whole() -> None:
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

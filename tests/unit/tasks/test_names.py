"""The name of a task, and the seed of an episode whose trainer gives none."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.environment import Environment, ResetMapping, SeedRule, Server, ServerProtocol
from gateway.core.session import Group, GroupMembership
from gateway.core.task_name import TaskName
from gateway.tasks.resolver import session_setup
from gateway.tasks.task_ref import TaskRef, name_of, seed_of
from tests.service.stack import environment

TASK: dict[str, Any] = {
    "id": "a", "instruction": "1+1", "config": {"level": 2}, "evaluation": {"answer": "2", "reward_function": "equals"}
}  # fmt: skip
DIGESTS = st.text("0123456789abcdef", min_size=32, max_size=32)


def image(protocol: ServerProtocol, **more: Any) -> Environment:
    return replace(environment(), protocol=protocol, tasks=None, server=Server(port=8000), **more)


@given(st.text(), DIGESTS | st.just(""))
def test_a_name_is_read_from_its_key_and_from_its_label(id: str, digest: str) -> None:
    name = TaskName(id, digest)

    if digest:
        assert TaskName.of(name.key) == name
        assert TaskName.of_label(name.label, digest) == name
    assert bool(name.key) == bool(id or digest)


@pytest.mark.parametrize(
    "same",
    [
        pytest.param({**TASK, "tags": ["x"], "difficulty": 3}, id="tags and difficulty"),
        pytest.param({**TASK, "aliases": ["b"], "rate_limit": {"starts": 1, "per_s": 1}}, id="a name and a limit"),
        pytest.param({**TASK, "reference": "2", "reward_full": 1, "reward_floor": 0}, id="what proves it"),
        pytest.param({**TASK, "env_type": "math", "split": "train"}, id="where it belongs"),
        pytest.param({**TASK, "name": None, "config": {"level": 2, "more": {}}}, id="nulls of a data set"),
        pytest.param(dict(reversed(TASK.items())), id="another order"),
    ],
)
def test_what_neither_agent_nor_judge_sees_makes_no_other_task(same: dict[str, Any]) -> None:
    assert name_of(same) == name_of(TASK)


@pytest.mark.parametrize(
    "other",
    [
        {**TASK, "instruction": "1+2"},
        {**TASK, "config": {"level": 3}},
        {**TASK, "evaluation": {**TASK["evaluation"], "answer": "3"}},
        {**TASK, "hint": "two"},
    ],
)
def test_a_changed_task_is_another_task(other: dict[str, Any]) -> None:
    assert name_of(other).id == "a"
    assert name_of(other).digest != name_of(TASK).digest


def test_the_short_and_the_long_form_of_a_task_have_one_name() -> None:
    short = {"id": "a", "goal": "go", "reward_fn": "done()", "pages": {"/": "x"}}
    long = {
        "id": "a", "instruction": "go", "config": {"pages": {"/": "x"}}, "evaluation": {"reward_function": "done()"}
    }  # fmt: skip

    assert name_of(short) == name_of(long)


def test_a_place_is_the_name_of_an_images_own_task_only() -> None:
    ours = TaskRef(spec={"instruction": "x"}, split="train", index=3)
    images = TaskRef(spec={"id": "x", "n": 1}, split="train", index=3, is_images=True)

    assert ours.name == name_of({"instruction": "x"})
    assert (ours.name.id, ours.name.label[:7], ours.name.digest != "") == ("", "sha256:", True)
    assert images.name == TaskRef(spec={}, split="train", index=3).name == TaskName("train/3")
    assert TaskRef(spec={"id": "known"}).name == TaskName("known"), "only the worker knows it"
    assert TaskRef(spec={}).name.key == ""


# -- seeds ------------------------------------------------------------------------------------------------------------


def test_the_seed_is_the_first_31_bits_of_the_ids_hash() -> None:
    assert seed_of("a") == int(hashlib.sha256(b"a").hexdigest()[:8], 16) >> 1


@pytest.mark.parametrize("group", [None, Group("g", 4)])
def test_a_listed_task_has_its_own_seed_alone_and_in_groups(group: Group | None) -> None:
    listed = TaskRef(spec=TASK, split="train", index=7)
    drawn = replace(listed, ticket=GroupMembership("mine", 0, "m", number=3))

    assert session_setup(environment(), listed, group=group).seed == seed_of("a")
    assert session_setup(environment(), drawn).seed == seed_of("a")
    assert session_setup(environment(), TaskRef(spec={"id": "a"})).seed == seed_of("a")
    assert session_setup(environment(), listed, seed=5, group=group).seed == 5
    nameless = TaskRef(spec={"instruction": "x"}, split="train", index=7)
    assert session_setup(environment(), nameless).seed == seed_of(nameless.name.digest)


def test_a_task_that_is_sent_whole_has_the_seed_of_its_group_or_a_random_one() -> None:
    sent = TaskRef(spec=TASK)

    assert session_setup(environment(), sent, group=Group("g", 2)).seed == seed_of("g")
    alone = {session_setup(environment(), sent).seed for _ in range(20)}
    assert len(alone) > 1
    assert all(seed is not None and 0 <= seed < 2**31 for seed in alone)


def test_an_environment_may_draw_the_seeds_of_its_listed_tasks() -> None:
    drawing, listed = replace(environment(), seed_rule=SeedRule.DRAWN), TaskRef(spec=TASK, split="train", index=7)

    assert session_setup(drawing, listed, group=Group("g", 2)).seed == seed_of("g")
    assert len({session_setup(drawing, listed).seed for _ in range(20)}) > 1


@pytest.mark.parametrize(
    ("kind", "spec", "config", "seed"),
    [
        pytest.param(image(ServerProtocol.AREAL), {}, None, seed_of("train/3"), id="AReaL"),
        pytest.param(image(ServerProtocol.AREAL), {"config": {"seed": 4}}, None, 4, id="a seed in the task"),
        pytest.param(image(ServerProtocol.AREAL), {"seed": 4}, {"seed": 6}, 6, id="a seed in the configuration"),
        pytest.param(image(ServerProtocol.AREAL), {"seed": "x"}, None, None, id="a seed that is no number"),
        pytest.param(
            image(ServerProtocol.OPENENV, resets=ResetMapping(keys=())),
            {},
            None,
            None,
            id="an OpenEnv reset that reads no seed",
        ),
        pytest.param(
            image(ServerProtocol.OPENENV, resets=ResetMapping(keys=("seed",))),
            {},
            None,
            seed_of("train/3"),
            id="OpenEnv",
        ),
        pytest.param(
            image(ServerProtocol.OPENENV, resets=ResetMapping(keys=("seed",))),
            {"seed": 9},
            None,
            9,
            id="a task is a seed",
        ),
        pytest.param(image(ServerProtocol.ORS), {"seed": 9}, None, None, id="ORS"),
    ],
)
def test_a_third_party_server_gets_the_seed_that_it_plays(
    kind: Environment, spec: dict[str, Any], config: dict[str, Any] | None, seed: int | None
) -> None:
    task = TaskRef(spec=spec, split="train", index=3, is_images=True)

    assert session_setup(kind, task, config=config).seed == seed

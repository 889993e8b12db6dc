"""A curriculum of two environments: each has a split that draws from its own tasks, and a sample mixes both."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.wire.areal_client import ArealClient
from tests.wire.catalog import EMBEDDED, PROJECT, on_stack
from tests.wire.curricula_world import SPLIT, TASKS, Operator, asked, curricula_gateway
from tests.wire.gateways import Gateway
from tests.wire.sdks import SDKS, Sdk

pytestmark = pytest.mark.wire

MIXTURE = """
group_size = 2
seed = 5
sampler = {kind = "sequential"}

[[components]]
environment = "math"
weight = 3.0

[[components]]
environment = "game"
weight = 1.0
"""


def _games() -> list[dict[str, Any]]:
    lines = (PROJECT / "tasks" / "game" / "train.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines[:5]]


GAMES = _games()


@pytest.fixture(scope="module", params=[EMBEDDED, on_stack("math", "game")])
def gateway(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    environments = {"math": {"train": TASKS}, "game": {"train": GAMES}}
    with curricula_gateway(request.param, files={"mine": MIXTURE}, environments=environments) as gateway:
        yield gateway


@pytest.fixture
async def operator(gateway: Gateway) -> Operator:
    """The operators' client, with the curriculum reset for each test."""
    operator = Operator(gateway)
    await operator.reset("mine")
    return operator


@pytest.mark.parametrize("sdk", SDKS.values(), ids=SDKS)
async def test_the_split_of_an_environment_draws_from_its_own_tasks(
    sdk: Sdk, gateway: Gateway, operator: Operator
) -> None:
    async with sdk.connect(gateway.url, None) as client:
        counts: dict[str, int] = {}
        prompts: dict[str, list[str]] = {}
        for name in ("math", "game"):
            environment = client.environment(name)
            tasks = await environment.list_tasks(SPLIT)
            counts[name], prompts[name] = len(tasks), []
            for task in tasks[:4]:
                group = []
                for _ in range(2):
                    async with environment.session(task=task) as session:
                        group.append("".join(block.text for block in await session.get_prompt()))
                assert group[0] == group[1]
                prompts[name].append(group[0])

    assert counts == {"math": len(TASKS), "game": len(GAMES)}
    assert [asked(prompt) for prompt in prompts["math"]] == [0, 1, 2, 3]
    for prompt, task in zip(prompts["game"], GAMES, strict=False):
        assert task["instruction"] in prompt


async def test_a_sample_draws_from_both_environments_by_their_weights(operator: Operator) -> None:
    draws = await operator.sample("mine", count=40)
    state = await operator.state("mine")

    drawn = {name: [draw["index"] for draw in draws if draw["environment"] == name] for name in ("math", "game")}
    assert Counter(draw["environment"] for draw in draws) == {"math": 30, "game": 10}
    assert drawn["math"] == [n % len(TASKS) for n in range(30)]
    assert drawn["game"] == [n % len(GAMES) for n in range(10)]
    assert state["shares"] == {"math": 0.75, "game": 0.25}


async def test_a_sample_of_one_environment_continues_the_draws_of_its_split(
    gateway: Gateway, operator: Operator
) -> None:
    client = ArealClient(f"{gateway.url}/areal/game")
    for _ in range(2):
        started = await client.start(f"{SPLIT}/0")
        await client.cancel(started["episode_id"])
        assert started["info"]["task_description"] == GAMES[0]["instruction"]

    draws = await operator.sample("mine", count=3, environment="game")

    assert [(draw["environment"], draw["task"]) for draw in draws] == [("game", task["id"]) for task in GAMES[1:4]]
    assert [draw["number"] for draw in draws] == [1, 2, 3]


async def test_outcomes_of_an_environment_outside_the_curriculum_are_refused(operator: Operator) -> None:
    with pytest.raises(AssertionError, match="chess"):
        await operator.feedback("mine", [{"environment": "chess", "task": "e4", "reward": 1.0}])

    assert await operator.records("game") == {}

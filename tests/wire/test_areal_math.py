"""AReaL's client plays rollouts of the math environment over AReaL's API, on processes and on Docker."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.wire.areal_client import ArealClient
from tests.wire.catalog import EMBEDDED, PROJECT, on_stack, serving

pytestmark = pytest.mark.wire

TRAIN = [json.loads(line) for line in (PROJECT / "tasks" / "math" / "train.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", params=[EMBEDDED, on_stack("math")])
def client(request: pytest.FixtureRequest) -> Iterator[ArealClient]:
    with serving(request.param, "math") as gateway:
        yield ArealClient(gateway.url)


def answer_of(task: dict[str, Any]) -> str:
    return str(task["evaluation"]["entry"]["answer"])


async def test_right_answers_are_rewarded_by_index_and_by_task_id_and_wrong_answers_are_not(
    client: ArealClient,
) -> None:
    right = [
        await client.rollout(sample, lambda _: f"Let me think. <answer>{answer_of(TRAIN[0])}</answer>")
        for sample in ("0", TRAIN[0]["id"])
    ]
    wrong = await client.rollout("0", lambda _: "<answer>certainly not this</answer>")

    for trajectory in right:
        assert (trajectory.reward, trajectory.turns, trajectory.info["success"]) == (1.0, 1, True)
        assert (trajectory.info["status"], trajectory.info["answer"]) == ("completed", answer_of(TRAIN[0]))
        assert TRAIN[0]["instruction"] in trajectory.seen[0]
    assert (wrong.reward < 1.0, wrong.info["answer"]) == (True, "certainly not this")
    assert (wrong.info["success"], wrong.info["status"], wrong.info["num_turns"]) == (False, "completed", 1)


async def test_a_group_of_eight_gets_the_same_prompt_and_a_reward_each(client: ArealClient) -> None:
    answers = [answer_of(TRAIN[1]), "wrong"] * 4

    group = await asyncio.gather(*(client.rollout(1, lambda _, a=answer: a) for answer in answers))  # type: ignore[misc]  # mypy has no type for this default

    assert len({trajectory.seen[0] for trajectory in group}) == 1
    assert [trajectory.info["success"] for trajectory in group] == [True, False] * 4
    assert (await client.ask("GET", "/health"))["active_episodes"] == 0


async def test_the_task_served_is_the_catalogs_task(client: ArealClient) -> None:
    info = await client.info()
    started = await client.start(TRAIN[2]["id"])
    await client.cancel(started["episode_id"])

    assert (info["name"], info["num_samples"]) == ("math", len(TRAIN))
    assert started["info"]["task_description"] == TRAIN[2]["instruction"]

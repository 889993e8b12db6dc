"""Tasks of the os environment through the whole gateway: only a correct solution is rewarded.

This file plays one task of each topic. test_areal_os.py plays one of each template, and tests/envs/test_os_tasks.py
plays all.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.envs.complaints import complaints
from tests.wire.areal_client import ArealClient
from tests.wire.catalog import STACK, serving
from tests.wire.os_episodes import playing, tasks_of

pytestmark = [pytest.mark.wire, pytest.mark.docker, pytest.mark.redis, pytest.mark.needs("image:os")]

AT_ONCE = 16
"""The number of concurrent rollouts in AReaL's example, which is also a worker's number of slots."""
TRAIN, TEST = tasks_of("train"), tasks_of("test")
SAMPLE = {task["tags"][1]: task for task in reversed((*TEST, *TRAIN))}
"""The first task of each topic, from the test split if that split has the topic."""


@dataclass(frozen=True)
class Attempt:
    """One way to play one task."""

    task: Mapping[str, Any]
    sample: str
    solution: Mapping[str, Any]
    reward: float


def attempts(task: dict[str, Any]) -> dict[str, Attempt]:
    """Return the ways to play *task*: the reference solution, a wrong solution, an empty answer, and no action at all.

    Integers mean the train split. Tasks of train are therefore played by index and by id, and tasks of test only by id.
    """
    name, reference = task["id"], task["reference"]
    by_index = str(TRAIN.index(task)) if task in TRAIN else name
    return {
        f"{name} reference": Attempt(task, by_index, reference, 1.0),
        f"{name} wrong": Attempt(task, name, reference["wrong"], 0.0),
        f"{name} empty": Attempt(task, name, {"commands": [], "answer": ""}, 0.0),
        f"{name} nothing": Attempt(task, name, {"commands": [], "answer": None}, 0.0),
    }


@pytest.fixture(scope="module")
def client() -> Iterator[ArealClient]:
    with serving(STACK, "os") as gateway:
        yield ArealClient(gateway.url)


async def test_a_reference_of_each_topic_is_rewarded_and_wrong_and_empty_solutions_are_not(client: ArealClient) -> None:
    async def played(attempt: Attempt) -> None:
        async with playing(client, attempt.sample) as play:
            assert attempt.task["instruction"] in play.prompt
            printed = ""
            for command in attempt.solution["commands"]:
                printed = await play.run(command)
            answer = attempt.solution["answer"]
            if attempt.reward and answer is not None:
                assert printed.strip() == answer
            verdict = await play.end(answer)
        assert (verdict.reward, verdict.status) == (attempt.reward, "completed"), verdict

    everything = {name: attempt for task in SAMPLE.values() for name, attempt in attempts(task).items()}

    assert len(SAMPLE) >= 14
    assert await complaints(played, everything, at_once=AT_ONCE) == {}


async def test_a_task_of_either_split_is_found_by_its_id_and_an_integer_means_the_train_split(
    client: ArealClient,
) -> None:
    described = []
    for sample in (0, "0", TRAIN[0]["id"], TEST[0]["id"], len(TRAIN) - 1):
        async with playing(client, sample) as play:
            described.append(play.problem)
    status, body = await client.request("POST", "/episode/start", json={"sample_id": len(TRAIN)})

    assert described == [task["instruction"] for task in (TRAIN[0], TRAIN[0], TRAIN[0], TEST[0], TRAIN[-1])]
    assert (status, body["error"]) == (404, "sample not found")
    assert (await client.info())["num_samples"] == len(TRAIN)

"""Every task of the os environment, played through the whole gateway: its solution is right, and nothing else is."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.wire.areal_client import ArealClient
from tests.wire.catalog import STACK, serving
from tests.wire.os_episodes import playing, tasks_of

pytestmark = [pytest.mark.wire, pytest.mark.docker, pytest.mark.redis, pytest.mark.slow, pytest.mark.parallel]

AT_ONCE = 16
"""As many rollouts as AReaL's example runs at once; one worker's slots."""


@dataclass(frozen=True)
class Attempt:
    """One way to play one task."""

    kind: str
    task: Mapping[str, Any]
    sample: str
    solution: Mapping[str, Any]
    reward: float


def attempts(split: str) -> list[Attempt]:
    """Each task as its reference solves it, as it must not be solved, and as one plays who does nothing.

    Integers mean the train split, so that its tasks are played by index and by id, and those of test by id alone.
    """
    made = []
    for index, task in enumerate(tasks_of(split)):
        name = task["id"]
        by_index = str(index) if split == "train" else name
        reference = task["reference"]
        made += [
            Attempt("reference", task, by_index, reference, 1.0),
            Attempt("wrong", task, name, reference["wrong"], 0.0),
            Attempt("empty", task, name, {"commands": [], "answer": ""}, 0.0),
            Attempt("nothing", task, name, {"commands": [], "answer": None}, 0.0),
        ]
    return made


async def complaint(client: ArealClient, attempt: Attempt) -> str:
    """Play *attempt*; what is wrong with how it went, nothing if nothing is."""
    async with playing(client, attempt.sample) as play:
        if attempt.task["instruction"] not in play.prompt:
            return f"prompt: {play.prompt!r}"
        printed = ""
        for command in attempt.solution["commands"]:
            printed = await play.run(command)
        answer = attempt.solution["answer"]
        if attempt.kind == "reference" and answer is not None and printed.strip() != answer:
            return f"printed {printed!r}, where the answer is {answer!r}"
        verdict = await play.end(answer)
    if (verdict.reward, verdict.status) != (attempt.reward, "completed"):
        return f"reward {verdict.reward}, {dict(verdict.info)}"
    return ""


@pytest.fixture(scope="module")
def client() -> Iterator[ArealClient]:
    with serving(STACK, "os") as gateway:
        yield ArealClient(gateway.url)


@pytest.mark.parametrize("split", ["train", "test"])
async def test_every_reference_is_rewarded_and_every_wrong_or_empty_solution_is_not(
    client: ArealClient, split: str
) -> None:
    free = asyncio.Semaphore(AT_ONCE)
    complaints: dict[str, str] = {}

    async def played(attempt: Attempt) -> None:
        async with free:
            try:
                found = await complaint(client, attempt)
            except Exception as error:  # noqa: BLE001  # the others go on, and the test fails with this task's name
                found = repr(error)
        if found:
            complaints[f"{attempt.task['id']} {attempt.kind}"] = found

    await asyncio.gather(*(played(attempt) for attempt in attempts(split)))

    assert complaints == {}


async def test_a_task_of_either_split_is_known_by_its_id_and_integers_mean_train(client: ArealClient) -> None:
    train, test = tasks_of("train"), tasks_of("test")

    described = []
    for sample in (0, "0", train[0]["id"], test[0]["id"], len(train) - 1):
        async with playing(client, sample) as play:
            described.append(play.problem)
    status, body = await client.request("POST", "/episode/start", json={"sample_id": len(train)})

    assert described == [task["instruction"] for task in (train[0], train[0], train[0], test[0], train[-1])]
    assert (status, body["error"]) == (404, "sample not found")
    assert (await client.info())["num_samples"] == len(train)

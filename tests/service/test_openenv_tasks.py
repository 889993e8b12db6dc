"""The task of a reset: an id, an inline task, an index or a seed. A wrong task leaves the client's episode open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.core.ports.tasks import StoredTask
from gateway.stores.memory.tasks import MemoryTaskStore
from gateway.tasks.task_ref import name_of
from tests.service.openenv_world import Json, code, message, world
from tests.service.stack import environment, tasks

TASKS = tasks(
    train=[{"question": "1+1"}, {"id": "custom/login", "question": "log in"}, {"id": "easy", "question": "2+2"}],
    test=[{"id": "easy", "question": "3+3"}, {"id": "hard", "question": "4+4"}],
)
NAMELESS = name_of({"question": "1+1"}).label


def played(observed: Json) -> tuple[Any, ...]:
    metadata = observed["metadata"]
    return observed["observation"]["text"], metadata.get("task_id"), metadata.get("split"), metadata.get("index")


@pytest.mark.parametrize(
    ("wish", "task"),
    [
        ({"task": "custom/login"}, ("log in", "custom/login", "train", 1)),
        ({"task": "math/custom/login"}, ("log in", "custom/login", "train", 1)),
        ({"task": "calculus/hard"}, ("4+4", "hard", "test", 1)),
        ({"task": "easy"}, ("2+2", "easy", "train", 2)),
        ({"task": "easy", "split": "test"}, ("3+3", "easy", "test", 0)),
        ({"task": {"id": "hard"}}, ("4+4", "hard", "test", 1)),
        ({"task": None, "seed": 4}, ("log in", "custom/login", "train", 1)),
        ({"seed": 5}, ("2+2", "easy", "train", 2)),
        ({"seed": -1}, ("2+2", "easy", "train", 2)),
        ({"split": "test", "index": 1}, ("4+4", "hard", "test", 1)),
        ({"index": 0}, ("1+1", NAMELESS, "train", 0)),
        ({"split": "test", "seed": 7}, ("4+4", "hard", "test", 1)),
    ],
)
async def test_a_reset_plays_the_task_that_it_names(wish: Json, task: tuple[Any, ...]) -> None:
    known = replace(environment(), env_types=("calculus",))
    async with world(known, tasks=TASKS) as gw, gw.client() as client:
        observed = await client.reset(**wish)

        assert played(observed) == task
        assert observed["observation"]["metadata"] == observed["metadata"]


async def test_a_reset_without_a_task_plays_any_task_of_the_split_and_a_seed_always_the_same_task() -> None:
    async with world(tasks=TASKS) as gw, gw.client() as client:
        some = {played(await client.reset())[1] for _ in range(60)}

        assert some == {NAMELESS, "custom/login", "easy"}
        for seed in range(6):
            assert played(await client.reset(seed=seed)) == played(await client.reset(seed=seed + 3))


async def test_an_inline_task_goes_to_the_worker_unchanged() -> None:
    task = {
        "id": "inline",
        "env_type": "math",
        "instruction": "Add.",
        "question": "5+5",
        "config": {"level": 2},
        "evaluation": {"reward_function": "exact_match('10')"},
    }
    async with world(tasks=TASKS) as gw, gw.client() as client:
        observed = await client.reset(task=task, seed=3, colour="red")

        assert played(observed) == ("5+5", "inline", None, None)
        [session] = gw.stack.backend.only.sessions.values()
        assert session.task == task
        created = next(one for one in gw.stack.backend.only.requests if one.target == "/create")
        assert b'"seed":3,"config":{"colour":"red"}' in created.body


async def test_an_environment_without_tasks_starts_an_episode_with_an_empty_task() -> None:
    async with world(tasks={}) as gw, gw.client() as client:
        observed = await client.reset(seed=3)

        assert observed["observation"]["metadata"] == {}
        [session] = gw.stack.backend.only.sessions.values()
        assert session.task == {}


WRONG = "VALIDATION_ERROR"
UNKNOWN = "EXECUTION_ERROR"


@pytest.mark.parametrize(
    ("wish", "told", "words"),
    [
        ({"task": 4}, WRONG, "data.task: Input should be a task's id"),
        ({"task": ["easy"]}, WRONG, "data.task"),
        ({"seed": "4"}, WRONG, "data.seed: Input should be a valid integer"),
        ({"seed": True}, WRONG, "data.seed"),
        ({"index": 1.5}, WRONG, "data.index"),
        ({"split": 1}, WRONG, "data.split"),
        ({"episode_id": 1}, WRONG, "data.episode_id"),
        ({"episode_id": "e" * 256}, WRONG, "data.episode_id"),
        ({"task": "easy", "index": 1}, WRONG, "data.index: Only one of task and index may be given"),
        ({"task": "nope"}, UNKNOWN, "Unknown task: nope"),
        ({"task": ""}, UNKNOWN, "Unknown task: "),
        ({"task": {"id": "nope"}}, UNKNOWN, "Unknown task: nope"),
        ({"split": "nope"}, UNKNOWN, "Invalid split: there is no 'nope'; there are train, test"),
        ({"index": 3}, UNKNOWN, "Invalid index: 3; split 'train' has 3 tasks"),
        ({"index": -1}, WRONG, "data.index: Input should be greater than or equal to 0"),
        ({"task": {"env_type": "browser", "instruction": "x"}}, UNKNOWN, "'browser', not to 'math'"),
        ({"task": "chess/opening"}, UNKNOWN, "'chess', not to 'math'"),
        ({"task": {"instruction": 4}}, WRONG, "instruction"),
        ({"task": {"instruction": "x", "config": []}}, WRONG, "config"),
        ({"task": {"instruction": "x", "module": "os"}}, WRONG, "module: code is not taken from outside"),
        ({"task": {"evaluation": {"script": "true"}}}, WRONG, "evaluation.script"),
        ({"task": {"evaluation": {"reward_function": "contains(open('key'))"}}}, WRONG, "evaluation.reward_function"),
    ],
)
async def test_an_invalid_task_is_refused_and_the_episode_goes_on(wish: Json, told: str, words: str) -> None:
    async with world(environment(), environment("chess"), tasks=TASKS) as gw, gw.client() as client:
        await client.reset(index=0)
        await client.step()

        reply = await client.ask("reset", wish)

        assert (code(reply), words in message(reply)) == (told, True), reply
        if told == WRONG:
            assert all(entry["loc"][0] == "data" for entry in reply["data"]["errors"])
        assert (await client.ask("state"))["data"]["step_count"] == 1
        assert gw.stack.backend.only.created == 1 or told == UNKNOWN


async def test_a_task_beyond_its_rate_limit_is_refused_with_a_retry_time_and_the_episode_goes_on() -> None:
    rare = tasks(train=[{"id": "easy", "rate_limit": {"starts": 1, "per_s": 60}}])
    async with world(tasks=rare) as gw, gw.client() as client:
        await client.reset(task="easy")

        reply = await client.ask("reset", {"task": "easy"})

        again_s = reply["data"]["retry_after_s"]
        assert code(reply) == "EXECUTION_ERROR"
        assert message(reply).startswith("the task 'easy' may begin 1 times in 60 s")
        assert again_s <= 62
        assert (await client.step())["type"] == "observation"


async def test_a_task_added_at_another_replica_is_fetched_before_it_counts_as_unknown() -> None:
    shared = MemoryTaskStore()
    async with world(tasks=TASKS, task_store=shared) as gw, gw.client() as client:
        later = StoredTask(environment=environment().name, id="later", split="custom", body=b'{"id":"later"}')
        await shared.put([later], replace=False)

        assert (await client.ask("reset", {"task": "later"}))["type"] == "observation"
        assert code(await client.ask("reset", {"task": "nope"})) == UNKNOWN
        assert code(await client.ask("reset", {"split": "nope"})) == UNKNOWN

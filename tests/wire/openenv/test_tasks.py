"""Stock clients call ``reset(task=…)`` with an id, an object or no task. A refused reset keeps the episode."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.wire.openenv.clients import FIRST_ASYNC, NEWEST, OLDEST, ClientError, Driver, DriverOf, OpenEnv, connected
from tests.wire.openenv.frames import said, socket
from tests.wire.openenv.servers import EMBEDDED, Place, on

pytestmark = [pytest.mark.wire]

INLINE: dict[str, Any] = {
    "id": "custom/nine",
    "env_type": "counting",
    "instruction": "Count to 9.",
    "config": {"target": 9},
    "evaluation": {"reward_function": "counting"},
}


@pytest.fixture
async def client(place: Place, newest: Driver) -> AsyncIterator[OpenEnv]:
    async with connected(newest, place.url()) as client:
        yield client


def target(result: dict[str, Any]) -> int:
    found: int = result["observation"]["target"]
    return found


@on(EMBEDDED)
@pytest.mark.parametrize(
    ("version", "kind", "mode"),
    [
        (NEWEST, "generic", "async"),
        (NEWEST, "generic", "sync"),
        (FIRST_ASYNC, "generic", "async"),
        (OLDEST, "typed", "direct"),
    ],
)
async def test_a_reset_takes_a_tasks_id_or_a_task_object_or_no_task(
    place: Place, driver_of: DriverOf, version: str, kind: str, mode: str
) -> None:
    async with connected(driver_of(version), place.url(), kind=kind, mode=mode) as client:
        targets = [
            target(await client.reset(**wish))
            for wish in (
                {"task": "test-1"},
                {"task": "counting/test-1"},
                {"task": INLINE},
                {"task": {"config": {"target": 8}}},
                {"task": None, "seed": 2},
                {"seed": 2},
                {"split": "test", "index": 2},
                {"split": "test", "seed": 7},
            )
        ]
        drawn = [target(await client.reset(**wish)) for wish in ({}, {"task": None}, {"split": "test"})]

    assert targets == [3, 3, 9, 8, 5, 5, 4, 4]
    assert drawn[0] in range(3, 8)
    assert drawn[1] in range(3, 8)
    assert drawn[2] in range(2, 5)


@on(EMBEDDED)
async def test_the_result_of_a_reset_holds_the_id_of_its_task(client: OpenEnv) -> None:
    named = await client.reset(task="test-1")
    given = await client.reset(task=INLINE)

    assert named["metadata"].items() >= {"task_id": "test-1", "split": "test", "index": 1}.items()
    assert given["metadata"]["task_id"] == "custom/nine"


@on(EMBEDDED)
async def test_seed_and_episode_id_survive_a_switch_of_tasks_and_no_key_of_the_reset_leaks_into_the_task(
    client: OpenEnv,
) -> None:
    await client.reset(task="test-0", seed=5, episode_id="one")
    await client.act("inc")
    await client.reset(task=INLINE, seed=6, episode_id="two", level={"deep": [1]})
    given = await client.step({"type": "call_tool", "tool_name": "given", "arguments": {}})
    state = await client.state()

    assert state["episode_id"] == "two"
    seen = given["observation"]["result"]["structured_content"]
    assert seen["seed"] == 6
    assert seen["config"] == {"level": {"deep": [1]}}
    assert seen["task"] == INLINE


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a number": ({"task": 7}, "VALIDATION_ERROR", "task"),
    "a list": ({"task": ["test-0"]}, "VALIDATION_ERROR", "task"),
    "a key that nobody looks at": ({"index": 0, "hue": 3}, "VALIDATION_ERROR", "hue"),
    "a value that no task has": ({"target": 4711}, "EXECUTION_ERROR", "no task of 'counting' has target '4711'"),
    "a task that is named twice": ({"target": 3, "index": 0}, "VALIDATION_ERROR", "only one of index and target"),
    "an unknown id": ({"task": "nosuch"}, "EXECUTION_ERROR", "Unknown task: nosuch"),
    "an unknown id with a slash": ({"task": "custom/nosuch"}, "EXECUTION_ERROR", "Unknown task: custom/nosuch"),
    "a task of another environment": ({"task": INLINE | {"env_type": "browser"}}, "EXECUTION_ERROR", "browser"),
    "an id of another environment": ({"task": "lonely/test-0"}, "EXECUTION_ERROR", "lonely"),
    "code in the place of a function": (
        {"task": INLINE | {"evaluation": {"reward_function": "__import__('os').getcwd()"}}},
        "VALIDATION_ERROR",
        "reward_function",
    ),
    "a module": ({"task": INLINE | {"evaluation": {"module": "os"}}}, "VALIDATION_ERROR", "module"),
    "a script where no code is run": (
        {"task": INLINE | {"evaluation": {"script": "exit 0"}}},
        "VALIDATION_ERROR",
        "script",
    ),
    "a config that is not an object": ({"task": INLINE | {"config": "target=3"}}, "VALIDATION_ERROR", "config"),
    "an unknown split": ({"split": "nosuch"}, "EXECUTION_ERROR", "split"),
    "a place beyond the last": ({"split": "test", "index": 5}, "EXECUTION_ERROR", "index"),
    "a place that is a text": ({"index": "first"}, "VALIDATION_ERROR", "index"),
    "a split that is a number": ({"split": 7}, "VALIDATION_ERROR", "split"),
}


@on(EMBEDDED)
@pytest.mark.parametrize(("data", "code", "word"), REFUSED.values(), ids=REFUSED.keys())
async def test_a_reset_with_an_invalid_task_is_refused_and_the_episode_goes_on(
    place: Place, data: dict[str, Any], code: str, word: str
) -> None:
    async with socket(place.url()) as ws:
        await ws.reset(task="test-2", episode_id="e")
        await ws.step(op="inc")
        refused = await ws.reset(**data)
        state = await ws.state()
        last = await ws.step(op="inc", by=3)

    assert said(refused)[0] == code
    assert word in str(refused["data"])
    assert state["data"].items() >= {"episode_id": "e", "step_count": 1}.items()
    assert (last["data"]["reward"], last["data"]["done"]) == (1.0, True)


@on(EMBEDDED)
async def test_a_task_that_its_environment_refuses_is_an_error_and_the_next_reset_works(client: OpenEnv) -> None:
    with pytest.raises(ClientError) as refused:
        await client.reset(task=INLINE | {"config": {"refuse": "there is no such puzzle"}})
    after = await client.reset(task=INLINE)

    assert "there is no such puzzle (code: EXECUTION_ERROR)" in refused.value.message
    assert target(after) == 9

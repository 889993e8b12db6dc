"""The environment of a request: from its name, its path, its deployment, or the session's first path later on."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from tests.service.stack import environment, running, tasks
from tests.service.wire import call, create, delete, detail

BY_INDEX = {"split": "train", "index": 0}
TASKS: dict[str, Any] = {
    "tasks_math": tasks(train=[{"question": "a sum"}, {"question": "another"}]),
    "tasks_coding": tasks(train=[{"question": "a program"}], hard=[{"question": "a long one"}]),
}


async def _question(client: httpx.AsyncClient, path: str) -> Any:
    answer = await client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()[0]["text"]


async def test_a_create_by_index_without_a_name_is_bound_by_its_first_path() -> None:
    async with running(environment(), environment("coding"), **TASKS) as (_, gateway, client):
        created = await client.post("/create", json=BY_INDEX)
        held_before = await gateway.used("coding") + await gateway.used("math")

        question = await _question(client, "/coding/prompt")

        assert (created.status_code, created.json()) == (200, {"sid": "one"})
        assert held_before == 0
        assert question == "a program"
        assert (await gateway.used("coding"), await gateway.used("math")) == (1, 0)


async def test_a_path_without_an_environment_binds_a_create_to_the_default_environment() -> None:
    async with running(environment(), environment("coding"), **TASKS) as (_, _gateway, client):
        await client.post("/create", json=BY_INDEX)

        assert await _question(client, "/prompt") == "a sum"


async def test_many_concurrent_first_requests_open_one_session() -> None:
    async with running(environment(), environment("coding"), **TASKS) as (stack, gateway, client):
        await client.post("/create", json=BY_INDEX)

        answers = await asyncio.gather(*(client.get("/coding/prompt") for _ in range(10)))

        assert {answer.status_code for answer in answers} == {200}
        assert stack.backend.only.created == 1
        assert await gateway.used("coding") == 1


async def test_a_create_that_waits_for_its_name_answers_pings_retries_and_deletes() -> None:
    async with running(environment(), environment("coding"), **TASKS) as (_, _gateway, client):
        await client.post("/create", json=BY_INDEX)

        ping = await client.post("/ping")
        same = await client.post("/create", json=BY_INDEX)
        other = await client.post("/create", json={"split": "train", "index": 1})
        deleted = await delete(client)
        after = await client.get("/coding/prompt")

        assert [one.status_code for one in (ping, same, other, deleted, after)] == [200, 200, 400, 200, 404]
        assert detail(other) == "Session already exists"


async def test_an_inline_create_on_an_id_that_waits_for_its_name_is_refused() -> None:
    async with running(environment(), environment("coding"), **TASKS) as (_, gateway, client):
        await client.post("/create", json=BY_INDEX)

        other = await create(client)

        assert (other.status_code, detail(other)) == (400, "Session already exists")
        assert await gateway.used() == 0


async def test_an_invalid_index_is_refused_once_the_environment_is_known() -> None:
    async with running(environment(), environment("coding"), **TASKS) as (_, _gateway, client):
        created = await client.post("/create", json={"split": "train", "index": 1})
        answer = await client.get("/coding/prompt")

        assert created.status_code == 200
        assert (answer.status_code, detail(answer)) == (400, "Invalid index: 1; split 'train' has 1 task")


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"split": "train", "index": 9}, "Invalid index: 9; split 'train' has "),
        ({"split": "nosuch", "index": 0}, "Invalid split: there is no 'nosuch'; there are "),
        ({"split": "hard", "index": 9}, "Invalid index: 9; split 'hard' has "),
    ],
)
async def test_an_index_that_no_environment_has_is_refused_immediately(wish: dict[str, Any], reason: str) -> None:
    async with running(environment(), environment("coding"), **TASKS) as (_, _gateway, client):
        answer = await client.post("/create", json=wish)

        assert answer.status_code == 400
        assert detail(answer).startswith(reason)


@pytest.mark.parametrize("deployment", ["coding", "owner/coding", "Owner/CODING", "https://host/owner/coding/"])
async def test_a_deployment_names_the_environment(deployment: str) -> None:
    async with running(environment(), environment("coding"), **TASKS) as (_, gateway, client):
        client.headers["X-Deployment"] = deployment
        await client.post("/create", json=BY_INDEX)

        assert await gateway.used("coding") == 1
        assert await _question(client, "/prompt") == "a program"
        tasks_there = await client.post("/num_tasks", json={"split": "hard"})
        assert tasks_there.json() == {"num_tasks": 1}


async def test_an_unknown_deployment_means_the_default_environment() -> None:
    async with running(environment(), environment("coding"), **TASKS) as (_, gateway, client):
        await client.post("/create", json=BY_INDEX, headers={"X-Deployment": "nosuch"})

        assert await gateway.used("math") == 1


async def test_without_lazy_binding_a_create_uses_the_default_environment_immediately() -> None:
    async with running(environment(), environment("coding"), lazy_binding=False, **TASKS) as (_, gateway, client):
        await client.post("/create", json=BY_INDEX)

        assert await gateway.used("math") == 1


async def test_a_path_of_another_environment_is_refused_and_runs_nothing() -> None:
    async with running(environment(), environment("coding"), **TASKS) as (stack, _, client):
        await create(client)

        prompt = await client.get("/coding/prompt")
        called = await call(client, env="coding")

        assert (prompt.status_code, called.status_code) == (409, 409)
        assert "'math'" in detail(prompt)
        assert stack.backend.only.ran == []


async def test_without_strict_paths_the_session_s_own_environment_answers() -> None:
    async with running(environment(), environment("coding"), strict_paths=False, **TASKS) as (_, _gateway, client):
        await create(client)

        assert (await call(client, env="coding")).status_code == 200


async def test_names_in_paths_and_bodies_are_matched_without_regard_to_case() -> None:
    async with running(environment(), environment("coding"), **TASKS) as (_, gateway, client):
        created = await create(client, env_name="CoDing")
        called = await call(client, env="CODING")
        tasks_there = await client.post("/Coding/tasks", json={"split": "train"})

        assert (created.status_code, called.status_code) == (200, 200)
        assert await gateway.used("coding") == 1
        assert tasks_there.json()["env_name"] == "Coding"


async def test_an_unknown_environment_is_named_as_it_was_sent() -> None:
    async with running(environment(), environment("coding"), **TASKS) as (_, _gateway, client):
        answers = [await create(client, env_name=name) for name in ("NoSuch", "")]

        assert [(one.status_code, detail(one)) for one in answers] == [
            (404, "unknown environment 'NoSuch'; there are math, coding"),
            (404, "unknown environment ''; there are math, coding"),
        ]


async def test_each_unknown_name_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with running(environment(), environment("coding"), **TASKS) as (_, _gateway, client):
        with caplog.at_level(logging.INFO, "gateway"):
            answers = [
                await create(client, env_name="nosuch"),
                await client.post("/create", json={"env_name": "math", "split": "nosplit", "index": 0}),
                await client.post("/create", json={"env_name": "math", "split": "train", "index": 77}),
                await client.post("/math/num_tasks", json={"split": "other"}),
                await client.get("/math/nothing"),
            ]

        lines = [line.getMessage() for line in caplog.records if line.getMessage().startswith("ors_not_found")]

    assert [400 <= answer.status_code < 500 for answer in answers] == [True] * 5
    assert len(lines) == 5, lines
    for line, name in zip(lines, ("nosuch", "nosplit", "77", "other", "Not Found"), strict=True):
        assert name in line


async def test_areal_and_openenv_log_each_unknown_name_once(caplog: pytest.LogCaptureFixture) -> None:
    async with running(environment(), environment("coding"), **TASKS) as (_, _gateway, client):
        with caplog.at_level(logging.INFO, "gateway"):
            for path, body in (
                ("/areal/maths/api/episode/start", {"sample_id": 0, "config": {}}),
                ("/areal/math/api/episode/start", {"sample_id": "nosample", "config": {}}),
                ("/openenv/maths/reset", {}),
                ("/openenv/math/reset", {"task": "notask"}),
                ("/openenv/math/math/num_tasks", {"split": "nosplit"}),
            ):
                answer = await client.post(path, json=body)
                assert 400 <= answer.status_code < 500, answer.text

        lines = [line.getMessage() for line in caplog.records if "_not_found " in line.getMessage()]

    for line, kind, name in zip(
        lines,
        ("areal", "areal", "openenv", "openenv", "openenv"),
        ("(did you mean 'math'?)", "nosample", "(did you mean 'math'?)", "notask", "nosplit"),
        strict=True,
    ):
        assert line.startswith(f"{kind}_not_found ")
        assert name in line

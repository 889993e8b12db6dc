"""One episode from create to delete, over real HTTP."""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from gateway.core.ids import Owner
from gateway.core.session import CloseReason
from gateway.sessions.cache import session_id
from tests.fakes.eventually import until
from tests.service.stack import OWNER, environment, running
from tests.service.test_step_log import listed, logging, shown
from tests.service.wire import call, create, delete, detail, events, result, under_way

ID = session_id(OWNER, "one")


async def test_an_episode_opens_acts_and_ends() -> None:
    async with running() as (stack, gateway, client):
        opened = await create(client, question="6*7")
        prompt = await client.get("/math/prompt")
        called = await call(client)
        worker = stack.backend.only
        ended = await delete(client)

        assert (opened.status_code, opened.json()) == (200, {"sid": "one"})
        assert prompt.json() == [{"text": "6*7", "detail": None, "type": "text"}]
        assert [name for name, _ in events(called.text)] == ["task_id", "end"]
        assert result(called)["output"]["blocks"][0]["text"] == '{"x": 1}'
        assert (ended.status_code, ended.json()) == (200, {"sid": "one"})
        assert worker.ran == ["echo"]
        assert worker.deleted == [ID]
        assert await gateway.used() == 0


async def test_a_call_s_stream_comes_as_it_is_written_and_not_when_it_is_complete() -> None:
    async with running() as (stack, _, client):
        await create(client)
        body = {"name": "gate", "input": {}}

        async with client.stream("POST", "/math/call", json=body) as answer:
            pieces = answer.aiter_text()
            first = await anext(pieces)
            stack.backend.only.gate.set()
            rest = "".join([piece async for piece in pieces])

        assert first.startswith("event: task_id")
        assert "event: end" in rest


@pytest.mark.parametrize("is_elsewhere", [False, True])
@pytest.mark.parametrize(
    ("tool", "accept", "status"),
    [("gate", "text/event-stream", 200), ("quiet", "text/event-stream", 410), ("quiet", "application/json", 410)],
)
async def test_an_operators_end_interrupts_a_running_call(
    tmp_path: Path, tool: str, accept: str, status: int, is_elsewhere: bool
) -> None:
    """The head of a stream is sent before the tool ends, or not yet."""
    async with logging(tmp_path) as (stack, gateway, client):
        ending = stack.another() if is_elsewhere else gateway
        await create(client)
        has_head = asyncio.Event()

        async def ask() -> httpx.Response:
            body = {"name": tool, "input": {}}
            async with client.stream("POST", "/math/call", json=body, headers={"Accept": accept}) as response:
                has_head.set()
                await response.aread()
                return response

        async with under_way(ask()) as (asked,):
            await until(lambda: stack.backend.only.waiting == 1)
            if status == 200:
                await has_head.wait()
            await ending.sessions.end(Owner("alice"), "one", CloseReason.OPERATOR, wait_s=5)
            answer = await asked
        stack.backend.only.gate.set()
        again = await call(client)
        await gateway.eventually_used(0)
        await ending.log.flush()
        (line,) = await listed(client)
        episode = await shown(client, "one")

    assert answer.status_code == status
    if status == 200:
        assert events(answer.text)[-1] == ("error", "operator: the session was closed")
    else:
        assert answer.json()["reason"] == "operator"
    assert (again.status_code, again.json()["reason"]) == (410, "operator")
    assert (line["outcome"], line["reason"], line["reward"]) == ("infrastructure", "operator", None)
    assert [(step["outcome"], step.get("reward")) for step in episode["steps"]] == [("ended", None)]


async def test_a_trainers_own_delete_lets_a_running_call_end() -> None:
    async with running() as (stack, gateway, client):
        await create(client)
        async with under_way(call(client, "quiet")) as (asked,):
            await until(lambda: stack.backend.only.waiting == 1)
            await gateway.sessions.end(OWNER, "one", CloseReason.DELETED, wait_s=0)
            stack.backend.only.gate.set()
            answer = await asked

    assert events(answer.text)[-1][0] == "end"


async def test_the_worker_gets_the_task_of_the_split_and_never_the_trainer_s_own_id_or_key() -> None:
    async with running(trainers={"alice": "trainer-key"}) as (stack, _, client):
        client.headers["X-API-Key"] = "trainer-key"
        wish = {"env_name": "math", "split": "train", "index": 1}

        await client.post("/create", json=wish)
        await call(client)

        request = next(one for one in stack.backend.only.requests if one.target == "/create")
        assert json.loads(request.body)["task_spec"] == {"question": "2+2"}
        seen = "".join(f"{one.headers} {one.body.decode()}" for one in stack.backend.only.requests)
        assert "trainer-key" not in seen
        assert "'one'" not in seen


async def test_secrets_reach_the_worker_but_for_the_platform_s_own() -> None:
    async with running() as (stack, _, client):
        header = base64.b64encode(json.dumps({"A": {"value": "from header"}, "api_key": {"value": "k"}}).encode())
        wish = {"env_name": "math", "task_spec": {}, "secrets": {"A": "from body", "B": "b"}}

        answer = await client.post("/create", json=wish, headers={"X-Secrets": header.decode()})

        assert answer.status_code == 200
        sent = json.loads(base64.b64decode(stack.backend.only.sessions[ID].secrets))
        assert sent == {"A": {"value": "from header"}, "B": {"value": "b"}}


async def test_an_environment_that_asks_for_it_gets_the_platform_s_own_key() -> None:
    async with running(replace(environment(), platform_keys=True)) as (stack, _, client):
        header = base64.b64encode(json.dumps({"api_key": {"value": "k"}}).encode())

        await client.post("/create", json={"task_spec": {}}, headers={"X-Secrets": header.decode()})

        sent = json.loads(base64.b64decode(stack.backend.only.sessions[ID].secrets))
        assert sent == {"api_key": {"value": "k"}}


async def test_a_session_id_is_returned_as_json_to_a_client_that_accepts_no_stream() -> None:
    async with running() as (_, _, client):
        offered = await client.post("/create_session", headers={"Accept": "application/json"})

        assert list(offered.json()) == ["sid"]
        assert uuid.UUID(offered.json()["sid"]).version == 4


async def test_a_deleted_session_is_not_found_and_its_id_may_be_used_again() -> None:
    async with running() as (_, gateway, client):
        await create(client)
        await delete(client)

        called = await call(client)
        twice = await delete(client)
        again = await create(client, question="another")

        assert (called.status_code, detail(called)) == (404, "Active environment not found")
        assert twice.status_code == 200
        assert again.status_code == 200
        assert await gateway.used() == 1


async def test_a_session_is_not_visible_to_another_key() -> None:
    async with running(trainers={"alice": "alice-key", "bob": "bobby-key"}) as (stack, _, client):
        await client.post("/create", json={"task_spec": {}}, headers={"X-API-Key": "alice-key"})

        theirs = await client.get("/math/prompt", headers={"X-API-Key": "bobby-key"})
        deleted = await client.post("/delete", headers={"X-API-Key": "bobby-key"})
        mine = await client.get("/math/prompt", headers={"X-API-Key": "alice-key"})

        assert theirs.status_code == 404
        assert deleted.status_code == 200
        assert mine.status_code == 200
        assert len(stack.backend.only.sessions) == 1


async def test_two_keys_may_choose_the_same_id() -> None:
    async with running(trainers={"alice": "alice-key", "bob": "bobby-key"}) as (_, gateway, client):
        for key, question in (("alice-key", "a"), ("bobby-key", "b")):
            await client.post("/create", json={"task_spec": {"question": question}}, headers={"X-API-Key": key})

        prompts = [
            (await client.get("/math/prompt", headers={"X-API-Key": key})).json()[0]["text"]
            for key in ("alice-key", "bobby-key")
        ]

        assert prompts == ["a", "b"]
        assert await gateway.used() == 2


async def test_a_task_that_the_worker_refuses_is_the_trainer_s_mistake_and_holds_no_slot() -> None:
    async with running() as (_, gateway, client):
        answer = await create(client, on_create="refuse")

        assert (answer.status_code, detail(answer)) == (400, "this task is none")
        assert await gateway.used() == 0


@pytest.mark.parametrize("how", ["fail", "garbage"])
async def test_a_worker_that_fails_to_open_a_session_releases_its_slot(how: str) -> None:
    async with running(environment(slots=1, max_workers=1)) as (_, gateway, client):
        failed = await create(client, on_create=how)
        await gateway.eventually_used(0)
        next_one = await create(client, sid="two")

        assert failed.status_code == 500
        assert next_one.status_code == 200


async def test_a_task_that_kills_its_worker_is_tried_in_a_second_worker_and_then_fails() -> None:
    async with running(environment(slots=1, max_workers=1)) as (stack, gateway, client):
        died = await create(client, on_create="die")
        next_one = await create(client, sid="two")

        assert died.status_code in (410, 502)
        assert next_one.status_code == 200
        assert stack.backend.asked == 3
        assert await gateway.used() == 1


async def test_a_tool_list_is_queried_from_a_worker_once_and_holds_no_slot_afterwards() -> None:
    async with running() as (stack, gateway, client):
        first = await client.get("/math/tools")
        again = await client.get("/tools")

        assert first.json() == again.json()
        assert first.json()["tools"][0]["name"] == "echo"
        assert [one.target for one in stack.backend.only.requests].count("/math/tools") == 1
        assert await gateway.used() == 0


async def test_a_ping_is_answered_only_while_the_session_lives() -> None:
    async with running() as (_, _gateway, client):
        before = await client.post("/ping")
        await create(client)
        while_open = await client.post("/ping")
        await delete(client)
        after = await client.post("/ping")

        assert [one.status_code for one in (before, while_open, after)] == [404, 200, 404]


async def test_a_call_waits_while_the_worker_says_that_the_setup_runs() -> None:
    async with running() as (stack, _, client):
        await create(client, slow_setup=True)

        called = await call(client)

        assert result(called)["ok"] is True
        assert stack.backend.only.ran == ["echo"]


async def test_a_request_waits_while_the_worker_says_that_the_setup_runs() -> None:
    async with running() as (_, _gateway, client):
        await create(client, slow_setup=True, question="?")

        prompt = await client.get("/math/prompt")

        assert prompt.status_code == 200
        assert prompt.json()[0]["text"] == "?"

"""Requests that no SDK sends: each gets a response in the protocol's own form, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import httpx
import pytest

from tests.service.stack import running
from tests.service.wire import call, create, detail

DEEP = b"[" * 900 + b"]" * 900
BODIES: dict[str, bytes] = {
    "nothing": b"",
    "blank": b"   ",
    "malformed": b"{bad",
    "null": b"null",
    "a list": b"[]",
    "not UTF-8": b'{"split":"\xff"}',
    "NaN": b'{"split":NaN,"task_spec":{"a":NaN}}',
    "infinity": b'{"split":"train","index":1e999}',
    "half a character": b'{"task_spec":{"a":"\\ud800"}}',
    "half a name": b'{"split":"\\ud800","index":0}',
    "half an environment": b'{"env_name":"\\ud800","task_spec":{}}',
    "a deep task": b'{"task_spec":{"a":' + DEEP + b"}}",
    "a deep unknown key": b'{"x":' + DEEP + b"}",
    "too deep": b"[" * 200_000,
    "a long number": b'{"split":"train","index":' + b"9" * 5000 + b"}",
    "a large number": b'{"split":"train","index":' + b"9" * 4000 + b"}",
    "a large seed": b'{"task_spec":{},"seed":' + b"9" * 100 + b"}",
    "a name without end": json.dumps({"env_name": "x" * 100_000, "task_spec": {}}).encode(),
    "control characters": b'{"env_name":"\\u0000\\n","task_spec":{}}',
    "an id that is no string": b'{"task_spec":{"id":{"a":1}}}',
    "an id of control characters": b'{"task_spec":{"id":"a\\nlog_line=1"}}',
    "half an id": b'{"task_spec":{"id":"\\ud800"}}',
    "a half secret": b'{"task_spec":{},"secrets":{"A":"\\ud800"}}',
    "half a setting": b'{"task_spec":{},"config":{"\\ud800":1}}',
}
PATHS = ["/create", "/math/task", "/math/tasks", "/math/task_range", "/math/num_tasks", "/create_session"]


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
async def test_any_body_gets_an_answer_of_the_protocol(body: bytes) -> None:
    async with running() as (_, gateway, client):
        for number, path in enumerate(PATHS):
            headers = {"Content-Type": "application/json", "X-Session-ID": f"s{number}"}
            answer = await client.post(path, content=body, headers=headers)

            assert answer.status_code in (200, 400, 404, 422), (path, answer.text)
            if path != "/create_session" or answer.status_code != 200:
                json.loads(answer.text, parse_constant=_refuse)
            if answer.status_code == 422:
                assert {"type", "loc", "msg", "input"} <= answer.json()["detail"][0].keys()

        await client.post("/delete", headers={"X-Session-ID": "s0"})
        await gateway.eventually_used(0)


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


async def test_a_task_with_half_a_character_reaches_its_worker_as_in_the_reference() -> None:
    async with running() as (stack, _, client):
        body = b'{"task_spec":{"question":"\\ud800"},"env_name":"math"}'

        answer = await client.post("/create", content=body, headers={"Content-Type": "application/json"})

        assert answer.status_code == 200, answer.text
        [session] = stack.backend.only.sessions.values()
        assert session.task == {"question": "\ud800"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 400),
        ({"X-Session-ID": ""}, 400),
        ({"X-Session-ID": "x" * 1025}, 400),
        ({"X-Session-ID": "x" * 1024}, 200),
        ({"X-Session-ID": "../../é".encode()}, 200),
        ({"X-Session-ID": "a", "x-session-id": "a"}, 200),
    ],
)
async def test_a_session_id_is_any_short_text_that_is_not_empty(headers: dict[str, Any], status: int) -> None:
    async with running() as (_, _gateway, client):
        del client.headers["X-Session-ID"]

        answer = await client.post("/create", json={"task_spec": {}}, headers=headers)

        assert answer.status_code == status, answer.text


async def test_two_different_session_ids_are_refused() -> None:
    async with running() as (_, _gateway, client):
        answer = await client.post("/ping", headers=[("X-Session-ID", "a"), ("X-Session-ID", "b")])

        assert answer.status_code == 400


@pytest.mark.parametrize("path", ["/create", "/math/call", "/call"])
async def test_errors_are_reported_in_the_protocol_s_order(path: str) -> None:
    async with running() as (_, _gateway, client):
        json_type = {"Content-Type": "application/json"}
        no_id = {**json_type, "X-Session-ID": ""}

        malformed = await client.post(path, content=b"{bad", headers=no_id)
        nameless = await client.post(path, content=b"{}", headers=no_id)
        wrong = await client.post(path, content=b"{}", headers=json_type)

        assert malformed.status_code == 422
        assert (nameless.status_code, detail(nameless)) == (400, "X-Session-ID header is required")
        assert wrong.status_code == (422 if path == "/create" else 404)


async def test_a_call_with_malformed_json_to_an_unknown_session_is_422() -> None:
    async with running() as (_, _gateway, client):
        answer = await client.post("/math/call", content=b"{bad", headers={"Content-Type": "application/json"})

        assert answer.status_code == 422
        assert answer.json()["detail"][0]["type"] == "json_invalid"


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/create", 405, "POST"),
        ("POST", "/health", 405, "GET"),
        ("HEAD", "/health", 405, "GET"),
        ("OPTIONS", "/math/call", 405, "POST"),
        ("POST", "/math/prompt", 405, "GET"),
        ("GET", "/math/tasks", 405, "POST"),
        ("GET", "/nosuch/tools", 404, None),
        ("GET", "/math/nosuch", 404, None),
        ("GET", "/math", 404, None),
        ("GET", "/", 404, None),
        ("GET", "/docs", 404, None),
        ("GET", "/health/x", 404, None),
        ("GET", "/math/prompt/x", 404, None),
        ("GET", "/%2e%2e/math/prompt", 404, None),
        ("GET", "/math%2Fprompt", 404, None),
    ],
)
async def test_unknown_paths_are_404_and_wrong_methods_are_405(
    method: str, path: str, status: int, allow: str | None
) -> None:
    async with running() as (_, _gateway, client):
        answer = await client.request(method, path)

        assert answer.status_code == status
        assert answer.headers.get("allow") == allow


@pytest.mark.parametrize("path", ["/ping/", "/math/prompt/", "/ping/?a=b%20c"])
async def test_a_trailing_slash_is_answered_with_the_path_without_it(path: str) -> None:
    async with running() as (_, _gateway, client):
        answer = await client.post(path)

        assert answer.status_code == 307
        assert answer.headers["location"] == str(client.base_url).rstrip("/") + path.replace("/?", "?").rstrip("/")


async def test_behind_a_proxy_the_redirect_of_a_trailing_slash_is_relative() -> None:
    async with running() as (_, _gateway, client):
        answer = await client.post("/math/prompt/?a=b", headers={"X-Forwarded-Proto": "https"})

        assert (answer.status_code, answer.headers["location"]) == (307, "../prompt?a=b")


async def test_a_doubled_slash_is_the_same_path() -> None:
    async with running() as (_, _gateway, client):
        await create(client)

        assert (await client.post(f"{client.base_url}/ping")).status_code == 200


async def test_a_body_beyond_the_limit_is_413_and_ends_the_connection() -> None:
    async with running(max_body_bytes=2048) as (stack, _, client):
        answer = await client.post("/create", content=b"x" * 2049)

        assert answer.status_code == 413
        assert answer.headers["connection"] == "close"
        assert stack.backend.asked == 0


async def test_a_malformed_secret_header_is_refused_before_a_slot_is_taken() -> None:
    async with running() as (stack, _, client):
        answer = await client.post("/create", json={"task_spec": {}}, headers={"X-Secrets": "very-secret!"})

        assert answer.status_code == 400
        assert "very-secret" not in answer.text
        assert stack.backend.asked == 0


async def test_nothing_secret_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="gateway")
    async with running(trainers={"alice": "trainer-key-1"}) as (_, _gateway, client):
        secret = base64.b64encode(json.dumps({"A": {"value": "very-secret"}}).encode()).decode()
        headers = {"X-Secrets": secret}
        body = {"task_spec": {"answer": "the-answer"}, "secrets": {"B": "very-secret"}}
        for path in ("/k/trainer-key-1", "/k/wrong-key-12"):
            await client.post(f"{path}/create", json=body, headers=headers)
            await client.post(f"{path}/math/call", json={"name": "die", "input": {"a": "an-action"}})
            await client.post(f"{path}/delete")

    logged = caplog.text
    assert "session_opened" in logged
    for word in ("very-secret", secret, "trainer-key-1", "wrong-key-12", "the-answer", "an-action"):
        assert word not in logged


@pytest.mark.parametrize("text", ["a\nsession_closed forged=1", "a session_closed forged=1", "\x1b[2J"])
async def test_a_trainer_cannot_forge_a_line_of_the_log(caplog: pytest.LogCaptureFixture, text: str) -> None:
    caplog.set_level("INFO", logger="gateway")
    async with running() as (_, _gateway, client):
        await client.post("/create", json={"task_spec": {"id": text}})

    opened = [record.getMessage() for record in caplog.records if "session_opened" in record.getMessage()]
    assert len(opened) == 1
    assert "\n" not in opened[0]
    assert "\x1b" not in opened[0]
    assert " forged=1" not in opened[0].replace(repr(text), "")


async def test_a_create_session_needs_no_state_and_answers_a_stream() -> None:
    async with running() as (stack, _, client):
        answer = await client.post("/create_session", json={})
        refused = await client.post("/create_session", json={"env": {"A": "b"}})

        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.startswith("event: task_id\r\ndata: ")
        assert answer.text.endswith("event: end\r\ndata: \r\n\r\n")
        assert refused.status_code == 400
        assert stack.backend.asked == 0


async def test_hundreds_of_concurrent_odd_requests_leave_the_gateway_working() -> None:
    async with running() as (_, gateway, client):
        odd = [
            client.post(path, content=body, headers={"Content-Type": "application/json", "X-Session-ID": "odd"})
            for path in PATHS
            for body in BODIES.values()
        ]
        answers = await asyncio.gather(*odd)
        await client.post("/delete", headers={"X-Session-ID": "odd"})
        await create(client)

        assert (await call(client)).status_code == 200
        assert all(isinstance(answer, httpx.Response) for answer in answers)
        await gateway.eventually_used(1)

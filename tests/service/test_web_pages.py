"""A gateway without keys refuses what a web page in a user's browser sends, on every frontend, and serves programs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
import websockets.exceptions

from tests.service.openenv_world import World, world
from tests.service.stack import environment, tasks

KEYS = {"alice": "alice-key-1234"}
OPERATORS = {"olga": "olgas-key-1234"}
TASKS: dict[str, Any] = {"tasks": tasks(train=[{"question": "1+1"}])}
INLINE = {"env_name": "math", "task_spec": {"question": "1+1"}}

REQUESTS: list[tuple[str, str, Any]] = [
    ("POST", "/create", INLINE),
    ("GET", "/list_environments", None),
    ("POST", "/math/call", {"name": "echo", "input": {}}),
    ("POST", "/areal/math/api/episode/start", {"sample_id": 0, "config": {}}),
    ("POST", "/api/task/info", {}),
    ("POST", "/openenv/math/reset", {}),
    ("POST", "/openenv/math/mcp", {"jsonrpc": "2.0", "method": "tools/list", "id": 1}),
    ("POST", "/admin/v1/tasks", {"id": "a", "env_type": "math"}),
    ("GET", "/admin/v1/workers", None),
    ("GET", "/metrics", None),
]
"""A request to each frontend."""
FOREIGN: list[dict[str, str]] = [
    {"Host": "evil.example"},
    {"Host": "localhost.evil.example"},
    {"Host": "evil.example:8080"},
    {"Host": ""},
    {"Host": "name-without-dots"},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "http://localhost"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]
"""What a browser adds to the requests of another site's page."""


async def send(here: World, request: tuple[str, str, Any], headers: dict[str, str]) -> httpx.Response:
    """Send a request as a page can: JSON text as ``text/plain``, which needs no consent of the server."""
    method, path, body = request
    content = None if body is None else json.dumps(body)
    kind = {} if body is None else {"Content-Type": "text/plain"}
    return await here.http.request(method, path, content=content, headers={"X-Session-ID": "one", **kind, **headers})


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
async def test_no_frontend_obeys_the_page_of_another_site(headers: dict[str, str]) -> None:
    async with world(environment(), **TASKS) as here:
        for request in REQUESTS:
            answer = await send(here, request, headers)

            assert answer.status_code == 403, (request, answer.text)
            assert "GATEWAY_PUBLIC_NAMES" in answer.json()["detail"]
            assert ("error" in answer.json()) is ("/api" in request[1]), "AReaL's clients read the field error"
        assert await here.gateway.open_sessions() == 0


@pytest.mark.parametrize("path", ["ws", "mcp"])
@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}], ids=str)
async def test_no_page_of_another_site_opens_a_socket(path: str, headers: dict[str, str]) -> None:
    async with world(environment(), **TASKS) as here:
        with pytest.raises(websockets.exceptions.InvalidStatus) as refused:
            async with here.client(path=path, additional_headers=headers):
                raise AssertionError("the socket is open")

    assert refused.value.response.status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Host": "127.0.0.1"},
        {"Host": "localhost:8080"},
        {"Host": "LOCALHOST."},
        {"Host": "[::1]:8080"},
        {"Host": "10.0.2.2:8080"},
        {"Host": "host.docker.internal:8080"},
        {"Host": "localhost:8080", "Origin": "http://localhost:8080"},
        {"Host": "localhost", "Origin": "http://localhost:80", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
    ],
    ids=str,
)
async def test_programs_and_the_gateways_own_pages_are_served(headers: dict[str, str]) -> None:
    async with world(environment(), **TASKS) as here:
        answer = await here.http.get("/list_environments", headers=headers)
        opened = await here.http.post("/create", json=INLINE, headers={"X-Session-ID": "one", **headers})

        assert (answer.status_code, opened.status_code) == (200, 200), (answer.text, opened.text)


async def test_a_socket_client_may_name_the_gateway_as_its_origin() -> None:
    async with world(environment(), **TASKS) as here, here.client(origin=here.base) as client:
        assert (await client.ask("reset"))["type"] == "observation"


async def test_a_name_of_the_settings_is_the_gateways_own() -> None:
    async with world(environment(), public_names=("Gateway.example",), **TASKS) as here:
        by_name = await here.http.get("/list_environments", headers={"Host": "gateway.example:8080"})
        page = {"Host": "127.0.0.1:8080", "Origin": "https://gateway.example", "Sec-Fetch-Site": "cross-site"}
        by_page = await here.http.get("/list_environments", headers=page)
        other = await here.http.get("/list_environments", headers={"Host": "x.gateway.example"})

        assert (by_name.status_code, by_page.status_code, other.status_code) == (200, 200, 403)


async def test_other_containers_reach_a_gateway_without_keys_by_the_name_of_its_service() -> None:
    async with world(environment(), host="0.0.0.0", insecure=True, **TASKS) as here:
        by_service = await here.http.get("/list_environments", headers={"Host": "env_gateway:8080"})
        by_page = await here.http.get("/list_environments", headers={"Host": "evil.example"})

        assert (by_service.status_code, by_page.status_code) == (200, 403)


async def test_a_gateway_with_keys_may_have_any_name_and_its_health_is_open_under_any_name() -> None:
    async with world(environment(), trainers=KEYS, operators=OPERATORS, **TASKS) as here:
        headers = {"Host": "gateway.example", "Origin": "https://ui.example", "X-API-Key": KEYS["alice"]}
        assert (await here.http.get("/list_environments", headers=headers)).status_code == 200
    async with world(environment(), **TASKS) as here:
        for path in ("/healthz", "/readyz", "/health", "/openenv/math/health"):
            assert (await here.http.get(path, headers={"Host": "balancer.example"})).status_code == 200


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_operators_routes_read_only_bodies_that_state_json_or_yaml(kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    task = json.dumps({"id": "a", "env_type": "math"}).encode()
    async with world(environment(), **TASKS) as here:
        answers = await asyncio.gather(
            here.http.post("/admin/v1/tasks", content=task, headers=headers),
            here.http.post("/admin/v1/tasks/validate", content=task, headers=headers),
            here.http.put("/admin/v1/curriculum/mine", content=b'{"environment": "math"}', headers=headers),
            here.http.put("/admin/v1/nodes/n1", content=b'{"draining": true}', headers=headers),
        )
        added = (await here.http.get("/admin/v1/tasks", params={"split": "custom"})).json()["tasks"]

    for answer in answers:
        assert answer.status_code == 400, answer.text
        assert "Content-Type" in answer.json()["detail"]
    assert added == []

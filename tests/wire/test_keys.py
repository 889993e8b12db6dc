"""Trainer and operator keys: which requests they allow, and that a session belongs to the key that opened it."""

from collections.abc import AsyncIterator

import aiohttp
import httpx
import ors.client
import pytest
from openreward.api.environments import AuthenticationError

from tests.wire.gateways import OPERATOR_KEY, TRAINER_KEYS
from tests.wire.raw import RawEpisode, create, episode, new_sid
from tests.wire.sdks import Sdk
from tests.wire.targets import BOTH_GATEWAYS, ONE_GATEWAY, Target, on, with_clients

pytestmark = pytest.mark.wire


@pytest.fixture
async def bob(target: Target) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client with another trainer's key."""
    async with target.http(key=TRAINER_KEYS["bob"]) as http:
        yield http


@with_clients(*ONE_GATEWAY)
@pytest.mark.parametrize("key", [None, "not-the-key", OPERATOR_KEY])
async def test_a_client_without_a_trainer_key_is_refused(target: Target, sdk: Sdk, key: str | None) -> None:
    async with sdk.connect(target.url, key) as client:
        with pytest.raises((ors.client.AuthenticationError, AuthenticationError)):
            await client.environment("probe").list_splits()
        with pytest.raises((ors.client.AuthenticationError, AuthenticationError)):
            async with client.environment("probe").session(split="train", index=0):
                pass


@on(*ONE_GATEWAY)
@pytest.mark.parametrize("path", ["/admin/v1/sessions", "/admin/v1/workers", "/metrics"])
@pytest.mark.parametrize("key", ["", TRAINER_KEYS["alice"], "not-the-key"])
async def test_operator_routes_refuse_trainer_keys(target: Target, path: str, key: str) -> None:
    async with target.http(key=key) as http:
        response = await http.get(path)

    assert response.status_code in (401, 403)
    assert "sessions" not in response.json()


@on(*BOTH_GATEWAYS)
async def test_a_session_of_another_key_is_not_found(http: httpx.AsyncClient, bob: httpx.AsyncClient) -> None:
    async with episode(http, {"start": 1}, environment="counter") as opened:
        stranger = RawEpisode(bob, opened.sid, "counter")
        answers = [
            await stranger.get("prompt"),
            await stranger.get("task_tools"),
            await stranger.ask("add", {"n": 100}),
            await stranger.post("/ping"),
        ]
        await stranger.delete()
        after = await opened.call("add", {"n": 1})

    assert [(answer.status_code, answer.json()) for answer in answers] == [
        (404, {"detail": "Active environment not found"})
    ] * 4
    assert after.text == "2"


@on(*BOTH_GATEWAYS)
async def test_two_keys_may_choose_the_same_session_id(http: httpx.AsyncClient, bob: httpx.AsyncClient) -> None:
    sid = new_sid()

    async with (
        episode(http, {"start": 1}, environment="counter", sid=sid) as one,
        episode(bob, {"start": 50}, environment="counter", sid=sid) as other,
    ):
        sums = [(await each.call("add", {"n": 1})).text for each in (one, other)]
        await one.delete()
        sums.append((await other.call("add", {"n": 1})).text)

    assert sums == ["2", "51", "52"]


@on(*ONE_GATEWAY)
@pytest.mark.parametrize("form", ["bearer", "path"])
async def test_a_key_is_accepted_as_a_bearer_token_or_in_the_path(target: Target, form: str) -> None:
    key = TRAINER_KEYS["alice"]
    prefix = f"/k/{key}" if form == "path" else ""
    headers = {"Authorization": f"Bearer {key}"} if form == "bearer" else {}
    sid = {"X-Session-ID": new_sid()}

    async with target.http(key="", headers=headers) as http:
        created = await http.post(f"{prefix}/create", headers=sid, json={"env_name": "probe", "task_spec": {}})
        called = await http.post(f"{prefix}/probe/call", headers=sid, json={"name": "pid", "input": {}})
        await http.post(f"{prefix}/delete", headers=sid)

    assert (created.status_code, called.status_code) == (200, 200)
    assert target.gateway is not None
    assert key not in target.gateway.log


@on(*ONE_GATEWAY)
async def test_a_refusal_without_a_key_has_the_form_of_the_protocol(target: Target) -> None:
    async with target.http(key="") as http:
        response = await create(http, new_sid(), env_name="probe", task_spec={})

    assert response.status_code == 401
    assert isinstance(response.json()["detail"], str)
    assert aiohttp.hdrs.WWW_AUTHENTICATE.lower() in response.headers

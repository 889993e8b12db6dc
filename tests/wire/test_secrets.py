"""Secrets reach only the session for which they are meant: no log, no listing, no store and no other session."""

import base64
import json
from typing import Any

import httpx
import pytest
import redis

from tests.wire.raw import create, episode, new_sid
from tests.wire.sdks import Client, Sdk, text
from tests.wire.targets import BOTH_GATEWAYS, ONE_GATEWAY, OURS, Target, on, token, with_clients

pytestmark = pytest.mark.wire


def packed(secrets: Any) -> str:
    """Return a value for the ``X-Secrets`` header."""
    return base64.b64encode(json.dumps(secrets).encode()).decode()


@with_clients("openreward-server", *BOTH_GATEWAYS)
async def test_a_secret_of_the_client_reaches_only_its_session(client: Client, sdk: Sdk) -> None:
    word = token()
    probe = client.environment("probe")

    async with (
        probe.session(task=sdk.task("probe", {}), secrets=sdk.secrets({"TOKEN": word})) as one,
        probe.session(task=sdk.task("probe", {})) as other,
    ):
        told = text(await one.call_tool("secret", {"name": "TOKEN"}))
        told_other = text(await other.call_tool("secret", {"name": "TOKEN"}))

    assert told == word
    assert told_other == ""


@on(*OURS)
async def test_secrets_are_read_from_the_body_and_the_header_and_the_header_wins(http: httpx.AsyncClient) -> None:
    sid = new_sid()
    header = packed({"BOTH": {"value": "header", "allowed_domains": ["h"]}, "HEADER": {"value": "h"}})

    async with episode(http) as opened:
        await opened.delete()
        created = await create(
            http,
            opened.sid,
            headers={"X-Secrets": header},
            env_name="probe",
            task_spec={},
            secrets={"BOTH": "body", "BODY": "b"},
        )
        told = [(await opened.call("secret", {"name": name})).text for name in ("BOTH", "HEADER", "BODY", "NONE")]

    assert created.status_code == 200
    assert told == ["header", "h", "b", ""]
    assert (await http.post("/ping", headers={"X-Session-ID": sid})).status_code == 404


@with_clients(*ONE_GATEWAY)
async def test_the_trainers_own_key_does_not_reach_the_environment(client: Client, sdk: Sdk) -> None:
    # One client adds the caller's key to the secrets of every session.
    async with client.environment("probe").session(task=sdk.task("probe", {})) as session:
        told = [text(await session.call_tool("secret", {"name": name})) for name in ("api_key", "OPENREWARD_API_KEY")]

    assert told == ["", ""]


@on(*OURS)
@pytest.mark.parametrize(
    "value",
    [
        pytest.param("no base64!", id="invalid base64"),
        pytest.param("YWJj", id="invalid JSON"),
        pytest.param(packed([1]), id="a list"),
        pytest.param(packed({"A": {}}), id="no value"),
        pytest.param(packed({"A": {"value": 5}}), id="a number"),
    ],
)
async def test_malformed_secrets_are_refused_and_not_shown(http: httpx.AsyncClient, value: str) -> None:
    response = await create(http, new_sid(), headers={"X-Secrets": value}, env_name="probe", task_spec={})

    assert response.status_code == 400, response.text
    assert value not in response.text


@on("openreward-server", *OURS)
async def test_secrets_of_more_than_64_kib_arrive(http: httpx.AsyncClient) -> None:
    word = "s" * 60_000
    header = packed({"LARGE": {"value": word, "allowed_domains": []}})
    assert len(header) > 65_536

    async with episode(http, headers={"X-Secrets": header}) as opened:
        told = (await opened.call("secret", {"name": "LARGE"})).text

    assert told == word


@on(*BOTH_GATEWAYS)
async def test_no_log_listing_store_or_container_holds_a_secret_or_a_key(
    target: Target, http: httpx.AsyncClient
) -> None:
    gateway = target.gateway
    assert gateway is not None
    word, spec = token(), token()
    headers = {"X-Secrets": packed({"TOKEN": {"value": word}})}

    async with episode(http, {"question": spec}, headers=headers) as opened:
        await opened.call("secret", {"name": "TOKEN"})
        await opened.call("fail")
        await create(http, new_sid(), headers=headers, env_name="nope", task_spec={})
        listed = json.dumps([await gateway.sessions(), await gateway.workers()])
        stored = _stored(target)
        seen = _inspected(target)

    assert target.key is not None
    for place in (listed, stored, seen, gateway.log):
        assert word not in place
        assert target.key not in place
    assert spec not in listed + stored + gateway.log


def _stored(target: Target) -> str:
    """Return the store's whole content, or an empty string if the store is the gateway's own memory."""
    if target.stack is None:
        return ""
    with redis.Redis(unix_socket_path=str(target.stack.redis.socket)) as client:
        return "".join(f"{key!r} {client.dump(key)!r}" for key in client.scan_iter())


def _inspected(target: Target) -> str:
    """Return all that the engine knows of the gateway's containers, or an empty string if there is no engine."""
    if target.stack is None:
        return ""
    return "".join(json.dumps(container.attrs) for container in target.stack.containers.list())

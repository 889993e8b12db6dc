"""A session expires when it is idle, and only then. ``brief`` has an idle time of two seconds and one slot."""

import asyncio

import aiohttp
import httpx
import ors.client
import pytest
from openreward.api.environments import SessionTerminatedError

from tests.fakes.eventually import eventually
from tests.wire.gateways import Gateway
from tests.wire.raw import RawEpisode, create, episode, new_sid
from tests.wire.sdks import Client, Sdk, text
from tests.wire.targets import BOTH_GATEWAYS, ONE_GATEWAY, Target, on, with_clients

pytestmark = pytest.mark.wire

IDLE_S = 2.0
"""The environment's ``idle_s``, in seconds."""


async def nobody(gateway: Gateway) -> None:
    assert await gateway.sessions() == []


@on(*BOTH_GATEWAYS)
async def test_an_idle_session_expires_and_its_slot_is_free(http: httpx.AsyncClient, target: Target) -> None:
    gateway = target.gateway
    assert gateway is not None
    left = RawEpisode(http, new_sid(), "brief")
    await create(http, left.sid, env_name="brief", task_spec={})
    held = await gateway.sessions()

    await eventually(lambda: nobody(gateway))
    prompt, call, ping = await left.get("prompt"), await left.ask("pid"), await left.post("/ping")
    async with episode(http, {"question": "next"}, environment="brief") as following:
        said = (await following.get("prompt")).json()[0]["text"]

    assert [session["name"] for session in held] == [left.sid]
    assert (prompt.status_code, call.status_code, ping.status_code) == (410, 410, 410)
    assert "expired" in prompt.json()["detail"]
    assert "expired" in call.json()["detail"]
    assert ping.json()["reason"] == "expired"
    assert said == "next"
    assert (await left.delete()).status_code == 200


@with_clients(*ONE_GATEWAY)
async def test_a_client_learns_from_its_next_call_that_its_session_expired(
    client: Client, sdk: Sdk, target: Target
) -> None:
    # Both clients ping at the opening and then every 10 s: too rarely for this environment.
    gateway = target.gateway
    assert gateway is not None
    opening = client.environment("brief").session(task=sdk.task("brief", {}))

    async with opening as session:
        await eventually(lambda: nobody(gateway))
        with pytest.raises((aiohttp.ClientResponseError, SessionTerminatedError, RuntimeError)) as caught:
            await session.call_tool("pid")

    assert "expired" in str(caught.value)


@on(*BOTH_GATEWAYS)
async def test_a_session_id_can_be_used_again_after_its_expiry(http: httpx.AsyncClient, target: Target) -> None:
    gateway = target.gateway
    assert gateway is not None
    sid = new_sid()
    await create(http, sid, env_name="brief", task_spec={"question": "first"})
    await eventually(lambda: nobody(gateway))

    async with episode(http, {"question": "second"}, environment="brief", sid=sid) as again:
        prompt = (await again.get("prompt")).json()

    assert prompt[0]["text"] == "second"


@on(*BOTH_GATEWAYS)
async def test_a_session_does_not_expire_during_a_call_that_takes_longer_than_the_idle_time(
    http: httpx.AsyncClient,
) -> None:
    async with episode(http, environment="brief") as opened:
        slept = await opened.call("sleep", {"seconds": 2 * IDLE_S})
        after = await opened.call("echo", {"text": "still here"})

    assert (slept.text, after.text) == ("slept", "still here")


@on(*ONE_GATEWAY)
def test_a_blocking_client_that_does_not_ping_keeps_its_session_through_a_long_call(target: Target) -> None:
    with ors.client.ORS(base_url=target.url, api_key=target.key) as client:
        brief = client.environment("brief")
        with brief.session(task=ors.client.Task(environment_name="brief", task_spec={})) as session:
            slept = session.call_tool("sleep", {"seconds": 2 * IDLE_S})
            after = session.call_tool("echo", {"text": "still here"})

    assert (text(slept), text(after)) == ("slept", "still here")


@on(*BOTH_GATEWAYS)
async def test_pings_keep_a_session_alive(http: httpx.AsyncClient) -> None:
    async with episode(http, environment="brief") as opened:
        loop = asyncio.get_running_loop()
        end_at = loop.time() + 2.5 * IDLE_S
        statuses = set()
        while loop.time() < end_at:
            statuses.add((await opened.post("/ping")).status_code)
            await asyncio.sleep(IDLE_S / 10)
        after = await opened.call("echo", {"text": "still here"})

    assert statuses == {200}
    assert after.text == "still here"

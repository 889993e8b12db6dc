"""Episodes on two gateways that share a store and an engine: both show the same state."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.eventually import eventually
from tests.wire.gateways import Gateway
from tests.wire.raw import RawEpisode, create, episode, new_sid, parse
from tests.wire.sdks import OPENREWARD, ORS, Sdk
from tests.wire.stack import Stack
from tests.wire.targets import Target, gateway_target, runs_once, token

pytestmark = [pytest.mark.wire, pytest.mark.docker, pytest.mark.redis]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack()
    try:
        stack.start()
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="module")
def pair(stack: Stack) -> Iterator[tuple[Target, Target]]:
    """Two replicas."""
    second = stack.replica("second")
    second.start()
    try:
        yield gateway_target("stack", stack.gateway, stack), gateway_target("stack", second, stack)
    finally:
        second.stop()


@pytest.fixture
async def https(pair: tuple[Target, Target]) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """Plain HTTP to each of them."""
    async with pair[0].http() as first, pair[1].http() as second:
        yield first, second


Https = tuple[httpx.AsyncClient, httpx.AsyncClient]


async def test_a_session_is_served_by_either_gateway(https: Https) -> None:
    first, second = https

    async with episode(first, {"start": 1}, environment="counter") as opened:
        other_side = RawEpisode(second, opened.sid, "counter")
        sums = [(await each.call("add", {"n": 1})).text for each in (opened, other_side, opened, other_side)]

    assert sums == ["2", "3", "4", "5"]


async def test_a_session_deleted_at_one_gateway_is_not_found_at_the_other(https: Https) -> None:
    first, second = https

    async with episode(first) as opened:
        other_side = RawEpisode(second, opened.sid, "probe")
        before = await other_side.get("prompt")
        await opened.delete()
        after = await other_side.get("prompt")

    assert (before.status_code, after.status_code) == (200, 404)


async def test_a_create_sent_to_both_opens_one_session(https: Https, pair: tuple[Target, Target]) -> None:
    first, _ = https
    gateway = pair[0].gateway
    assert gateway is not None
    sid = new_sid()
    body = {"env_name": "counter", "task_spec": {"start": 5}}
    headers = {"X-Session-ID": sid}

    responses = await asyncio.gather(*(http.post("/create", headers=headers, json=body) for http in https * 10))
    held = [session["name"] for session in await gateway.sessions()]
    sums = [(await RawEpisode(http, sid, "counter").call("add", {"n": 1})).text for http in https]
    await first.post("/delete", headers=headers)

    assert {response.status_code for response in responses} == {200}
    assert held == [sid]
    assert sums == ["6", "7"]


async def test_a_call_with_a_key_sent_to_both_runs_once(
    https: Https, pair: tuple[Target, Target], tmp_path: Path
) -> None:
    first, _ = https
    folder, word = pair[0].folder(tmp_path), token()
    body = {"name": "hold", "input": {"token": word}}

    async with episode(first, {"folder": folder.inside}) as opened:
        headers = opened.headers | {"Idempotency-Key": word}
        calls = [asyncio.create_task(http.post("/probe/call", headers=headers, json=body)) for http in https * 2]
        await eventually(lambda: runs_once(folder, word))
        folder.open_gate(word)
        outcomes = [parse(response.text).text for response in await asyncio.gather(*calls)]
        conflict = await first.post("/probe/call", headers=headers, json={"name": "pid", "input": {}})

    assert outcomes == ["1"] * 4
    assert conflict.status_code == 409


async def test_both_gateways_see_an_expiry(https: Https, pair: tuple[Target, Target]) -> None:
    first, second = https
    gateway = pair[1].gateway
    assert gateway is not None
    sid = new_sid()
    await create(first, sid, env_name="brief", task_spec={})

    await eventually(lambda: nobody(gateway))
    answers = [await RawEpisode(http, sid, "brief").get("prompt") for http in (first, second)]

    assert [answer.status_code for answer in answers] == [410, 410]


async def nobody(gateway: Gateway) -> None:
    assert await gateway.sessions() == []


@pytest.mark.parametrize("sdk", [ORS, OPENREWARD], ids=lambda sdk: sdk.name)
async def test_episodes_on_both_gateways_are_all_rewarded(pair: tuple[Target, Target], sdk: Sdk) -> None:
    async with contextlib.AsyncExitStack() as clients:
        counters = [
            (await clients.enter_async_context(sdk.connect(target.url, target.key))).environment("counter")
            for target in pair
        ]

        async def play(start: int) -> float | None:
            task = sdk.task("counter", {"start": start})
            async with counters[start % 2].session(task=task) as session:
                await session.call_tool("add", {"n": 1})
                return (await session.call_tool("stop")).reward

        rewards = await asyncio.gather(*(play(start) for start in range(32)))

    assert rewards == [(start + 1) / 10 for start in range(32)]


async def test_when_one_gateway_is_killed_the_other_goes_on(stack: Stack, pair: tuple[Target, Target]) -> None:
    third = stack.replica("third")
    third.start()
    async with gateway_target("stack", third, stack).http() as doomed, pair[0].http() as survivor:
        opened = RawEpisode(doomed, new_sid(), "counter")
        await create(doomed, opened.sid, env_name="counter", task_spec={"start": 1})
        third.kill()
        other_side = RawEpisode(survivor, opened.sid, "counter")
        added = (await other_side.call("add", {"n": 1})).text
        await other_side.delete()
        async with episode(survivor, {"start": 7}, environment="counter") as fresh:
            again = (await fresh.call("add", {"n": 1})).text

    assert (added, again) == ("2", "8")

"""The full stack over restarts: containers and sessions stay, whatever happens to the gateway and Redis."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.eventually import eventually
from tests.wire.raw import RawEpisode, create, episode, new_sid, parse
from tests.wire.stack import Stack
from tests.wire.targets import Target, gateway_target, runs_once, token

pytestmark = [pytest.mark.wire, pytest.mark.docker, pytest.mark.redis]


@pytest.fixture(scope="module")
def stack() -> Iterator[Target]:
    """One stack for all tests. Each test leaves a running gateway and a running Redis."""
    stack = Stack()
    try:
        stack.start()
        yield gateway_target("stack", stack.gateway, stack)
    finally:
        stack.close()


@pytest.fixture
async def http(stack: Target) -> AsyncIterator[httpx.AsyncClient]:
    async with stack.http() as http:

        async def opens_sessions() -> None:
            opened = RawEpisode(http, new_sid(), "probe")
            response = await create(http, opened.sid, env_name="probe", task_spec={})
            assert response.status_code == 200, response.text
            await opened.delete()

        await eventually(opens_sessions)  # a store that the previous test stopped is rebuilt first
        yield http


async def test_sessions_outlive_a_gateway_that_is_killed(stack: Target, http: httpx.AsyncClient) -> None:
    assert stack.gateway is not None
    assert stack.stack is not None
    episodes = [RawEpisode(http, new_sid(), "counter") for _ in range(5)]
    for start, opened in enumerate(episodes):
        await create(http, opened.sid, env_name="counter", task_spec={"start": start})
        await opened.call("add", {"n": 10})
    containers = {container.id for container in stack.stack.containers.list()}

    stack.gateway.kill()
    stack.gateway.restart()
    sums = [(await opened.call("add", {"n": 100})).text for opened in episodes]
    held = await stack.gateway.sessions()
    for opened in episodes:
        await opened.delete()

    assert sums == [str(start + 110) for start in range(5)]
    assert {session["name"] for session in held} == {opened.sid for opened in episodes}
    assert containers >= {container.id for container in stack.stack.containers.list()}
    assert await stack.gateway.sessions() == []


async def test_a_call_cut_off_by_a_killed_gateway_is_found_by_its_key(
    stack: Target, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    assert stack.gateway is not None
    folder, word = stack.folder(tmp_path), token()
    opened = RawEpisode(http, new_sid(), "probe")
    await create(http, opened.sid, env_name="probe", task_spec={"folder": folder.inside})
    headers = opened.headers | {"Idempotency-Key": word}
    body = {"name": "hold", "input": {"token": word}}

    cut_off = asyncio.create_task(http.post("/probe/call", headers=headers, json=body))
    await eventually(lambda: runs_once(folder, word))
    stack.gateway.kill()
    await asyncio.wait({cut_off})
    stack.gateway.restart()
    again = asyncio.create_task(http.post("/probe/call", headers=headers, json=body))
    folder.open_gate(word)
    outcome = parse((await again).text)
    runs = folder.runs(word)
    await opened.delete()

    assert isinstance(cut_off.exception(), httpx.TransportError)
    assert outcome.text == "1"
    assert runs == 1


async def test_containers_that_the_store_does_not_know_are_removed(stack: Target, http: httpx.AsyncClient) -> None:
    assert stack.gateway is not None
    assert stack.stack is not None
    async with episode(http):
        orphans = {container.id for container in stack.stack.containers.list()}
    stack.gateway.kill()
    stack.stack.redis.stop()

    stack.stack.redis.start()
    stack.gateway.restart()
    async with episode(http) as opened:
        echo = await opened.call("echo", {"text": "new"})

    async def every_container_is_a_worker() -> None:
        assert stack.gateway is not None
        assert stack.stack is not None
        workers = [worker["id"] for worker in await stack.gateway.workers()]
        for container in stack.stack.containers.list():
            assert [worker for worker in workers if worker in container.name], container.name

    await eventually(every_container_is_a_worker)
    assert echo.text == "new"
    assert orphans


async def test_a_gateway_that_is_stopped_keeps_its_sessions_for_the_next(
    stack: Target, http: httpx.AsyncClient
) -> None:
    assert stack.gateway is not None
    opened = RawEpisode(http, new_sid(), "counter")
    await create(http, opened.sid, env_name="counter", task_spec={"start": 1})

    status = stack.gateway.stop()
    stack.gateway.restart()
    added = (await opened.call("add", {"n": 1})).text
    await opened.delete()

    assert status == 0
    assert added == "2"


async def test_without_its_store_a_gateway_serves_known_sessions_and_opens_no_new_ones(
    stack: Target, http: httpx.AsyncClient
) -> None:
    assert stack.gateway is not None
    assert stack.stack is not None
    async with episode(http) as opened:
        stack.stack.redis.stop()
        called = await opened.call("echo", {"text": "from memory"})
        refused = await create(http, new_sid(), env_name="probe", task_spec={})
        stack.stack.redis.start()

    assert called.text == "from memory"
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1

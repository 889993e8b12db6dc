"""Failures of a real gateway as typed errors, and calls whose connection breaks: each step runs at most once."""

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from env_gateway_client import (
    AsyncGateway,
    DeadlinePassed,
    Gateway,
    GatewayError,
    InvalidRequest,
    NoCapacity,
    NotAllowed,
    SessionExists,
    SessionLost,
    SessionNotFound,
    Timeouts,
    UnknownEnvironment,
    UnknownTask,
    Unreachable,
)
from env_gateway_client.errors import error_of

from tests.clients.conftest import QUICK
from tests.fakes.eventually import eventually
from tests.wire import gateways
from tests.wire.cutting import Relay, relay
from tests.wire.targets import OFFICIAL, ONE_GATEWAY, Folder, Target, on, runs_once, token

pytestmark = pytest.mark.wire


@on(*ONE_GATEWAY)
@pytest.mark.parametrize(
    ("environment", "options", "kind", "text"),
    [
        ("nope", {"split": "train", "index": 0}, UnknownEnvironment, "there are"),
        ("probe", {"split": "nope", "index": 0}, UnknownTask, "Invalid split"),
        ("probe", {"split": "train", "index": 99}, UnknownTask, "Invalid index"),
        ("probe", {"task": "nope"}, UnknownTask, "Unknown task"),
        ("probe", {"task": {}, "group": ("g", 5000)}, InvalidRequest, "X-Group-Size"),
        ("probe", {"task": {}, "config": "x"}, InvalidRequest, "config: must be"),
    ],
)
async def test_a_wrong_opening_has_a_typed_error(
    target: Target, client: AsyncGateway, environment: str, options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        await client.open(environment, **options)


@on("ors-server", "openreward-server")
@pytest.mark.parametrize(
    ("environment", "options", "kind"),
    [
        ("nope", {"split": "train", "index": 0}, UnknownEnvironment),
        ("probe", {"split": "nope", "index": 0}, UnknownTask),
        ("probe", {"split": "train", "index": 99}, UnknownTask),
    ],
)
async def test_a_wrong_opening_on_an_official_server_has_the_same_error(
    target: Target, client: AsyncGateway, environment: str, options: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        await client.open(environment, **options)


@on(*ONE_GATEWAY)
@pytest.mark.parametrize("key", ["", "a-wrong-key-00"])
async def test_a_wrong_key_is_not_allowed_and_not_repeated_in_the_message(target: Target, key: str) -> None:
    async with AsyncGateway(target.url, key, timeouts=QUICK) as client:
        with pytest.raises(NotAllowed) as caught:
            await client.open("probe", split="train", index=0)

    assert caught.value.status == 401
    assert "a-wrong-key-00" not in str(caught.value)


@on(*ONE_GATEWAY)
async def test_an_opening_waits_no_longer_than_its_limit(target: Target, client: AsyncGateway) -> None:
    async with await client.open("narrow", task={}):
        with pytest.raises(NoCapacity, match=r"within 0\.2 s"):
            await client.open("narrow", task={}, wait_s=0.2)


@on(*ONE_GATEWAY)
async def test_an_opening_waits_for_a_slot_beyond_the_gateways_own_wait(target: Target, client: AsyncGateway) -> None:
    refusals: list[GatewayError] = []

    async def note(response: httpx.Response) -> None:
        if response.status_code == 429:
            refusals.append(error_of(429, response.headers, await response.aread()))

    async def was_refused() -> None:
        assert refusals

    first = await client.open("narrow", task={})
    client.http._client.event_hooks["response"].append(note)
    waiting = asyncio.ensure_future(client.open("narrow", task={}))
    await eventually(was_refused)
    await first.close()

    async with await waiting as second:
        assert (await second.step("echo", {"text": "in"})).text == "in"
    assert type(refusals[0]) is NoCapacity
    assert refusals[0].code == "pool_exhausted"
    assert refusals[0].retry_after_s is not None


@on(*ONE_GATEWAY)
async def test_the_death_of_a_worker_in_mid_call_is_a_lost_session_without_a_reward(
    target: Target, client: AsyncGateway, folder: Folder
) -> None:
    word = token()
    async with await client.open("probe", task={"folder": folder.inside}) as episode:
        await episode.step("score", {"reward": 1.0})
        pid = int((await episode.step("pid")).text)
        call = asyncio.ensure_future(episode.step("hold", {"token": word}))
        await eventually(lambda: runs_once(folder, word))
        os.kill(pid, signal.SIGKILL)

        with pytest.raises(SessionLost) as caught:
            await call
        with pytest.raises(SessionLost):
            _ = episode.reward

    assert caught.value.reason == "worker_lost"
    assert folder.runs(word) == 1


@on(*ONE_GATEWAY)
async def test_an_expired_session_is_lost_with_its_reason(target: Target, client: AsyncGateway) -> None:
    async with await client.open("brief", task={}) as episode:

        async def has_expired() -> None:
            assert target.gateway is not None
            assert await target.gateway.sessions() == []

        await eventually(has_expired)
        with pytest.raises(SessionLost) as caught:
            await episode.step("pid")

    assert caught.value.reason == "expired"
    assert "keep_alive" in str(caught.value)


@on(*OFFICIAL, *ONE_GATEWAY)
async def test_a_session_that_was_deleted_is_not_found(target: Target, client: AsyncGateway) -> None:
    episode = await client.open("probe", task={})
    async with target.http() as http:
        await http.post("/delete", headers={"X-Session-ID": episode.id})

    with pytest.raises(SessionNotFound):
        await episode.step("pid")
    await episode.close()


@on(*ONE_GATEWAY)
async def test_two_openings_of_one_id_are_one_session_if_they_are_equal(target: Target, client: AsyncGateway) -> None:
    await client.http.run(client.plans.open("same-id", "probe", {"split": "train", "index": 0}))
    await client.http.run(client.plans.open("same-id", "probe", {"split": "train", "index": 0}))

    with pytest.raises(SessionExists):
        await client.http.run(client.plans.open("same-id", "probe", {"split": "train", "index": 1}))
    assert target.gateway is not None
    assert len(await target.gateway.sessions()) == 1
    await client.http.run(client.plans.close("same-id"))


@on(*ONE_GATEWAY)
@pytest.mark.parametrize("loses_answer", [False, True])
async def test_a_call_whose_connection_breaks_runs_once_and_gets_its_outcome(
    target: Target, folder: Folder, loses_answer: bool
) -> None:
    word = token()
    async with relay(target.url) as between, AsyncGateway(between.url, target.key or "", timeouts=QUICK) as client:
        episode = await client.open("probe", task={"folder": folder.inside})
        call = asyncio.ensure_future(episode.step("hold", {"token": word}))
        await eventually(lambda: runs_once(folder, word))
        if loses_answer:
            between.mute()
            folder.open_gate(word)
        between.cut()
        folder.open_gate(word)
        result = await call
        await episode.close()

    assert result.text == "1"
    assert folder.runs(word) == 1
    assert between.calls == 2


@on("openreward-server")
async def test_a_call_on_an_official_server_is_resumed_by_its_task_id(target: Target, folder: Folder) -> None:
    word = token()
    async with relay(target.url) as between, AsyncGateway(between.url, timeouts=QUICK) as client:
        episode = await client.open("probe", task={"folder": folder.inside})
        call = asyncio.ensure_future(episode.step("hold", {"token": word}))
        await eventually(lambda: has_its_task_id(between))
        await eventually(lambda: runs_once(folder, word))
        between.cut()
        folder.open_gate(word)
        result = await call
        await episode.close()

    assert result.text == "1"
    assert folder.runs(word) == 1


async def has_its_task_id(between: Relay) -> None:
    assert between.task_ids == 1


def test_a_url_without_a_server_is_unreachable_at_once() -> None:
    with Gateway("http://127.0.0.1:9", timeouts=QUICK) as client, pytest.raises(Unreachable, match="check the URL"):
        client.open("math", split="train", index=0)


async def test_a_restarted_gateway_is_found_again_and_knows_no_session(tmp_path: Path) -> None:
    folder = gateways.short_folder()
    gateway = gateways.Gateway(folder, {"GATEWAY_ENVIRONMENTS": "probe"})
    gateway.start()
    try:
        async with AsyncGateway(gateway.url, gateways.TRAINER_KEYS["alice"], timeouts=QUICK) as client:
            episode = await client.open("probe", task={})
            gateway.kill()
            opening = asyncio.ensure_future(client.open("probe", task={}))
            await asyncio.sleep(0)
            gateway.restart()
            async with await opening as second:
                assert (await second.step("echo", {"text": "back"})).text == "back"
            with pytest.raises((SessionNotFound, SessionLost)):
                await episode.step("pid")
            await episode.close()
    finally:
        gateway.stop()


async def test_a_silent_server_is_given_up_at_the_time_limit() -> None:
    has_left = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        has_left.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, AsyncGateway(url, timeouts=Timeouts(request_s=0.3, close_s=0.3)) as client:
        with pytest.raises(DeadlinePassed):
            await client.environments()
        await has_left.wait()


def test_the_blocking_client_gives_a_silent_server_up_at_the_time_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with Gateway(url, timeouts=Timeouts(request_s=0.3)) as client, pytest.raises(DeadlinePassed):
            client.environments()

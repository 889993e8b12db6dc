"""Episodes through the client, on a real gateway and on the official servers."""

import asyncio
import threading
from typing import Any

import pytest
from env_gateway_client import AsyncGateway, Gateway, GatewayError, Image, Text, Timeouts, openai_content
from env_gateway_client.client import PING_S

from tests.clients.conftest import QUICK
from tests.fakes.eventually import eventually
from tests.wire.targets import OFFICIAL, ONE_GATEWAY, Folder, Target, on, runs_once

pytestmark = pytest.mark.wire


@on(*OFFICIAL, *ONE_GATEWAY)
async def test_discovery_lists_environments_splits_tasks_and_tools(target: Target, client: AsyncGateway) -> None:
    tasks = await client.tasks("probe", "train", 1, 3)

    assert "probe" in await client.environments()
    assert "train" in [split.name for split in await client.splits("probe")]
    assert await client.task_count("probe", "train") == 5
    assert [(task.index, task.id) for task in tasks] == [(1, "probe-1"), (2, "probe-2")]
    assert "echo" in [tool.name for tool in await client.tools("probe")]


@on(*OFFICIAL, *ONE_GATEWAY)
async def test_an_episode_by_split_and_index(target: Target, client: AsyncGateway) -> None:
    async with await client.open("probe", split="train", index=1) as episode:
        echoed = await episode.step("echo", {"text": " \u2028é "})
        scored = await episode.step("score", {"reward": 0.25})
        before = episode.reward
        finished = await episode.step("finish", {"reward": 1.0})

    assert [type(block) for block in episode.prompt] == [Text, Image]
    assert openai_content(episode.prompt)[0] == {"type": "text", "text": "Naïve café — 你好 🙂?"}
    assert (echoed.text, echoed.reward, echoed.finished) == (" \u2028é ", None, False)
    assert (scored.reward, before) == (0.25, 0.25)
    assert (finished.finished, episode.finished, episode.reward) == (True, True, 1.25)


@on(*OFFICIAL, *ONE_GATEWAY)
async def test_an_episode_by_a_task_of_a_listing_has_the_tools_of_that_task(
    target: Target, client: AsyncGateway
) -> None:
    (task,) = await client.tasks("probe", "train", 3, 4)

    async with await client.open("probe", task=task) as episode:
        hint = await episode.step("hint")

    assert "hint" in [tool["function"]["name"] for tool in episode.openai_tools]
    assert hint.text == "look closer"


@on(*OFFICIAL, *ONE_GATEWAY)
async def test_a_failed_call_has_no_reward_and_its_episode_goes_on(target: Target, client: AsyncGateway) -> None:
    async with await client.open("probe", task={"question": "?"}) as episode:
        results = [
            await episode.step("nope"),
            await episode.step("echo", {}),
            await episode.step("fail"),
            await episode.step("echo", {"text": "on"}),
        ]

    assert [result.ok for result in results] == [False, False, False, True]
    raised = "tool_error" if target.name in OFFICIAL else "tool_failed"
    assert [result.reason for result in results] == ["not_found", "input_validation", raised, ""]
    assert results[2].text.removeprefix("RuntimeError: ") == "the first line\nthe second line"
    assert episode.reward is None


@on(*OFFICIAL, *ONE_GATEWAY)
@pytest.mark.parametrize("size", [4_096, 100_000])
async def test_a_long_result_arrives_whole(target: Target, client: AsyncGateway, size: int) -> None:
    async with await client.open("probe", task={}) as episode:
        digits = await episode.step("big", {"n": size})
        image = await episode.step("image")

    assert digits.text == ("0123456789" * size)[:size]
    assert isinstance(image.blocks[0], Image)
    assert image.blocks[0].content.startswith(b"\x89PNG")
    assert image.text == "[image]"


@on(*ONE_GATEWAY)
async def test_a_task_may_be_named_by_its_id(target: Target, client: AsyncGateway) -> None:
    async with await client.open("probe", task="probe-4") as episode:
        assert episode.prompt == (Text("The last one."),)


@on(*ONE_GATEWAY)
async def test_secrets_seed_and_config_reach_the_environment(target: Target, client: AsyncGateway) -> None:
    async with await client.open("probe", task={}, secrets={"TOKEN": "s3cret"}) as episode:
        secret = await episode.step("secret", {"name": "TOKEN"})
    async with await client.open("judge", task={}, seed=7, config={"size": 4}) as episode:
        given = await episode.step("given")

    assert secret.text == "s3cret"
    assert given.text == '{"config": {"size": 4}, "seed": 7}'
    assert "s3cret" not in target.log()


def test_the_blocking_client_plays_math(math: Gateway) -> None:
    with math.open("math", split="train", index=0) as episode:
        result = episode.step("submit", {"answer": "40"})
        assert math.tools("math") == episode.tools

    assert (result.reward, result.finished, episode.reward) == (1.0, True, 1.0)
    assert episode.is_closed


def test_the_blocking_client_lists_tasks_without_their_answers(math: Gateway) -> None:
    tasks = math.tasks("math", "train", stop=600)

    assert [task.index for task in tasks] == list(range(600))
    assert not any("answer" in task.spec for task in tasks)


def test_a_forked_process_does_not_use_the_connections_of_its_parent(math: Gateway) -> None:
    with math.open("math", split="train", index=0) as episode:
        before = math.http._client
        math.http._pid -= 1  # as in a fork
        result = episode.step("submit", {"answer": "40"})
        after = math.http._client
        before.close()

    assert result.reward == 1.0
    assert before is not after


def test_threads_share_a_blocking_client(math: Gateway) -> None:
    rewards: list[float | None] = []

    def play() -> None:
        with math.open("math", split="train", index=0) as episode:
            episode.step("submit", {"answer": "40"})
            rewards.append(episode.reward)

    threads = [threading.Thread(target=play) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert rewards == [1.0] * 16


async def test_an_episode_with_pings_outlives_the_idle_time(bundled: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    pings: list[str] = []
    monkeypatch.setattr("env_gateway_client.client.PING_S", 0.02)

    async with AsyncGateway(bundled.url, bundled.key or "", timeouts=QUICK) as client:
        opened = await client.open("math", split="train", index=0, keep_alive=True)
        ping = opened.ping

        async def noted() -> None:
            await ping()
            pings.append(opened.id)

        monkeypatch.setattr(opened, "ping", noted)
        await eventually(lambda: has(pings, 2))
        await opened.close()

    assert PING_S < 100  # sessions expire after 300 s


async def has(pings: list[str], count: int) -> None:
    assert len(pings) >= count


def test_a_blocking_episode_is_pinged_from_a_thread(
    bundled: Target, math: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinged = threading.Event()
    monkeypatch.setattr("env_gateway_client.client.PING_S", 0.02)

    with math.open("math", split="train", index=0, keep_alive=True) as episode:
        ping = episode.ping

        def noted() -> None:
            ping()
            pinged.set()

        monkeypatch.setattr(episode, "ping", noted)
        assert pinged.wait(QUICK.request_s)


@on(*ONE_GATEWAY)
async def test_a_cancelled_opening_leaves_no_session(target: Target, client: AsyncGateway) -> None:
    await (await client.open("probe", task={})).close()  # so that a worker runs

    for turns in range(1, 40, 3):
        opening = asyncio.ensure_future(client.open("probe", task={}))
        for _ in range(turns):
            await asyncio.sleep(0.001)
        opening.cancel()
        found: Any = (await asyncio.gather(opening, return_exceptions=True))[0]
        if not isinstance(found, BaseException):
            await found.close()
    # The fixture asserts that the gateway holds no session.


@on(*ONE_GATEWAY)
async def test_a_cancelled_step_ends_its_episode_without_a_reward(
    target: Target, client: AsyncGateway, folder: Folder
) -> None:
    async with await client.open("probe", task={"folder": folder.inside}) as episode:
        await episode.step("score", {"reward": 1.0})
        step = asyncio.ensure_future(episode.step("hold", {"token": "t"}))
        await eventually(lambda: runs_once(folder, "t"))
        step.cancel()
        await asyncio.wait([step])
        folder.open_gate("t")

        with pytest.raises(GatewayError, match="cancelled"):
            _ = episode.reward
        with pytest.raises(GatewayError, match="cancelled"):
            await episode.step("pid")


async def test_closing_twice_and_closing_a_lost_gateway_raise_nothing(bundled: Target) -> None:
    async with AsyncGateway(bundled.url, bundled.key or "", timeouts=Timeouts(close_s=0.2, reconnect_s=0.2)) as client:
        episode = await client.open("math", split="train", index=0)
        await episode.close()
        await episode.close()

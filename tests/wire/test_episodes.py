"""An episode from its opening to its end, played by the official clients."""

import asyncio
import base64

import httpx
import ors.client
import pytest
from openreward import OpenReward

from tests.wire.raw import episode
from tests.wire.sdks import Client, Sdk, names, text
from tests.wire.targets import (
    ALL,
    BOTH_GATEWAYS,
    ENVSERVER,
    OFFICIAL,
    ONE_GATEWAY,
    Folder,
    Target,
    on,
    tasks_of,
    token,
    with_clients,
)

pytestmark = pytest.mark.wire


@with_clients(*OFFICIAL, ENVSERVER, *BOTH_GATEWAYS)
async def test_the_prompt_of_a_task_is_the_same_inline_and_by_reference(client: Client) -> None:
    probe = client.environment("probe")
    task = await probe.get_task("train", 1)

    async with probe.session(task=task) as inline, probe.session(split="train", index=1) as by_reference:
        prompt = await inline.get_prompt()
        assert await by_reference.get_prompt() == prompt

    said, shown = prompt
    assert said.text == list(tasks_of("probe", "train"))[1]["question"]
    assert shown.mimeType == "image/png"
    assert base64.b64decode(shown.data).startswith(b"\x89PNG")


@with_clients(*OFFICIAL, ENVSERVER, *BOTH_GATEWAYS)
async def test_a_task_outside_all_splits_is_played_as_the_trainer_sends_it(client: Client, sdk: Sdk) -> None:
    task = sdk.task("probe", {"question": "Größe? 你好 🙂", "nested": {"deep": [1, None, {"x": 2.5}]}})

    async with client.environment("probe").session(task=task) as session:
        prompt = await session.get_prompt()

    assert [block.text for block in prompt] == ["Größe? 你好 🙂"]


@with_clients(*OFFICIAL, *BOTH_GATEWAYS)
async def test_each_session_has_its_own_state(client: Client, sdk: Sdk) -> None:
    counter = client.environment("counter")

    async with (
        counter.session(task=sdk.task("counter", {"start": 1})) as one,
        counter.session(task=sdk.task("counter", {"start": 50})) as other,
    ):
        assert text(await one.call_tool("add", {"n": 2})) == "3"
        assert text(await other.call_tool("add", {"n": 2})) == "52"
        assert text(await one.call_tool("add", {"n": 2})) == "5"
        last = await other.call_tool("stop")

    assert (last.reward, last.finished) == (5.2, True)


@with_clients(*ALL)
async def test_a_second_environment_is_reached_by_task(client: Client) -> None:
    counter = client.environment("counter")
    task = await counter.get_task("train", 2)

    async with counter.session(task=task) as session:
        prompt = await session.get_prompt()

    assert [block.text for block in prompt] == ["The counter stands at 2."]


@with_clients("openreward-server", *ONE_GATEWAY)
async def test_a_second_environment_is_reached_by_split_and_index(client: Client) -> None:
    # One of the clients does not name the environment in this case: the gateway takes it from the first request's path.
    async with client.environment("counter").session(split="train", index=2) as session:
        prompt = await session.get_prompt()
        total = await session.call_tool("add", {"n": 1})

    assert [block.text for block in prompt] == ["The counter stands at 2."]
    assert text(total) == "3"


@with_clients(*ALL)
async def test_a_tasks_own_tools_are_listed_after_the_shared_ones_and_run(client: Client, sdk: Sdk) -> None:
    probe = client.environment("probe")
    shared = names(await probe.list_tools())

    async with probe.session(task=sdk.task("probe", {"tools": ["hint"]})) as session:
        tools = await session.list_tools()
        hint = await session.call_tool("hint")

    assert names(tools) == [*shared, "hint"]
    assert text(hint) == "look closer"


@with_clients(*ALL)
async def test_a_task_without_tools_of_its_own_lists_the_shared_ones(client: Client, sdk: Sdk) -> None:
    probe = client.environment("probe")

    async with probe.session(task=sdk.task("probe", {})) as session:
        assert await session.list_tools() == await probe.list_tools()


@with_clients(*OFFICIAL, *ONE_GATEWAY)
async def test_a_missing_reward_is_distinct_from_a_reward_of_zero(client: Client, sdk: Sdk) -> None:
    async with client.environment("probe").session(task=sdk.task("probe", {})) as session:
        rewards = [(await session.call_tool("score", {"reward": reward})).reward for reward in (0.0, None, -1.5, 1)]

    assert rewards == [0.0, None, -1.5, 1.0]


@with_clients(*OFFICIAL, *ONE_GATEWAY)
async def test_images_and_details_and_metadata_reach_the_client(client: Client, sdk: Sdk) -> None:
    async with client.environment("probe").session(task=sdk.task("probe", {})) as session:
        shown = await session.call_tool("image")
        noted = await session.call_tool("note", {"ignored": "a tool without arguments takes anything"})

    (image,) = shown.blocks
    assert (image.type, image.mimeType, image.detail) == ("image", "image/png", {"pixels": 1})
    assert base64.b64decode(image.data).startswith(b"\x89PNG")
    assert noted.blocks[0].detail == {"k": 1}
    assert noted.metadata == {"depth": {"n": [1, 2.5, None, "é"]}}


@with_clients("openreward-server", *ONE_GATEWAY)
async def test_no_call_runs_after_the_episode_has_finished(client: Client, sdk: Sdk, folder: Folder) -> None:
    word = token()

    async with client.environment("probe").session(task=sdk.task("probe", {"folder": folder.inside})) as session:
        last = await session.call_tool("finish", {"reward": 0.5})
        with pytest.raises(sdk.refused, match="'count' was not run: the episode has finished"):
            await session.call_tool("count", {"token": word})
        await session.get_prompt()

    assert (last.reward, last.finished) == (0.5, True)
    assert folder.runs(word) == 0


@with_clients(*OFFICIAL, ENVSERVER, *BOTH_GATEWAYS)
async def test_a_deleted_session_is_not_found(client: Client, sdk: Sdk, http: httpx.AsyncClient) -> None:
    async with client.environment("probe").session(task=sdk.task("probe", {})) as session:
        sid = session.sid
        await session.call_tool("pid")

    for method, path in (("GET", "/probe/prompt"), ("POST", "/ping"), ("GET", "/probe/task_tools")):
        response = await http.request(method, path, headers={"X-Session-ID": sid})
        assert response.status_code == 404, path
        assert response.text == '{"detail":"Active environment not found"}'
    call = await http.post("/probe/call", headers={"X-Session-ID": sid}, json={"name": "pid", "input": {}})
    assert call.status_code == 404


@on(*OFFICIAL, ENVSERVER, *BOTH_GATEWAYS)
async def test_a_session_id_can_be_used_again_after_its_deletion(http: httpx.AsyncClient) -> None:
    sid = token()

    async with episode(http, {"question": "first"}, sid=sid):
        pass
    async with episode(http, {"question": "second"}, sid=sid) as again:
        prompt = (await again.get("prompt")).json()

    assert prompt[0]["text"] == "second"


@with_clients(*OFFICIAL, *BOTH_GATEWAYS)
async def test_many_concurrent_episodes_do_not_mix(client: Client, sdk: Sdk) -> None:
    counter = client.environment("counter")

    async def play(start: int) -> float | None:
        async with counter.session(task=sdk.task("counter", {"start": start})) as session:
            for _ in range(3):
                await session.call_tool("add", {"n": 1})
            return (await session.call_tool("stop")).reward

    rewards = await asyncio.gather(*(play(10 * n) for n in range(12)))

    assert rewards == [(10 * n + 3) / 10 for n in range(12)]


@on("openreward-server", *ONE_GATEWAY)
async def test_the_messages_hold_the_prompt_as_one_user_turn(http: httpx.AsyncClient) -> None:
    async with episode(http, {"question": "Who?"}) as opened:
        prompt = (await opened.get("prompt")).json()
        messages = (await opened.get("messages")).json()

    assert messages == [{"role": "user", "blocks": prompt, "detail": None}]
    assert list(prompt[0]) == ["text", "detail", "type"]


@on("openreward-server", *ONE_GATEWAY)
async def test_an_environment_without_score_group_refuses_to_score_a_group(http: httpx.AsyncClient) -> None:
    async with episode(http) as opened:
        response = await opened.post("/probe/score_group", {"candidates": []})

    assert response.status_code == 404
    assert response.json() == {"detail": "Environment 'probe' does not implement score_group"}


@on("ors-server", *BOTH_GATEWAYS)
def test_the_blocking_client_of_ors_plays_an_episode(target: Target) -> None:
    with ors.client.ORS(base_url=target.url, api_key=target.key) as client:
        counter = client.environment("counter")
        with counter.session(task=counter.get_task("test", 0)) as session:
            assert names(session.list_tools()) == ["add", "stop"]
            session.call_tool("add", {"n": 23})
            last = session.call_tool("stop")

    assert (last.reward, last.finished) == (12.3, True)


@on("openreward-server", *BOTH_GATEWAYS)
def test_the_blocking_client_of_openreward_plays_an_episode(target: Target) -> None:
    client = OpenReward(api_key=target.key)
    try:
        counter = client.environments.get("counter", variant="counter", base_url=target.url)
        with counter.session(task=counter.get_task("test", 0)) as session:
            assert names(session.list_tools()) == ["add", "stop"]
            assert set(session.version()) == {"version", "build_sha"}
            session.call_tool("add", {"n": 23})
            last = session.call_tool("stop")
    finally:
        client.environments.close()

    assert (last.reward, last.finished) == (12.3, True)

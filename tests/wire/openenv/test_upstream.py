"""The gateway's OpenEnv upstream plays successful episodes on official servers of several releases."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from gateway.core.environment import ActionMapping, ResetMapping, Server, Split, SplitType
from gateway.core.episode import Action, StepResult, TextBlock
from gateway.core.errors import InvalidRequest, UnknownSplit, UpstreamError, WorkerFull
from tests.wire.openenv.clients import NEWEST
from tests.wire.openenv.upstream_worlds import OLDER, OLDEST, RELEASES, Image, alone, environment, image

pytestmark = [pytest.mark.wire]

INC = Action(fields={"op": "inc"})


@pytest.fixture(scope="module", params=RELEASES)
def counter(request: pytest.FixtureRequest) -> Iterator[Image]:
    """The counter on each release, on a Unix socket as in a container."""
    with image("counter", version=request.param, capacity=8, on_socket=True) as started:
        yield started


@pytest.fixture(scope="module")
def newest() -> Iterator[Image]:
    """The counter on the newest release, over TCP."""
    with image("counter", capacity=8) as started:
        yield started


@pytest.fixture(scope="module", params=[OLDER, NEWEST])
def riddle(request: pytest.FixtureRequest) -> Iterator[Image]:
    """The environment with tools. The oldest release does not support tools."""
    with image("riddle", version=request.param, capacity=8) as started:
        yield started


# -- episodes ---------------------------------------------------------------------------------------------------------


async def test_an_episode_is_played_from_its_reset_to_its_summary(counter: Image) -> None:
    where = environment()
    async with alone() as replica:
        upstream = replica.upstream
        assert await upstream.ready(counter.as_worker(), where) == 0
        session = await replica.opened(counter.session(), where, seed=1, episode="e-1")

        prompt = await upstream.prompt(session, where)
        results = [await upstream.act(session, where, INC) for _ in range(4)]
        state = json.loads(await upstream.pass_frame(session, where, b'{"type":"state"}'))
        steps = await upstream.steps(session, where)
        summary = await upstream.close(session, where)

    assert [block.text for block in prompt if isinstance(block, TextBlock)] == ["Count to 4.\n\nvalue: 0\ntarget: 4"]
    assert [(result.reward, result.finished) for result in results] == [(0.0, False)] * 3 + [(1.0, True)]
    assert results[0].data == {"value": 1, "target": 4, "text": "value=1"}
    assert results[0].blocks == (TextBlock("value=1\n\nvalue: 1\ntarget: 4"),)
    assert (state["data"]["episode_id"], state["data"]["step_count"], steps) == ("e-1", 4, 4)
    assert summary is not None
    assert (summary.reward, summary.finished, summary.steps) == (1.0, True, 4)
    assert counter.never_used_stateless_routes()


async def test_frames_are_relayed_byte_for_byte_and_counted(counter: Image) -> None:
    where = environment()
    async with alone() as replica:
        session = await replica.opened(counter.session(), where, seed=0)

        first = await replica.upstream.pass_frame(session, where, b"")
        reply = await replica.upstream.pass_frame(session, where, b'{"type":"step",  "data":{"op":"inc","by":3}}')
        refused = await replica.upstream.pass_frame(session, where, b'{"type":"step","data":{"op":"fly"}}')
        summary = await replica.upstream.close(session, where)

    assert json.loads(first)["data"]["observation"]["text"] == "Count to 3."
    assert reply.startswith(b'{"type":"observation","data":{"observation":{')
    assert json.loads(reply)["data"]["reward"] == 1.0
    assert json.loads(refused)["data"]["code"] == "VALIDATION_ERROR"
    assert summary is not None
    assert (summary.reward, summary.finished, summary.steps) == (1.0, True, 1)


@pytest.mark.parametrize("frame", [b'{"type":"close"}', b'{"type":"reset","data":{}}', b"[]", b"nothing", b'{"a":1}'])
async def test_frames_that_reset_or_close_or_are_malformed_are_not_relayed(newest: Image, frame: bytes) -> None:
    where = environment()
    async with alone() as replica:
        session = await replica.opened(newest.session(), where)

        with pytest.raises(InvalidRequest):
            await replica.upstream.pass_frame(session, where, frame)
        assert (await replica.upstream.act(session, where, INC)).error is None
        await replica.upstream.close(session, where)


async def test_a_refused_or_failed_action_is_a_result_and_the_episode_goes_on(counter: Image) -> None:
    where = environment()
    async with alone() as replica:
        session = await replica.opened(counter.session(), where)

        malformed = await replica.upstream.act(session, where, Action(fields={"op": "fly"}))
        raised = await replica.upstream.act(session, where, Action(fields={"op": "raise"}))
        unknown = await replica.upstream.act(session, where, Action(name="fly"))
        good = await replica.upstream.act(session, where, Action(name="step", arguments={"op": "inc"}))
        await replica.upstream.close(session, where)

    assert malformed.reason == "input_validation"
    assert "op: Input should be" in (malformed.error or "")
    assert (raised.error, raised.reason) == ("boom from env", "tool_error")
    assert unknown.reason == "not_found"
    assert good.data["value"] == 1


async def test_the_text_of_an_action_fills_the_configured_text_field(newest: Image) -> None:
    where = environment(actions=ActionMapping(default_tool="play", text_field="op"))
    async with alone() as replica:
        session = await replica.opened(newest.session(), where)

        by_text = await replica.upstream.act(session, where, Action(text="inc"))
        by_name = await replica.upstream.act(session, where, Action(name="play", arguments={"op": "inc"}))
        await replica.upstream.close(session, where)

    assert (by_text.data["value"], by_name.data["value"]) == (1, 2)


async def test_tools_are_called_by_steps_so_that_their_rewards_count(riddle: Image) -> None:
    where = environment(resets=ResetMapping())
    async with alone() as replica:
        upstream = replica.upstream
        listed = json.loads(await upstream.tools(riddle.as_worker(), where))["tools"]
        session = await replica.opened(riddle.session(), where, seed=1)

        async def call(name: str, **arguments: str) -> StepResult:
            return await upstream.act(session, where, Action(name=name, arguments=arguments))

        said = await call("echo_message", message="hi")
        unknown, misspelt, failed = await call("nope"), await call("echo_message", x="1"), await call("fail")
        reserved = await call("reset")
        won = await call("finish", word="candle")
        relayed = b'{"type":"mcp","data":{"jsonrpc":"2.0","method":"tools/list","params":{},"id":7}}'
        over_mcp = json.loads(await upstream.pass_frame(session, where, relayed))
        summary = await upstream.close(session, where)

    assert [tool["name"] for tool in listed] == ["echo_message", "fail", "finish"]
    assert listed[0]["input_schema"]["required"] == ["message"]
    assert said.blocks == (TextBlock("hi"),)
    assert [one.reason for one in (unknown, misspelt, failed, reserved)] == [
        "not_found",
        "input_validation",
        "tool_error",
        "not_found",
    ]
    assert (won.blocks, won.reward, won.finished) == ((TextBlock("right"),), 1.0, True)
    assert len(over_mcp["data"]["result"]["tools"]) == 3
    assert summary is not None
    assert (summary.reward, summary.finished) == (1.0, True)


async def test_the_list_of_tools_passes_whole_with_schemas_of_what_they_return(riddle: Image) -> None:
    request = {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": 7}
    async with alone() as replica:
        about = await replica.upstream.about(riddle.as_worker(), environment(resets=ResetMapping()))
    async with httpx.AsyncClient() as http:
        own = (await http.post(f"{riddle.url}/mcp", json=request)).json()["result"]

    assert about["tools"] == own
    assert [tool["outputSchema"]["properties"]["result"]["type"] for tool in own["tools"]] == ["string"] * 3


async def test_a_gym_image_offers_the_tool_step_whose_input_is_the_action(counter: Image) -> None:
    async with alone() as replica:
        listed = json.loads(await replica.upstream.tools(counter.as_worker(), environment()))["tools"]
        about = await replica.upstream.about(counter.as_worker(), environment())

    assert [tool["name"] for tool in listed] == ["step"]
    assert set(listed[0]["input_schema"]["properties"]) == {"op", "by", "file"}
    assert set(about["schema"]) >= {"action", "observation", "state"}
    assert about["metadata"]["name"] == "Counter"


async def test_a_third_party_server_is_reached_below_its_url_prefix() -> None:
    with image("prefixed", capacity=1) as started:
        address = f"{started.url}/at/a/prefix"
        where = environment(url=address, learns=True)
        async with alone() as replica:
            worker = replace(started.as_worker(), address=address)
            assert await replica.upstream.ready(worker, where) == 1
            assert await replica.upstream.count(worker, where, "test") == 5
            session = await replica.opened(started.session(address=address), where)
            assert (await replica.upstream.act(session, where, INC)).data["value"] == 1
            assert await replica.upstream.close(session, where) is not None


# -- tasks ------------------------------------------------------------------------------------------------------------


async def test_an_images_own_splits_are_listed_and_their_tasks_played_by_index(newest: Image) -> None:
    where, worker = environment(), newest.as_worker()
    async with alone() as replica:
        upstream = replica.upstream
        splits = await upstream.splits(worker, where)
        count = await upstream.count(worker, where, "test")
        tasks = await upstream.tasks(worker, where, "test", 1, 3)
        with pytest.raises(UnknownSplit):
            await upstream.count(worker, where, "nope")
        session = await replica.opened(newest.session(), where, spec=tasks[1], split="test", index=2, seed=99)
        prompt = await upstream.prompt(session, where)
        await upstream.close(session, where)

    assert splits == [Split("train", SplitType.TRAIN), Split("test", SplitType.TEST)]
    assert count == 5
    assert tasks == [{"id": "test-1", "target": 3}, {"id": "test-2", "target": 4}]
    assert isinstance(prompt[0], TextBlock)
    assert prompt[0].text == "Count to 4.\n\nvalue: 0\ntarget: 4"


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
async def test_an_image_without_tasks_has_one_task_for_each_seed(version: str) -> None:
    where = environment(resets=ResetMapping(seeds=7))
    with image("plain", version=version) as started:
        worker = started.as_worker()
        async with alone() as replica:
            upstream = replica.upstream
            splits = await upstream.splits(worker, where)
            count = await upstream.count(worker, where, "train")
            tasks = await upstream.tasks(worker, where, "train", 5, 9)
            single = replace(where, resets=ResetMapping(keys=()))
            only = await upstream.count(worker, single, "train"), await upstream.tasks(worker, single, "train", 0, 9)
            session = await replica.opened(started.session(), where, spec=tasks[0], split="train", index=5, seed=3)
            prompt = await upstream.prompt(session, where)
            await upstream.close(session, where)

    assert splits == [Split("train", SplitType.TRAIN)]
    assert (count, tasks, only) == (7, [{"seed": 5}, {"seed": 6}], (1, [{}]))
    assert isinstance(prompt[0], TextBlock)
    assert prompt[0].text == "Count to 3.\n\nvalue: 0\ntarget: 3"  # seed 5


async def test_a_task_with_a_key_that_no_reset_maps_is_refused(newest: Image) -> None:
    where = environment(resets=ResetMapping())
    async with alone() as replica:
        with pytest.raises(InvalidRequest, match=r"environment_config.page.*\[resets\]"):
            await replica.opened(newest.session(), where, spec={"environment_config": {"page": "x"}})


# -- capacity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("capacity", [1, 5])
async def test_the_capacity_is_learned_and_leaves_all_slots_free(version: str, capacity: int) -> None:
    where = environment(learns=True)
    with image("counter", version=version, capacity=capacity, on_socket=True) as started:
        async with alone() as replica:
            upstream = replica.upstream
            assert await upstream.ready(started.as_worker(), where) == capacity
            # All sessions open concurrently, up to the capacity: no trial socket is left.
            sessions = await asyncio.gather(*(replica.opened(started.session(), where) for _ in range(capacity)))
            with pytest.raises(WorkerFull) as full:
                await replica.opened(started.session(), where)
            await upstream.alive(started.as_worker(), where)  # the worker counts as alive although it is full
            assert await upstream.ready(started.as_worker(), where) == capacity
            for session in sessions:
                await upstream.close(session, where)

    assert full.value.capacity == capacity


@pytest.mark.parametrize("version", RELEASES)
async def test_the_only_slot_is_free_as_soon_as_its_session_is_closed(version: str) -> None:
    where = environment()
    with image("counter", version=version, capacity=1) as started:
        async with alone() as replica:
            for seed in range(20):
                session = await replica.opened(started.session(), where, seed=seed)
                assert (await replica.upstream.act(session, where, INC)).data["value"] == 1
                assert await replica.upstream.close(session, where) is not None


async def test_an_opening_waits_briefly_for_a_slot_that_is_being_released() -> None:
    where = environment()
    with image("counter", capacity=1) as started:
        async with alone() as replica:
            first = await replica.opened(started.session(), where)
            opening = asyncio.ensure_future(replica.opened(started.session(), where))
            await asyncio.sleep(0)
            await replica.upstream.close(first, where)

            second = await opening
            assert (await replica.upstream.act(second, where, INC)).data["value"] == 1
            await replica.upstream.close(second, where)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
async def test_the_readiness_check_reports_an_environment_that_cannot_be_created(version: str) -> None:
    with image("broken", version=version) as started:
        async with alone() as replica:
            with pytest.raises(UpstreamError, match=r"can't make an environment.*Broken"):
                await replica.upstream.ready(started.as_worker(), environment())


async def test_the_readiness_check_waits_for_a_server_that_does_not_listen_yet(newest: Image) -> None:
    where = environment()
    late = replace(newest.as_worker(), address="tcp:127.0.0.1:1")
    async with alone() as replica:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await replica.upstream.ready(late, where)
        # With a readiness path: the worker is ready only once that path exists.
        asked = replace(where, server=Server(port=8000, ready="/is-loaded"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await replica.upstream.ready(newest.as_worker(), asked)
        asked = replace(where, server=Server(port=8000, ready="/schema"))
        assert await replica.upstream.ready(newest.as_worker(), asked) == 0

"""OpenEnv's socket: every request gets exactly one reply, and the socket outlives failures of its episodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.tasks.task_ref import name_of
from tests.fakes.eventually import until
from tests.service.openenv_world import code, message, world
from tests.service.stack import environment, tasks

TASKS = tasks(train=[{"question": "1+1"}, {"question": "2+2"}])
ONE = {"type": "reset", "data": {"split": "train", "index": 0}}

SESAME = {"X-API-Key": "open-sesame"}


async def test_a_reset_opens_an_episode_steps_count_and_the_next_reset_starts_a_new_episode() -> None:
    async with world(tasks=TASKS) as gw, gw.client() as client:
        assert await gw.gateway.used() == 0, "nothing is opened at connect"
        assert (await client.ask("state"))["data"] == {"episode_id": None, "step_count": 0}

        first = await client.reset(split="train", index=1)

        told = {"task_id": name_of({"question": "2+2"}).label, "split": "train", "index": 1}
        observation = {"text": "2+2", "metadata": told}
        assert first == {"observation": observation, "reward": None, "done": False, "metadata": told}
        for _ in range(3):
            assert (await client.step())["data"] == {
                "observation": {"text": "null", "metadata": {}},
                "reward": None,
                "done": False,
            }
        assert (await client.ask("state"))["data"]["step_count"] == 3
        await client.reset(episode_id="e1", index=0)
        assert (await client.ask("state")) == {
            "type": "state",
            "data": {"episode_id": "e1", "step_count": 0, "task_id": name_of({"question": "1+1"}).label},
        }
        assert await gw.gateway.used() == 1


async def test_a_state_contains_the_environments_own_fields() -> None:
    task = {"id": "inline", "instruction": "Add.", "config": {"state": {"goal": "4", "step_count": 9}}}
    async with world(tasks=TASKS) as gw, gw.client() as client:
        await client.reset(task=task, episode_id="e1")

        state = (await client.ask("state"))["data"]

    assert state == {"goal": "4", "episode_id": "e1", "step_count": 0, "task_id": "inline"}


async def test_clients_have_episodes_of_their_own() -> None:
    async with world() as gw, gw.client() as one, gw.client() as other:
        await one.reset(episode_id="one")
        await other.reset(episode_id="other")

        for _ in range(3):
            await one.step()
        await other.step()

        states = [(await client.ask("state"))["data"] for client in (one, other)]
        assert [(state["episode_id"], state["step_count"]) for state in states] == [("one", 3), ("other", 1)]


async def test_a_finished_episode_has_its_reward_and_stays_until_it_is_reset() -> None:
    async with world() as gw, gw.client() as client:
        await client.reset()

        last = await client.step("submit")

        assert (last["data"]["reward"], last["data"]["done"]) == (1.0, True)
        assert (await client.ask("state"))["data"]["step_count"] == 1
        assert code(await client.step("over")) == "EXECUTION_ERROR"
        assert await gw.gateway.used() == 1


async def test_frames_sent_ahead_are_answered_one_by_one_in_order() -> None:
    async with world() as gw, gw.client() as client:
        await client.reset()

        frames = [{"type": "step", "data": {"tool": "go_on"}}, {"type": "state"}, {"type": "frobnicate"}] * 20
        for frame in frames:
            await client.connection.send(json.dumps(frame))

        assert [(await client.hear())["type"] for _ in frames] == ["observation", "state", "error"] * 20


async def test_frames_sent_ahead_during_a_long_step_wait_for_it() -> None:
    async with world() as gw, gw.client() as client:
        await client.reset()
        worker = gw.stack.backend.only
        for frame in ({"type": "step", "data": {"tool": "quiet"}}, *[{"type": "state"}] * 30):
            await client.connection.send(json.dumps(frame))
        await until(lambda: worker.waiting)
        await until(lambda: len(gw.stack.backend.only.requests) > 2)

        worker.gate.set()

        assert [(await client.hear())["type"] for _ in range(31)] == ["observation"] + ["state"] * 30


# -- invalid frames --------------------------------------------------------------------------------------------------

EXTRA = {
    "type": "extra_forbidden",
    "loc": ["id"],
    "msg": "Extra inputs are not permitted",
    "input": 9,
}


@pytest.mark.parametrize(
    ("frame", "told", "entry"),
    [
        pytest.param("{x", "INVALID_JSON: Invalid JSON: Expecting property name enclosed in double quotes", None),
        pytest.param('{"type":"step","data":{"x":NaN}}', "INVALID_JSON: Invalid JSON: NaN is not JSON", None),
        pytest.param('{"type":"frobnicate"}', "UNKNOWN_TYPE: Unknown message type: frobnicate", None),
        pytest.param("{}", "UNKNOWN_TYPE: Unknown message type: ", None),
        pytest.param('{"type":["step"]}', "UNKNOWN_TYPE: Unknown message type: ['step']", None),
        pytest.param('{"type":"state","id":9}', "VALIDATION_ERROR: Invalid message", EXTRA),
        pytest.param('{"type":"reset","data":{},"id":9}', "VALIDATION_ERROR: Invalid message", EXTRA),
        pytest.param(
            '{"type":"reset","data":null}',
            "VALIDATION_ERROR: Invalid message",
            {"type": "dict_type", "loc": ["data"], "msg": "Input should be a valid dictionary", "input": None},
        ),
        pytest.param(
            '{"type":"step"}',
            "VALIDATION_ERROR: Invalid message",
            {"type": "missing", "loc": ["data"], "msg": "Field required", "input": {"type": "step"}},
        ),
        pytest.param(
            '{"type":"close","data":{}}',
            "VALIDATION_ERROR: Invalid message",
            {"type": "extra_forbidden", "loc": ["data"], "msg": "Extra inputs are not permitted", "input": {}},
        ),
        pytest.param(
            '{"type":"step","data":{"type":"call_tool"}}',
            "VALIDATION_ERROR: Invalid message: tool_name: Field required",
            {"type": "missing", "loc": ["tool_name"], "msg": "Field required", "input": {"type": "call_tool"}},
        ),
    ],
)
async def test_an_invalid_frame_is_refused_and_the_episode_goes_on(
    frame: str, told: str, entry: dict[str, Any] | None
) -> None:
    async with world() as gw, gw.client() as client:
        await client.reset()

        reply = await client.say(frame)

        assert f"{code(reply)}: {message(reply)}".startswith(told)
        if entry is not None:
            [found] = reply["data"]["errors"]
            assert found.pop("url").startswith("https://errors.pydantic.dev/")
            assert found == entry
        assert (await client.step())["type"] == "observation"


@pytest.mark.parametrize(
    ("frame", "told"),
    [
        pytest.param("[1]", "'list' object has no attribute 'get'", id="an array"),
        pytest.param('"step"', "'str' object has no attribute 'get'", id="a string"),
        pytest.param(b'{"type":"state"}', "'text'", id="a binary frame"),
    ],
)
async def test_a_frame_that_is_no_message_ends_the_socket_and_its_episode(frame: str | bytes, told: str) -> None:
    async with world() as gw, gw.client() as client:
        await client.reset()

        reply = await client.say(frame)

        assert (code(reply), message(reply)) == ("SESSION_ERROR", told)
        assert await client.closed() == 1000
        await gw.gateway.eventually_used(0)


async def test_an_action_that_is_refused_leaves_the_episode_as_it_is() -> None:
    async with world() as gw, gw.client() as client:
        await client.reset()

        reply = await client.step("refuse")

        assert code(reply) == "VALIDATION_ERROR"
        assert message(reply) == "Invalid action: that is not an action"
        assert reply["data"]["errors"][0]["loc"] == ["data"]
        assert (await client.step())["type"] == "observation"


async def test_a_large_action_passes_and_an_action_beyond_the_limit_closes_with_1009() -> None:
    async with world() as gw, gw.client() as client:
        await client.reset()

        passed = await client.step("go_on", payload="x" * (15 * 2**20))

        assert passed["type"] == "observation"
        with contextlib.suppress(ConnectionClosed):  # the server closes before the whole frame is sent
            await client.connection.send(json.dumps({"type": "step", "data": {"x": "x" * (17 * 2**20)}}))
        assert await client.closed() == 1009
        await gw.gateway.eventually_used(0)


# -- tools -----------------------------------------------------------------------------------------------------------


async def test_tools_are_listed_without_an_episode_and_called_in_one() -> None:
    async with world() as gw, gw.client() as client:
        listed = await client.ask("step", {"type": "list_tools"})
        await client.reset()
        called = await client.ask("step", {"type": "call_tool", "tool_name": "go_on", "arguments": {"x": 1}})

        tool = {"name": "echo", "description": "", "input_schema": {"type": "object", "properties": {}}}
        assert listed["data"]["observation"] == {"metadata": {}, "tools": [tool]}
        text = {"type": "text", "text": '{"x": 1}', "annotations": None, "meta": None}
        assert called["data"] == {
            "observation": {
                "metadata": {},
                "tool_name": "go_on",
                "result": {
                    "content": [text],
                    "structured_content": {"result": '{"x": 1}'},
                    "meta": None,
                    "data": '{"x": 1}',
                    "is_error": False,
                },
                "error": None,
            },
            "reward": None,
            "done": False,
        }


@pytest.mark.parametrize("tool", ["reset", "step", "state", "close"])
async def test_no_action_can_call_the_operations_that_run_the_episode(tool: str) -> None:
    async with world() as gw, gw.client() as client:
        await client.reset()

        called = await client.ask("step", {"type": "call_tool", "tool_name": tool})

        error = {"error_type": "tool_not_found", "message": f"Unknown tool: {tool!r}"}
        assert called["data"]["observation"]["error"] == error
        assert not gw.stack.backend.only.ran, "the worker never heard of it"


async def test_a_tool_that_refuses_its_arguments_is_an_observation() -> None:
    async with world() as gw, gw.client() as client:
        await client.reset()

        called = await client.ask("step", {"type": "call_tool", "tool_name": "refuse"})

        error = {"error_type": "invalid_args", "message": "that is not an action"}
        assert called["data"]["observation"]["error"] == error


# -- the end of a socket ---------------------------------------------------------------------------------------------


async def test_close_has_no_reply_and_releases_the_slot() -> None:
    async with world() as gw, gw.client() as client:
        await client.reset()

        await client.connection.send('{"type":"close"}')

        assert await client.closed() == 1000
        await gw.gateway.eventually_used(0)


@pytest.mark.parametrize("tool", ["", "quiet"], ids=["between two steps", "in mid-step"])
async def test_a_client_that_vanishes_releases_its_slot(tool: str) -> None:
    async with world() as gw, gw.client() as client:
        await client.reset()
        if tool:
            await client.connection.send(json.dumps({"type": "step", "data": {"tool": tool}}))
            await until(lambda: gw.stack.backend.only.waiting)

        client.vanish()

        await gw.gateway.eventually_used(0)
        assert not gw.stack.backend.only.sessions


async def test_a_client_that_sent_ahead_and_vanishes_in_mid_step_releases_its_slot() -> None:
    async with world() as gw, gw.client() as client:
        await client.reset()
        for frame in ({"type": "step", "data": {"tool": "quiet"}}, {"type": "state"}, {"type": "state"}):
            await client.connection.send(json.dumps(frame))
        await until(lambda: gw.stack.backend.only.waiting)

        client.vanish()

        await gw.gateway.eventually_used(0)


async def test_a_client_that_vanishes_while_it_waits_for_a_slot_leaves_the_queue() -> None:
    async with world(environment(slots=1, max_workers=1)) as gw, gw.client() as holder, gw.client() as waiter:
        await holder.reset()
        await waiter.connection.send(json.dumps({"type": "reset"}))
        await gw.gateway.eventually_waiting(1)

        waiter.vanish()

        await gw.gateway.eventually_waiting(0)
        assert await gw.gateway.used() == 1


async def test_a_client_that_vanishes_while_its_task_is_set_up_releases_its_slot() -> None:
    slow = tasks(train=[{"question": "1", "on_create": "gate"}])
    async with world(tasks=slow) as gw, gw.client() as client:
        await client.connection.send(json.dumps({"type": "reset"}))
        await until(lambda: gw.stack.backend.workers and gw.stack.backend.only.waiting)

        client.vanish()

        await gw.gateway.eventually_used(0)


async def test_many_clients_that_vanish_leave_nothing() -> None:
    async with world(environment(slots=8, max_workers=1)) as gw:

        async def one(number: int) -> None:
            async with gw.client() as client:
                await client.connection.send(json.dumps(ONE))
                if number % 3:
                    await client.hear()
                if number % 3 == 2:
                    await client.connection.send(json.dumps({"type": "step", "data": {"tool": "quiet"}}))
                client.vanish()

        for _ in range(5):
            await asyncio.gather(*map(one, range(24)))

        await gw.gateway.eventually_waiting(0)
        await gw.gateway.eventually_used(0)
        assert not gw.stack.backend.only.sessions


async def test_sockets_close_with_1001_when_the_server_stops() -> None:
    async with world() as gw, gw.client() as client:
        await client.reset()

        gw.stop()

        assert await client.closed() == 1001


# -- keys and paths --------------------------------------------------------------------------------------------------


async def test_keys_come_in_a_header_or_in_the_path_and_a_wrong_key_is_refused_before_the_upgrade() -> None:
    async with world(trainers={"lab": "open-sesame"}) as gw:
        async with gw.client(additional_headers={"Authorization": "Bearer open-sesame"}) as client:
            await client.reset()
        async with gw.client(under="/k/open-sesame") as client:
            await client.reset()
        with pytest.raises(InvalidStatus) as refused:
            async with gw.client(additional_headers={"X-API-Key": "wrong"}):
                raise AssertionError("it was let in")

        assert refused.value.response.status_code == 401


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("math/nothing", "Not Found: sockets are at /openenv/{environment}/ws"),
        ("nowhere/ws", "unknown environment 'nowhere'; there are math"),
        ("ws", "unknown environment 'ws'; there are math"),
    ],
)
async def test_a_socket_at_any_other_path_is_404(path: str, told: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway")
    async with world() as gw:
        name, _, rest = path.partition("/")
        with pytest.raises(InvalidStatus) as refused:
            async with gw.client(name, rest):
                raise AssertionError("it was let in")

        assert refused.value.response.status_code == 404
        assert json.loads(refused.value.response.body)["detail"].startswith(told)
        (line,) = [one.getMessage() for one in caplog.records if one.getMessage().startswith("openenv_not_found")]
        assert f"path='/openenv/{name}/{rest}'" in line
        assert told in line


@pytest.mark.parametrize("path", ["/ws", "/math/ws", "/k/open-sesame/ws"])
async def test_a_socket_without_the_prefix_says_where_sockets_are_and_is_no_error_of_the_gateway(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway")
    async with world(trainers={"lab": "open-sesame"}) as gw:
        with pytest.raises(InvalidStatus) as refused:
            async with connect(gw.base.replace("http", "ws") + path, proxy=None, additional_headers=SESAME):
                raise AssertionError("it was let in")
        with pytest.raises(InvalidStatus) as keyless:
            async with connect(gw.base.replace("http", "ws") + "/openenv/math/ws", proxy=None):
                raise AssertionError("it was let in")

    assert (refused.value.response.status_code, keyless.value.response.status_code) == (404, 401)
    assert "/openenv/ENVIRONMENT/ws" in json.loads(refused.value.response.body)["detail"]
    (line,) = [one.getMessage() for one in caplog.records if one.getMessage().startswith("websocket_not_found")]
    assert "open-sesame" not in line
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR] == []


async def test_an_episode_goes_on_after_any_error() -> None:
    async with world() as gw, gw.client() as client:
        await client.reset()
        for wrong in ("{", '{"type":"step"}', '{"type":"reset","data":{"seed":"x"}}', '{"type":"close","data":1}'):
            assert code(await client.say(wrong)) in ("INVALID_JSON", "VALIDATION_ERROR")

        assert (await client.step())["type"] == "observation"
        assert (await client.ask("state"))["data"]["step_count"] == 1

"""A third-party OpenEnv image behind the OpenEnv frontend: relayed frames, and the gateway's own replies."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.environment import OpenEnv, ResetMapping, ServerProtocol
from gateway.core.ids import Owner
from gateway.core.session import CloseReason
from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.fakes.upstreams import CounterImage
from tests.service.foreign_world import TEST, TRAIN, Foreign, foreign, image
from tests.service.openenv_world import Client, code, message

OPENENV = image(ServerProtocol.OPENENV)
PLACES = image(ServerProtocol.OPENENV, resets=ResetMapping(keys=("seed", "split", "index")))


async def raw(client: Client, frame: str) -> str:
    """Send a frame and return its reply as raw text."""
    await client.connection.send(frame)
    async with asyncio.timeout(HANG_S):
        reply = await client.connection.recv()
    assert isinstance(reply, str)
    return reply


async def rpc(world: Foreign, method: str, **params: Any) -> Any:
    """Call ``POST /mcp``."""
    body = {"jsonrpc": "2.0", "method": method, "params": params, "id": "seven"}
    answer = (await world.http.post("/openenv/image/mcp", json=body)).json()
    assert answer["id"] == "seven"
    return answer


async def test_frames_go_through_byte_for_byte_both_ways() -> None:
    sent = [
        '{"type": "step",  "data": {"op": "inc", "by": 1.50, "née": "\\u00e9"}}',
        '{ "type":"state" }',
        '{"data": {"op": "nosuch"}, "type": "step"}',
    ]
    async with foreign(OPENENV) as world, world.client() as client:
        first = await raw(client, '{"type":"reset","data":{}}')
        heard = [first, *[await raw(client, frame) for frame in sent]]

    assert world.image.frames == [b"", *[frame.encode() for frame in sent]]
    assert [reply.encode() for reply in heard] == world.image.replies


async def test_a_plain_reset_adds_no_field_and_queries_no_task() -> None:
    async with foreign(OPENENV) as world, world.client() as client:
        await client.ask("reset")

    (setup,) = world.image.setups
    assert (setup.spec, setup.seed, setup.config, setup.split, setup.index, setup.episode) == (
        {},
        None,
        None,
        "",
        None,
        "",
    )
    assert world.image.asked.total() == 0


async def test_additional_fields_of_a_reset_go_to_the_image() -> None:
    async with foreign(OPENENV) as world, world.client() as client:
        await client.ask("reset", {"seed": 3, "episode_id": "mine", "fen": "8/8", "size": {"x": 1}})

    (setup,) = world.image.setups
    assert (setup.seed, setup.episode, setup.config) == (3, "mine", {"fen": "8/8", "size": {"x": 1}})


async def test_split_and_index_go_unchanged_to_an_image_that_understands_them() -> None:
    async with foreign(PLACES) as world, world.client() as client:
        await client.ask("reset", {"split": "its own", "index": -7})

    (setup,) = world.image.setups
    assert (setup.config, setup.spec) == ({"split": "its own", "index": -7}, {})
    assert world.image.asked.total() == 0


async def test_split_and_index_are_looked_up_for_an_image_that_does_not_understand_them() -> None:
    async with foreign(OPENENV) as world, world.client() as client:
        await client.ask("reset", {"split": "train", "index": 2})

    (setup,) = world.image.setups
    assert (setup.spec, setup.split, setup.index, setup.config) == (TRAIN[2], "train", 2, None)


async def test_an_images_own_task_may_be_inline_and_any_other_inline_task_is_checked() -> None:
    async with foreign(PLACES) as world, world.client() as client:
        await client.ask("reset", {"task": TEST[0]})
        refused = await client.ask("reset", {"task": {"config": {}, "module": "os"}})

    (setup,) = world.image.setups
    assert (setup.split, setup.index) == ("test", 0)
    assert code(refused) == "VALIDATION_ERROR"
    assert "code is not taken from outside" in message(refused)


async def test_an_images_error_frame_ends_nothing() -> None:
    async with foreign(OPENENV) as world, world.client() as client:
        await client.ask("reset")
        boom = await client.ask("step", {"op": "boom"})
        step = await client.ask("step", {"op": "inc"})

    assert (code(boom), message(boom)) == ("EXECUTION_ERROR", "boom from env")
    assert step["data"]["observation"] == {"value": 1}


async def test_malformed_frames_are_refused_by_the_gateway() -> None:
    async with foreign(OPENENV) as world, world.client() as client:
        await client.ask("reset")
        replies = [await client.say(frame) for frame in ("no json", '{"type":"dance"}', '{"type":"state","data":{}}')]
        await client.say("[]")
        assert await client.closed() == 1000

    assert [code(reply) for reply in replies] == ["INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR"]
    assert world.image.frames == [b""]


async def test_before_the_first_reset_there_is_no_episode() -> None:
    async with foreign(OPENENV) as world, world.client() as client:
        step = await client.ask("step", {"op": "inc"})
        state = await client.ask("state")
        listed = await client.ask("step", {"type": "list_tools"})

        assert code(step) == "SESSION_ERROR"
        assert state["data"] == {"episode_id": None, "step_count": 0}
        assert [tool["name"] for tool in listed["data"]["observation"]["tools"]] == ["move"]
        assert not world.image.frames


async def test_each_request_after_a_lost_worker_gets_one_error_until_a_reset() -> None:
    async with foreign(OPENENV) as world, world.client() as client:
        await client.ask("reset")
        gone = await client.ask("step", {"op": "gone"})
        later = [await client.ask("step", {"op": "inc"}), await client.ask("state")]
        again = await client.ask("reset")
        step = await client.ask("step", {"op": "inc"})

    assert [code(reply) for reply in (gone, *later)] == ["SESSION_ERROR"] * 3
    assert "send reset" in message(gone)
    assert "its environment was lost" in message(later[0])
    assert again["type"] == "observation"
    assert step["data"]["observation"] == {"value": 1}, "a fresh episode, and only after the reset"


async def test_a_late_step_ends_its_episode() -> None:
    async with foreign(replace(OPENENV, openenv=OpenEnv(step_s=0.2))) as world, world.client() as client:
        await client.ask("reset")
        late = await client.ask("step", {"op": "hang"})
        after = await client.ask("step", {"op": "inc"})

    assert (code(late), code(after)) == ("EXECUTION_ERROR", "SESSION_ERROR")
    assert "exceeded its deadline" in message(late)


async def test_a_step_whose_episode_an_operator_ends_gets_an_error() -> None:
    async with foreign(OPENENV) as world, world.client() as client:
        await client.ask("reset")
        asking = asyncio.ensure_future(client.ask("step", {"op": "hang"}))
        await world.image.stuck.wait()
        (session,) = await world.gateway.store.sessions()
        await world.gateway.sessions.end(Owner(""), session.name, CloseReason.OPERATOR, wait_s=5)

        assert code(await asking) == "SESSION_ERROR"


async def test_a_client_that_disconnects_releases_its_slot() -> None:
    async with foreign(OPENENV) as world:
        async with world.client() as client:
            await client.ask("reset")
            await client.connection.send('{"type":"step","data":{"op":"hang"}}')
            await world.image.stuck.wait()
            client.vanish()

        await world.gateway.eventually_used(0, "image")


# -- HTTP -----------------------------------------------------------------------------------------------------------


async def test_http_plays_an_episode_of_an_image() -> None:
    async with foreign(OPENENV) as world:
        reset = await world.http.post("/openenv/image/reset", json={"seed": 1})
        step = await world.http.post("/openenv/image/step", json={"action": {"op": "inc"}})
        boom = await world.http.post("/openenv/image/step", json={"action": {"op": "boom"}})
        state = await world.http.get("/openenv/image/state")

    assert reset.json() == {"observation": {"text": "Reach 2."}, "done": False, "metadata": None}
    assert step.json()["observation"] == {"value": 1}
    assert (boom.status_code, boom.json()) == (500, {"detail": "boom from env", "code": "EXECUTION_ERROR"})
    assert state.json() == {"step_count": 1, "own": "state"}


async def test_schema_and_metadata_are_those_of_the_image() -> None:
    told = {"schema": {"action": {"title": "CounterAction"}}, "metadata": {"name": "CounterEnvironment"}}
    async with foreign(OPENENV) as world:
        world.image.told = told
        schema = (await world.http.get("/openenv/image/schema")).json()
        metadata = (await world.http.get("/openenv/image/metadata")).json()

    assert (schema, metadata) == (told["schema"], told["metadata"])


async def test_the_gateway_serves_its_own_schema_and_metadata_for_an_image_without_them() -> None:
    async with foreign(OPENENV) as world:
        schema = (await world.http.get("/openenv/image/schema")).json()
        metadata = (await world.http.get("/openenv/image/metadata")).json()

    assert schema["action"]["title"] == "Action"
    assert metadata["name"] == "image"


# -- tools ----------------------------------------------------------------------------------------------------------


async def test_a_sessions_tools_are_those_of_its_image() -> None:
    async with foreign(OPENENV) as world:
        id = (await rpc(world, "openenv/session/create"))["result"]["session_id"]
        before = await rpc(world, "tools/list", session_id=id)
        async with world.client(f"ws?session_id={id}") as client:
            await client.ask("reset")
            listed = await rpc(world, "tools/list", session_id=id)
            called = await rpc(world, "tools/call", session_id=id, name="own", arguments={"x": 1})
            unknown = await rpc(world, "tools/call", session_id=id, name="nosuch", arguments={})
        closed = await rpc(world, "openenv/session/close", session_id=id)

    assert [tool["name"] for tool in before["result"]["tools"]] == ["move"]
    assert listed["result"] == {"tools": [{"name": "own", "inputSchema": {}}]}
    assert called["result"] == {"data": {"x": 1}, "is_error": False}
    assert unknown["error"] == {"code": -32603, "message": "Unknown tool: 'nosuch'", "data": None}
    assert closed["result"]["closed"]
    assert id.encode() not in b"".join(world.image.frames), "the id is the gateway's own"


async def test_tools_are_listed_without_a_session_as_the_image_lists_them() -> None:
    text = {"type": "string"}
    tool = {"name": "own", "inputSchema": {}, "outputSchema": text, "annotations": {"readOnlyHint": True}, "meta": {}}
    async with foreign(OPENENV) as world:
        world.image.told = {"tools": {"tools": [tool]}}
        id = (await rpc(world, "openenv/session/create"))["result"]["session_id"]
        listed = [await rpc(world, "tools/list"), await rpc(world, "tools/list", session_id=id)]

    assert [one["result"] for one in listed] == [{"tools": [tool]}] * 2


async def test_mcp_frames_go_to_the_image_except_frames_about_sessions() -> None:
    listing = '{"type":"mcp","data":{"jsonrpc":"2.0","method":"tools/list","params":{},"id":4}}'
    async with foreign(OPENENV) as world, world.client() as client:
        await client.ask("reset")
        reply = await raw(client, listing)
        own = await client.ask("mcp", {"jsonrpc": "2.0", "method": "openenv/session/create", "params": {}, "id": 5})
        named = {"session_id": own["data"]["result"]["session_id"]}
        await client.ask("mcp", {"jsonrpc": "2.0", "method": "tools/list", "params": named, "id": 6})

        assert reply.encode() == world.image.replies[1]
        assert world.image.frames[1] == listing.encode()
        assert len(world.image.frames) == 3
        assert named["session_id"].encode() not in world.image.frames[2], "the id is the gateway's own"


async def test_tool_calls_become_steps_for_an_image_that_is_too_old_for_tool_frames() -> None:
    old = CounterImage({"train": TRAIN}, has_frames=False)
    async with foreign(OPENENV, old) as world:
        id = (await rpc(world, "openenv/session/create"))["result"]["session_id"]
        async with world.client(f"ws?session_id={id}") as client:
            await client.ask("reset")
            listed = await rpc(world, "tools/list", session_id=id)
            called = await rpc(world, "tools/call", session_id=id, name="move", arguments={"op": "inc"})

    assert [tool["name"] for tool in listed["result"]["tools"]] == ["move"]
    assert called["result"]["data"] == "1"


async def test_the_socket_for_tools_plays_an_episode_of_its_own() -> None:
    async with foreign(OPENENV) as world:
        async with world.client("mcp") as client:
            call = {"name": "own", "arguments": {"x": 2}}
            reply = await client.say(json.dumps({"jsonrpc": "2.0", "method": "tools/call", "params": call, "id": 1}))
            assert reply["result"] == {"data": {"x": 2}, "is_error": False}
            assert await world.gateway.open_sessions() == 1

        async def ended() -> None:
            assert await world.gateway.open_sessions() == 0

        await eventually(ended)


@pytest.mark.parametrize("action", [{"op": "inc"}, {"type": "call_tool", "tool_name": "own", "arguments": {}}])
async def test_every_step_goes_unchanged_to_the_image(action: dict[str, Any]) -> None:
    async with foreign(OPENENV) as world, world.client() as client:
        await client.ask("reset")
        await client.ask("step", action)

    assert json.loads(world.image.frames[-1]) == {"type": "step", "data": action}

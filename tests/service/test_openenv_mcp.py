"""Sessions that outlive their sockets, and tools over JSON-RPC."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.ids import Owner
from gateway.frontends.session_ids import SessionIds
from tests.fakes.eventually import eventually, until
from tests.fakes.workers import Start
from tests.service.openenv_world import Client, Json, World, code, message, serving, world
from tests.service.stack import SECRET, environment, impatience

TEXT = {"type": "text", "text": '{"x": 1}', "annotations": None, "meta": None}
RESULT = {
    "content": [TEXT],
    "structured_content": {"result": '{"x": 1}'},
    "meta": None,
    "data": '{"x": 1}',
    "is_error": False,
}


async def created(gw: World, name: str = "math") -> str:
    """Create a session as clients do, and return its id."""
    reply = await gw.rpc("openenv/session/create", name)
    assert reply.keys() == {"jsonrpc", "id", "result"}, reply
    id: str = reply["result"]["session_id"]
    return id


async def call(gw: World, id: str, tool: str = "go_on") -> Json:
    return await gw.rpc("tools/call", name=tool, arguments={"x": 1}, session_id=id)


async def asked(client: Client, method: str, /, **params: Any) -> Json:
    """Call over the WebSocket ``/mcp``."""
    return await client.say(json.dumps({"jsonrpc": "2.0", "method": method, "params": params, "id": "a"}))


async def framed(client: Client, method: str, /, **params: Any) -> Json:
    """Call in an ``mcp`` frame of a gym socket."""
    data = {"jsonrpc": "2.0", "method": method, "params": params, "id": 7}
    reply = await client.ask("mcp", data)
    assert reply["type"] == "mcp", reply
    answer: Json = reply["data"]
    return answer


def told(reply: Json) -> tuple[int, str]:
    """Return the code and the message of an error."""
    assert reply.keys() == {"jsonrpc", "id", "error"}, reply
    assert reply["error"].keys() == {"code", "message", "data"}
    return reply["error"]["code"], reply["error"]["message"]


# -- sessions --------------------------------------------------------------------------------------------------------


async def test_the_sequence_of_the_official_tool_client_works() -> None:
    async with world() as gw:
        id = await created(gw)
        assert await gw.gateway.used() == 0, "nothing is opened before the first reset"
        async with gw.client(path=f"ws?session_id={id}") as client:
            await client.reset(episode_id="e1")
            listed = await gw.rpc("tools/list", session_id=id)
            called = await call(gw, id)
            state = await client.ask("state")
            await client.connection.send('{"type":"close"}')
            assert await client.closed() == 1000

        assert [tool["name"] for tool in listed["result"]["tools"]] == ["echo"]
        assert listed["result"]["tools"][0]["inputSchema"] == {"type": "object", "properties": {}}
        assert called["result"] == RESULT
        assert state["data"]["episode_id"] == "e1"
        assert await gw.gateway.used() == 1, "it survives its socket"
        assert (await gw.rpc("openenv/session/close", session_id=id))["result"] == {"session_id": id, "closed": True}
        await gw.gateway.eventually_used(0)


async def test_a_client_reattaches_to_the_same_episode_after_its_socket_broke() -> None:
    async with world() as gw:
        id = await created(gw)
        async with gw.client(path=f"ws?session_id={id}") as client:
            await client.reset(episode_id="e1")
            await client.step()
            client.vanish()

        async def again() -> Json:
            async with gw.client(path=f"ws?session_id={id}") as client:
                assert (await client.step())["type"] == "observation"
                found: Json = (await client.ask("state"))["data"]
                return found

        state = await eventually(again)
        assert (state["episode_id"], state["step_count"]) == ("e1", 2)


async def test_another_replica_knows_the_session_and_its_episode() -> None:
    async with world() as gw:
        id = await created(gw)
        async with gw.client(path=f"ws?session_id={id}") as client:
            await client.reset(episode_id="e1")
        other = gw.stack.another()
        async with serving(other) as (http, base, server):
            second = World(gw.stack, other, http, base, server)
            async with second.client(path=f"ws?session_id={id}") as client:
                assert (await client.step())["type"] == "observation"
                assert (await client.ask("state"))["data"]["episode_id"] == "e1"
            assert (await call(second, id))["result"] == RESULT


async def test_a_session_has_one_socket_at_a_time() -> None:
    async with world() as gw:
        id = await created(gw)
        async with gw.client(path=f"ws?session_id={id}") as first:
            await first.reset()
            async with gw.client(path=f"ws?session_id={id}") as second:
                reply = await second.hear()
                assert (code(reply), message(reply)) == (
                    "SESSION_ERROR",
                    f"Session {id} already has an attached WebSocket",
                )
                assert await second.closed() == 1000
            assert (await first.step())["type"] == "observation"


async def test_ids_that_this_gateway_did_not_make_for_this_owner_and_environment_are_unknown() -> None:
    ids = SessionIds(SECRET)
    good = ids.new(Owner("lab"), environment().name)
    wrong = [
        "nope",
        good[:-1],
        good[:-1] + ("0" if good[-1] != "0" else "1"),
        ids.new(Owner("other"), environment().name),
        ids.new(Owner("lab"), environment("chess").name),
        SessionIds(b"another secret").new(Owner("lab"), environment().name),
        "ü" * 49,
    ]
    key = {"Authorization": "Bearer a-trainer"}
    async with world(trainers={"lab": "a-trainer"}) as gw:
        gw.http.headers.update(key)
        assert (await gw.rpc("tools/list", session_id=good)).get("result")
        for id in wrong:
            assert told(await call(gw, id)) == (-32602, f"Unknown session_id: {id}")
            assert told(await gw.rpc("tools/list", session_id=id)) == (-32602, f"Unknown session_id: {id}")
            async with gw.client(path=f"ws?session_id={id}", additional_headers=key) as client:
                reply = await client.hear()
                assert (code(reply), message(reply)) == ("SESSION_ERROR", f"Unknown session_id: {id}")
                assert await client.closed() == 1000
        assert await gw.gateway.used() == 0


async def test_a_session_that_is_closed_while_its_socket_is_open_ends_with_the_socket() -> None:
    async with world() as gw:
        id = await created(gw)
        async with gw.client(path=f"ws?session_id={id}") as client:
            await client.reset()

            reply = await gw.rpc("openenv/session/close", session_id=id)

            assert reply["result"] == {"session_id": id, "closed": False, "closing": True}
            assert (await client.step())["type"] == "observation"
        await gw.gateway.eventually_used(0)


async def test_a_tool_call_in_a_session_without_an_episode_does_not_open_an_episode() -> None:
    async with world() as gw:
        id = await created(gw)

        assert told(await call(gw, id)) == (-32603, "no episode is open on this connection: send reset first")
        assert await gw.gateway.used() == 0


# -- calls -----------------------------------------------------------------------------------------------------------


async def test_a_call_without_a_session_has_an_episode_of_its_own() -> None:
    async with world() as gw:
        reply = await gw.rpc("tools/call", name="go_on", arguments={"x": 1})

        assert reply == {"jsonrpc": "2.0", "id": 7, "result": RESULT}
        await gw.gateway.eventually_used(0)


async def test_a_call_shows_no_reward() -> None:
    async with world() as gw:
        reply = await gw.rpc("tools/call", name="submit", arguments={"x": 1})

        assert "reward" not in json.dumps(reply)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("{x", (-32700, "Parse error")),
        ("[]", (-32700, "Parse error")),
        ("{}", (-32600, "Invalid request: ")),
        ('{"jsonrpc":"1.0","method":"tools/list"}', (-32600, "Invalid request: ")),
        ('{"jsonrpc":"2.0","method":"tools/list","params":[]}', (-32600, "Invalid request: ")),
        ('{"jsonrpc":"2.0","method":"tools/list","more":1}', (-32600, "Invalid request: ")),
        ('{"jsonrpc":"2.0","method":"initialize","id":1}', (-32601, "Method not found: initialize")),
        ('{"jsonrpc":"2.0","method":"tools/call"}', (-32602, "Missing 'name' in params")),
        (
            '{"jsonrpc":"2.0","method":"tools/call","params":{"name":"x","arguments":4}}',
            (-32602, "Invalid params - 'arg"),
        ),
        (
            '{"jsonrpc":"2.0","method":"openenv/session/close"}',
            (-32602, "Invalid params - 'session_id' is required"),
        ),
        (
            '{"jsonrpc":"2.0","method":"openenv/session/close","params":{"session_id":"zz"}}',
            (-32602, "Unknown session_id: zz"),
        ),
        ('{"jsonrpc":"2.0","method":"tools/call","params":{"name":"reset"}}', (-32603, "Unknown tool: 'reset'")),
        ('{"jsonrpc":"2.0","method":"tools/call","params":{"name":"refuse"}}', (-32603, "that is not an action")),
    ],
)
async def test_an_invalid_request_is_an_error_object_with_status_200(body: str, error: tuple[int, str]) -> None:
    async with world() as gw:
        answer = await gw.http.post("/openenv/math/mcp", content=body)

        assert answer.status_code == 200
        number, words = told(answer.json())
        assert (number, words.startswith(error[1])) == (error[0], True), words
        await gw.gateway.eventually_used(0)


async def test_missing_capacity_and_failed_worker_starts_are_server_errors_with_their_data() -> None:
    async with world(environment(slots=1, max_workers=1)) as gw:
        async with gw.client() as holder:
            await holder.reset()
            with impatience(gw.gateway, openenv={"reset_s": 0.2}):
                full = await gw.rpc("tools/call", name="go_on")
        await gw.gateway.eventually_used(0)
        await gw.stack.backend.only.die()
        gw.stack.backend.starts[gw.gateway.catalog.default.name] = Start.DIES
        await gw.gateway.eventually_workers(0)
        failed = await gw.rpc("tools/call", name="go_on")

        assert told(full)[0] == -32000
        assert full["error"]["data"].pop("retry_after_s") >= 1
        assert full["error"]["data"] == {"active_sessions": 1, "max_sessions": 1}
        assert told(failed)[0] == -32000
        assert failed["error"]["data"].pop("retry_after_s") >= 1
        assert failed["error"]["data"] == {"factory_name": "math", "reason": "start_failed"}


async def test_get_is_not_allowed() -> None:
    async with world() as gw:
        assert (await gw.http.get("/openenv/math/mcp")).status_code == 405


# -- frames and sockets ----------------------------------------------------------------------------------------------


async def test_frames_of_a_gym_socket_call_tools_of_its_episode() -> None:
    async with world() as gw, gw.client() as client:
        assert told(await framed(client, "tools/call", name="go_on"))[0] == -32603
        await client.reset()

        id = (await framed(client, "openenv/session/create"))["result"]["session_id"]

        assert (await framed(client, "tools/call", name="go_on", arguments={"x": 1}))["result"] == RESULT
        assert (await call(gw, id))["result"] == RESULT, "the socket's own id is a session's as any other"
        assert told(await framed(client, "openenv/session/close", session_id=id)) == (
            -32600,
            "Cannot close active WebSocket-managed session via MCP method",
        )
        broken = await client.ask("mcp", {"method": "tools/list"})
        assert (broken["type"], broken["data"]["id"], told(broken["data"])[0]) == ("mcp", None, -32600)
        assert gw.stack.backend.only.ran == ["go_on"] * 2


async def test_a_json_rpc_socket_has_one_episode_from_its_first_call_until_it_closes() -> None:
    async with world() as gw:
        async with gw.client(path="mcp") as client:
            assert (await asked(client, "tools/list"))["result"]["tools"]
            await gw.gateway.eventually_used(0)
            for _ in range(2):
                reply = await asked(client, "tools/call", name="go_on", arguments={"x": 1})
                assert (reply["id"], reply["result"]) == ("a", RESULT)
            assert await gw.gateway.used() == 1
            broken = told(await client.say("{x"))
            assert broken[0] == -32700
            assert broken[1].startswith("Parse error: Expecting property name")
            assert told(await client.say("[]"))[0] == -32600
        await gw.gateway.eventually_used(0)


async def test_a_json_rpc_socket_gets_one_error_after_a_loss_and_then_starts_a_new_episode() -> None:
    async with world() as gw, gw.client(path="mcp") as client:
        await asked(client, "tools/call", name="go_on")
        await gw.stack.backend.only.die()
        await gw.gateway.eventually_used(0)

        assert told(await asked(client, "tools/call", name="go_on"))[0] == -32603

        assert "result" in await asked(client, "tools/call", name="go_on")


async def test_a_caller_that_hangs_up_in_mid_call_leaves_nothing() -> None:
    async with world() as gw, gw.client(path="mcp") as client:
        request = {"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "quiet"}, "id": 1}
        await client.connection.send(json.dumps(request))
        await until(lambda: gw.stack.backend.workers and gw.stack.backend.only.waiting)

        client.vanish()

        await gw.gateway.eventually_used(0)

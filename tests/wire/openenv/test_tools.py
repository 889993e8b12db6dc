"""Tools, as actions on the socket and over ``/mcp`` as ``MCPToolClient`` calls them."""

import asyncio
from typing import Any

import pytest

from tests.wire.openenv.clients import FIRST_ASYNC, NEWEST, ClientError, Driver, DriverOf, connected
from tests.wire.openenv.frames import said, socket
from tests.wire.openenv.servers import EMBEDDED, Place, on

pytestmark = [pytest.mark.wire]

TOOLS = ["act", "count", "die", "echo_message", "given", "sleep"]


async def rpc(place: Place, method: str, **params: Any) -> dict[str, Any]:
    """Send one JSON-RPC request to ``/mcp`` and return its answer, whose status is always 200."""
    async with place.http() as http:
        response = await http.post("/mcp", json={"jsonrpc": "2.0", "method": method, "params": params, "id": 7})
    assert response.status_code == 200
    answer: dict[str, Any] = response.json()
    assert (answer["jsonrpc"], answer["id"]) == ("2.0", 7)
    return answer


@on(EMBEDDED)
async def test_a_tool_client_plays_an_episode(place: Place, newest: Driver) -> None:
    async with connected(newest, place.url(), kind="mcp") as client:
        reset = await client.reset(split="test", index=0, episode_id="e")
        tools = await client.call("list_tools")
        echoed = await client.call("call_tool", "echo_message", message="hi")
        stepped = await client.step({"$call_tool": {"tool_name": "act", "arguments": {"op": "inc", "by": 2}}})
        state = await client.state()

    assert reset["observation"]["value"] == 0
    assert sorted(tool["name"] for tool in tools) == TOOLS
    (echo,) = [tool for tool in tools if tool["name"] == "echo_message"]
    assert echo["description"] == "Echo back the provided message."
    assert echo["input_schema"]["required"] == ["message"]
    assert echoed == "hi"
    assert (stepped["observation"]["tool_name"], stepped["reward"], stepped["done"]) == ("act", 1.0, True)
    assert state["episode_id"] == "e"


@on(EMBEDDED)
async def test_a_synchronous_tool_client_lists_and_calls_tools(place: Place, newest: Driver) -> None:
    async with connected(newest, place.url(), kind="mcp", mode="sync") as client:
        await client.reset(index=0)
        tools = await client.call("list_tools")
        echoed = await client.call("call_tool", "echo_message", message="hi")

    assert sorted(tool["name"] for tool in tools) == TOOLS
    assert echoed == "hi"


@on(EMBEDDED)
async def test_a_tool_client_of_the_first_releases_works_on_its_socket(place: Place, driver_of: DriverOf) -> None:
    async with connected(driver_of(FIRST_ASYNC), place.url(), kind="mcp") as client:
        await client.reset(index=0)
        tools = await client.call("list_tools")
        echoed = await client.call("call_tool", "echo_message", message="hi")
        with pytest.raises(ClientError) as failed:
            await client.call("call_tool", "nosuch")

    assert sorted(tool["name"] for tool in tools) == TOOLS
    assert echoed == "hi"
    assert "nosuch" in failed.value.message


@on(EMBEDDED)
async def test_the_episode_of_a_tool_client_survives_the_loss_of_its_socket(place: Place, newest: Driver) -> None:
    async with connected(newest, place.url(), kind="mcp") as client:
        await client.reset(index=0, episode_id="e")
        await client.call("call_tool", "act", op="inc")
        await client.abort()
        state = await client.state()
        last = await client.step({"$call_tool": {"tool_name": "act", "arguments": {"op": "inc", "by": 2}}})

    assert state["episode_id"] == "e"
    assert (last["reward"], last["done"]) == (1.0, True)


@on(EMBEDDED)
async def test_concurrent_tool_clients_share_no_episode(place: Place, newest: Driver) -> None:
    async def play(by: int) -> float | None:
        async with connected(newest, place.url(), kind="mcp") as client:
            await client.reset(index=0)
            for _ in range(by):
                await client.call("call_tool", "act", op="dec")
            result = await client.step({"$call_tool": {"tool_name": "act", "arguments": {"op": "inc", "by": 6}}})
            return float(result["reward"])

    assert await asyncio.gather(*map(play, (1, 2, 3, 4))) == [0.0, 0.0, 1.0, 0.0]


@on(EMBEDDED)
@pytest.mark.parametrize("version", [NEWEST, FIRST_ASYNC])
async def test_a_tool_is_called_as_an_action(place: Place, driver_of: DriverOf, version: str) -> None:
    async with connected(driver_of(version), place.url()) as client:
        await client.reset(index=0)
        listed = (await client.step({"type": "list_tools"}))["observation"]["tools"]
        echoed = await client.tool("echo_message", message="hi")
        unknown = await client.tool("nosuch")
        invalid = await client.tool("echo_message", text="hi")
        failed = await client.tool("act", op="raise")
        after = await client.act("inc")

    (echo,) = [tool for tool in listed if tool["name"] == "echo_message"]
    assert echo["input_schema"].items() >= {"type": "object", "required": ["message"]}.items()
    assert (echoed["tool_name"], echoed["error"], echoed["result"]["data"]) == ("echo_message", None, "hi")
    assert echoed["result"]["is_error"] is False
    assert echoed["result"]["content"][0].items() >= {"type": "text", "text": "hi"}.items()
    assert [it["error"]["error_type"] for it in (unknown, invalid, failed)] == [
        "tool_not_found",
        "invalid_args",
        "execution_error",
    ]
    assert [it["result"] for it in (unknown, invalid, failed)] == [None] * 3
    assert "boom from env" in failed["error"]["message"]
    assert after["observation"]["value"] == 1


@on(EMBEDDED)
async def test_a_session_is_created_and_then_attached_to_and_closed_by_its_id(place: Place) -> None:
    created = (await rpc(place, "openenv/session/create"))["result"]["session_id"]
    async with socket(f"{place.url()}?session_id={created}") as ws:
        await ws.reset(index=0, episode_id="e")
        async with socket(f"{place.url()}?session_id={created}") as second:
            refused = await second.reply()
            code = await second.closed()
        called = await rpc(place, "tools/call", name="act", arguments={"op": "inc"}, session_id=created)
        closing = (await rpc(place, "openenv/session/close", session_id=created))["result"]
        async_state = await ws.state()
    closed = await rpc(place, "openenv/session/close", session_id=created)

    assert said(refused) == ("SESSION_ERROR", f"Session {created} already has an attached WebSocket")
    assert code == 1000
    assert called["result"]["is_error"] is False
    assert closing == {"session_id": created, "closed": False, "closing": True}
    assert async_state["data"].items() >= {"episode_id": "e", "step_count": 1}.items()
    assert "error" in closed or closed["result"]["closed"] is True


@on(EMBEDDED)
async def test_an_episode_is_found_again_by_its_id(place: Place) -> None:
    created = (await rpc(place, "openenv/session/create"))["result"]["session_id"]
    async with socket(f"{place.url()}?session_id={created}") as ws:
        await ws.reset(index=0, episode_id="e")
        await ws.step(op="inc")
        ws.inner.transport.abort()
    async with socket(f"{place.url()}?session_id={created}") as ws:
        state = await ws.state()
        last = await ws.step(op="inc", by=2)
    closed = (await rpc(place, "openenv/session/close", session_id=created))["result"]

    assert state["data"].items() >= {"episode_id": "e", "step_count": 1}.items()
    assert (last["data"]["reward"], last["data"]["done"]) == (1.0, True)
    assert closed == {"session_id": created, "closed": True}


@on(EMBEDDED)
async def test_invalid_mcp_requests_get_the_json_rpc_error_codes(place: Place) -> None:
    async with place.http() as http:
        garbage = (await http.post("/mcp", content=b"{")).json()
        empty = (await http.post("/mcp", json={})).json()
        wrong = await http.get("/mcp")
    errors = {
        "method": (await rpc(place, "initialize"))["error"],
        "session": (await rpc(place, "tools/list", session_id="zz"))["error"],
        "close": (await rpc(place, "openenv/session/close"))["error"],
        "name": (await rpc(place, "tools/call", arguments={}))["error"],
    }

    assert (garbage["error"]["code"], garbage["id"]) == (-32700, None)
    assert (empty["jsonrpc"], empty["error"]["code"]) == ("2.0", -32600)
    assert wrong.status_code == 405
    assert {name: (error["code"], error["message"]) for name, error in errors.items()} == {
        "method": (-32601, "Method not found: initialize"),
        "session": (-32602, "Unknown session_id: zz"),
        "close": (-32602, "Invalid params - 'session_id' is required"),
        "name": (-32602, "Missing 'name' in params"),
    }


@on(EMBEDDED)
async def test_tools_are_listed_and_called_without_a_session(place: Place) -> None:
    listed = (await rpc(place, "tools/list"))["result"]["tools"]
    called = (await rpc(place, "tools/call", name="echo_message", arguments={"message": "hi"}))["result"]
    unknown = (await rpc(place, "tools/call", name="nosuch", arguments={}))["error"]

    assert sorted(tool["name"] for tool in listed) == TOOLS
    (echo,) = [tool for tool in listed if tool["name"] == "echo_message"]
    assert echo["inputSchema"].items() >= {"type": "object", "required": ["message"]}.items()
    assert (called["data"], called["is_error"]) == ("hi", False)
    assert unknown["code"] == -32603
    assert "nosuch" in unknown["message"]

"""Raw frames: the official server and the gateway give the same replies to the same frames."""

import contextlib
import json
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from tests.wire.openenv.frames import said, socket
from tests.wire.openenv.servers import ALL, EMBEDDED, Place, on

pytestmark = [pytest.mark.wire]

REFUSED: dict[str, tuple[str, str, str]] = {
    "half an object": (
        "{",
        "INVALID_JSON",
        "Invalid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ),
    "nothing": ("", "INVALID_JSON", "Invalid JSON: Expecting value: line 1 column 1 (char 0)"),
    "an unknown type": ('{"type":"frobnicate"}', "UNKNOWN_TYPE", "Unknown message type: frobnicate"),
    "no type": ("{}", "UNKNOWN_TYPE", "Unknown message type: "),
    "a reset of null": ('{"type":"reset","data":null}', "VALIDATION_ERROR", "Invalid message"),
    "a step without data": ('{"type":"step"}', "VALIDATION_ERROR", "Invalid message"),
    "a step of null": ('{"type":"step","data":null}', "VALIDATION_ERROR", "Invalid message"),
    "a state with data": ('{"type":"state","data":{}}', "VALIDATION_ERROR", "Invalid message"),
    "a close with data": ('{"type":"close","data":{}}', "VALIDATION_ERROR", "Invalid message"),
    "a key too many": ('{"type":"step","data":{"op":"inc"},"id":9}', "VALIDATION_ERROR", "Invalid message"),
}
LOCATED: dict[str, tuple[str, dict[str, Any]]] = {
    "a key too many": (
        '{"type":"state","id":9}',
        {"type": "extra_forbidden", "loc": ["id"], "msg": "Extra inputs are not permitted", "input": 9},
    ),
    "a step without data": (
        '{"type":"step"}',
        {"type": "missing", "loc": ["data"], "msg": "Field required", "input": {"type": "step"}},
    ),
    "a reset of null": (
        '{"type":"reset","data":null}',
        {"type": "dict_type", "loc": ["data"], "msg": "Input should be a valid dictionary", "input": None},
    ),
    "a step of a list": (
        '{"type":"step","data":[1]}',
        {"type": "dict_type", "loc": ["data"], "msg": "Input should be a valid dictionary", "input": [1]},
    ),
}
ENDING: dict[str, tuple[str | bytes, str]] = {
    "an array": ("[]", "'list' object has no attribute 'get'"),
    "a text": ('"reset"', "'str' object has no attribute 'get'"),
    "a number": ("7", "'int' object has no attribute 'get'"),
    "null": ("null", "'NoneType' object has no attribute 'get'"),
    "bytes": (b'{"type":"state"}', "'text'"),
}


@on(*ALL)
async def test_replies_have_the_fields_that_clients_read(place: Place) -> None:
    async with socket(place.url()) as ws:
        reset = await ws.reset(split="train", index=0, episode_id="e-7")
        step = await ws.step(op="inc")
        state = await ws.state()

    told = reset["data"]["metadata"]
    assert told["task_id"] == "train-0"
    assert reset == {
        "type": "observation",
        "data": {
            "observation": {"metadata": told, "value": 0, "target": 3, "text": "ready"},
            "reward": None,
            "done": False,
            "metadata": told,
        },
    }
    assert step == {
        "type": "observation",
        "data": {
            "observation": {"metadata": {}, "value": 1, "target": 3, "text": "value=1"},
            "reward": 0.0,
            "done": False,
        },
    }
    assert state["type"] == "state"
    assert state["data"].items() >= {"episode_id": "e-7", "step_count": 1, "task_id": "train-0"}.items()


@on(*ALL)
@pytest.mark.parametrize(("frame", "code", "message"), REFUSED.values(), ids=REFUSED.keys())
async def test_a_malformed_frame_is_refused_and_the_episode_goes_on(
    place: Place, frame: str, code: str, message: str
) -> None:
    async with socket(place.url()) as ws:
        await ws.reset(index=0, episode_id="e")
        refused = await ws.ask(frame)
        # Replies come in order, one for each request: a surplus reply would arrive here.
        state = await ws.state()

    assert said(refused) == (code, message)
    assert (state["data"]["episode_id"], state["data"]["step_count"]) == ("e", 0)


@on(*ALL)
@pytest.mark.parametrize(("frame", "error"), LOCATED.values(), ids=LOCATED.keys())
async def test_a_validation_error_names_the_place_in_the_frame(place: Place, frame: str, error: dict[str, Any]) -> None:
    async with socket(place.url()) as ws:
        refused = await ws.ask(frame)

    (listed,) = refused["data"]["errors"]
    assert {name: value for name, value in listed.items() if name != "url"} == error


@on(*ALL)
@pytest.mark.parametrize(("frame", "message"), ENDING.values(), ids=ENDING.keys())
async def test_a_frame_that_is_not_a_json_object_closes_the_socket(
    place: Place, frame: str | bytes, message: str
) -> None:
    async with socket(place.url()) as ws:
        refused = await ws.ask(frame)
        code = await ws.closed()

    assert said(refused) == ("SESSION_ERROR", message)
    assert code == 1000


@on(*ALL)
async def test_a_close_has_no_reply(place: Place) -> None:
    async with socket(place.url()) as ws:
        await ws.reset(index=0)
        await ws.send({"type": "close"})
        code = await ws.closed()

    assert code == 1000


@on(*ALL)
async def test_an_unknown_session_id_gets_an_error_and_the_socket_is_closed(place: Place) -> None:
    async with socket(f"{place.url()}?session_id=nope") as ws:
        refused = await ws.reply()
        code = await ws.closed()

    assert said(refused) == ("SESSION_ERROR", "Unknown session_id: nope")
    assert code == 1000


@on(*ALL)
async def test_frames_that_are_sent_without_waiting_are_answered_in_order(place: Place) -> None:
    async with socket(place.url()) as ws:
        await ws.send({"type": "reset", "data": {"index": 4}})
        for by in (1, 2, 3):
            await ws.send({"type": "step", "data": {"op": "inc", "by": by}})
        await ws.send("{")
        await ws.send({"type": "state"})
        replies = [await ws.reply() for _ in range(6)]

    assert [reply["type"] for reply in replies] == [*["observation"] * 4, "error", "state"]
    assert [reply["data"]["observation"]["value"] for reply in replies[:4]] == [0, 1, 3, 6]
    assert replies[5]["data"]["step_count"] == 3


@on(*ALL)
async def test_each_of_many_steps_gets_one_reply(place: Place) -> None:
    async with socket(place.url()) as ws:
        await ws.reset(index=0)
        values = [(await ws.step(op="dec"))["data"]["observation"]["value"] for _ in range(300)]
        state = await ws.state()

    assert values == [-n for n in range(1, 301)]
    assert state["data"]["step_count"] == 300


@on(*ALL)
async def test_an_action_of_15_mib_passes_and_one_of_17_mib_closes_the_socket(place: Place) -> None:
    def action(mib: int) -> str:
        return json.dumps({"type": "step", "data": {"op": "fly", "why": "x" * (mib * 2**20)}})

    async with socket(place.url(), compression=None) as ws:
        await ws.reset(index=0)
        taken = await ws.ask(action(15))
        state = await ws.state()
        with contextlib.suppress(ConnectionClosed):  # the server may close the socket while the test still sends
            await ws.send(action(17))
        code = await ws.closed()

    assert said(taken)[0] == "VALIDATION_ERROR"
    assert state["type"] == "state"
    assert code == 1009


@on(EMBEDDED)
async def test_nothing_runs_before_the_first_reset(place: Place) -> None:
    async with socket(place.url()) as ws:
        refused = await ws.step(op="inc")
        state = await ws.state()
        reset = await ws.reset(index=0)

    assert said(refused)[0] == "SESSION_ERROR"
    assert "reset" in said(refused)[1]
    assert (state["data"]["episode_id"], state["data"]["step_count"]) == (None, 0)
    assert reset["type"] == "observation"


@on(EMBEDDED)
@pytest.mark.parametrize("word", ["reset", "step", "state", "close"])
async def test_an_action_cannot_pose_as_a_message_type_that_is_reserved_for_the_trainer(
    place: Place, word: str
) -> None:
    async with socket(place.url()) as ws:
        await ws.reset(index=0, episode_id="e")
        await ws.step(op="inc")
        called = await ws.step(type="call_tool", tool_name=word, arguments={})
        spelled = await ws.step(type=word, data={})
        state = await ws.state()

    assert called["data"]["observation"]["error"]["error_type"] == "tool_not_found"
    assert said(spelled)[0] == "VALIDATION_ERROR"
    assert state["data"]["episode_id"] == "e"

"""OpenEnv's frames and replies: exact forms, whatever an environment gives."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from gateway.core.episode import Block, ImageBlock, StepResult, TextBlock
from gateway.core.errors import SessionClosed, TaskInvalid, UnknownTask, UpstreamTimeout
from gateway.frontends.openenv.frames import (
    Code,
    FrameError,
    Json,
    ResetRequest,
    ToolCall,
    validated,
)
from gateway.frontends.openenv.replies import (
    error_frame,
    first_observation,
    frame,
    mcp_tools,
    observed,
    read_tools,
    refusal,
    step_reply,
    tool_reply,
    tool_result,
)
from gateway.frontends.openenv.websocket import read_frame
from gateway.stores.memory.sessions import MemoryStore
from tests.service.stack import environment

IMAGE = ImageBlock("aGk=", "image/png")
TEXT = TextBlock("hello")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('{"type":"reset"}', ("reset", {})),
        ('{"type":"reset","data":{"seed":3}}', ("reset", {"seed": 3})),
        ('{"data":{"op":"inc"},"type":"step"}', ("step", {"op": "inc"})),
        ('{"type":"state"}', ("state", {})),
        ('{"type":"close"}', ("close", {})),
        ('{"type":"mcp","data":{}}', ("mcp", {})),
        (' {"type" : "step", "data": {"t": "\\ud800"}}', ("step", {"t": "\ud800"})),
    ],
)
def test_a_frame_is_its_type_and_its_data(text: str, read: tuple[str, Json]) -> None:
    assert read_frame(text) == read


@pytest.mark.parametrize("text", ["[" * 100_000, "", "\x00", '{"type":"step","data":{"x":Infinity}}', "1" * 5000])
def test_what_is_no_json_is_refused_and_no_more(text: str) -> None:
    with pytest.raises(FrameError) as refused:
        read_frame(text)

    assert refused.value.code is Code.INVALID_JSON
    assert not refused.value.closes


@pytest.mark.parametrize("text", ['{"type":"step","data":[]}', '{"type":"reset","data":"x"}', '{"type":"mcp"}'])
def test_the_refusal_of_a_frame_can_be_written_as_one(text: str) -> None:
    with pytest.raises(FrameError) as refused:
        read_frame(text)

    reply = json.loads(error_frame(refused.value))
    assert (reply["type"], reply["data"]["code"]) == ("error", "VALIDATION_ERROR")
    assert reply["data"]["errors"][0]["loc"] == ["data"]


def test_keys_that_mean_nothing_to_the_gateway_are_the_environments() -> None:
    wish = validated(ResetRequest, {"seed": 1, "level": 2, "task": None}, "data")

    assert (wish.seed, wish.config) == (1, {"level": 2})


def test_a_place_names_where_in_the_request_the_fault_is() -> None:
    with pytest.raises(FrameError) as refused:
        validated(ToolCall, {"type": "call_tool", "tool_name": "x", "arguments": [1]})

    assert [entry["loc"] for entry in refused.value.entries] == [["arguments"]]
    assert "arguments: Input should be a valid dictionary" in refused.value.message


def test_a_reply_holds_nothing_that_json_or_utf8_cannot() -> None:
    text = frame("observation", {"nan": math.nan, "list": [math.inf, 1.5], "lone": "\ud800", "word": "ü"})

    assert json.loads(text) == {
        "type": "observation",
        "data": {"nan": None, "list": [None, 1.5], "lone": "\ud800", "word": "ü"},
    }
    text.encode()


def test_metadata_stands_beside_an_observation_only_where_there_is_some() -> None:
    assert observed({"metadata": {}}) == {"observation": {"metadata": {}}, "reward": None, "done": False}
    assert observed({"metadata": {"a": 1}})["metadata"] == {"a": 1}


# -- observations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "data", "metadata", "seen"),
    [
        pytest.param((TEXT, TextBlock("you")), None, None, {"text": "hello\nyou", "metadata": {}}, id="text"),
        pytest.param(
            (TEXT, IMAGE),
            None,
            None,
            {"text": "hello", "images": [{"data": "aGk=", "mime_type": "image/png"}], "metadata": {}},
            id="an image",
        ),
        pytest.param((TEXT,), {"url": "/"}, None, {"text": "hello", "url": "/", "metadata": {}}, id="structured"),
        pytest.param((TEXT,), {"text": "own"}, None, {"text": "own", "metadata": {}}, id="its own text"),
        pytest.param((TEXT,), [1], None, {"text": "hello", "data": [1], "metadata": {}}, id="no object"),
        pytest.param(
            (TEXT,), {"reward": 9, "done": True}, None, {"text": "hello", "metadata": {}}, id="no reward inside"
        ),
        pytest.param(
            (),
            {"metadata": {"a": 1, "b": 1}},
            {"b": 2},
            {"text": "", "metadata": {"a": 1, "b": 2}},
            id="metadata of both kinds",
        ),
    ],
)
def test_a_result_is_an_observation(blocks: tuple[Block, ...], data: Any, metadata: Any, seen: Json) -> None:
    reply = step_reply(StepResult(blocks=blocks, data=data, metadata=metadata, reward=0.5, finished=True), {})

    assert (reply["observation"], reply["reward"], reply["done"]) == (seen, 0.5, True)


def test_the_prompt_may_bring_a_structured_observation() -> None:
    blocks = [TextBlock("go", {"role": "user"}), TextBlock("on", {"observation": {"level": 1}})]

    seen = first_observation(blocks, {"task_id": "a"})

    assert seen["observation"] == {"text": "go\non", "level": 1, "metadata": {"task_id": "a"}}
    assert (seen["reward"], seen["done"], seen["metadata"]) == (None, False, {"task_id": "a"})


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("input_validation", Code.VALIDATION_ERROR),
        ("tool_failed", Code.EXECUTION_ERROR),
        ("not_found", Code.EXECUTION_ERROR),
        ("episode_finished", Code.EXECUTION_ERROR),
        ("whatever", Code.EXECUTION_ERROR),
    ],
)
def test_a_plain_action_that_failed_is_an_error_and_the_socket_stays(reason: str, code: Code) -> None:
    with pytest.raises(FrameError) as refused:
        step_reply(StepResult(error="boom from env", reason=reason), {"op": 1})

    assert (refused.value.code, refused.value.closes) == (code, False)
    assert "boom from env" in refused.value.message


def test_faults_that_a_worker_lists_are_told_in_their_places() -> None:
    fault = {"type": "literal_error", "loc": ("op",), "msg": "Input should be 'inc'", "input": "fly"}
    absent = {"type": "missing", "loc": ("by", 0), "msg": "Field required", "input": {}}
    result = StepResult(error=f"Tool input validation error: {[fault, absent]}", reason="input_validation")

    with pytest.raises(FrameError) as refused:
        step_reply(result, {"op": "fly"})

    assert refused.value.message == "Invalid action: op: Input should be 'inc'; by.0: Field required"
    assert refused.value.entries == [
        {"type": "literal_error", "loc": ["op"], "msg": "Input should be 'inc'", "input": "fly"},
        {"type": "missing", "loc": ["by", 0], "msg": "Field required", "input": {"op": "fly"}},
    ]


@pytest.mark.parametrize("rest", ["[", "[1]", "[{}]", "__import__('os').getcwd()", "[" * 5000, "1" * 20_000])
def test_words_that_list_no_faults_are_told_as_they_are(rest: str) -> None:
    message = f"Tool input validation error: {rest}"

    with pytest.raises(FrameError) as refused:
        step_reply(StepResult(error=message, reason="input_validation"), {"op": 1})

    assert refused.value.message == f"Invalid action: {message}"
    assert [entry["loc"] for entry in refused.value.entries] == [["data"]]


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("not_found", "tool_not_found"),
        ("name_collision", "tool_not_found"),
        ("input_validation", "invalid_args"),
        ("tool_failed", "execution_error"),
        ("whatever", "execution_error"),
    ],
)
def test_a_tool_that_failed_is_an_observation(reason: str, kind: str) -> None:
    seen = tool_reply("t", StepResult(error="no", reason=reason))["observation"]

    error = {"error_type": kind, "message": "no"}
    assert seen == {"metadata": {}, "tool_name": "t", "result": None, "error": error}


def test_a_tool_of_an_episode_that_is_over_is_an_error() -> None:
    with pytest.raises(FrameError):
        tool_reply("t", StepResult(error="over", reason="episode_finished"))


def test_a_tools_result_has_its_data_and_its_blocks() -> None:
    result = tool_result(StepResult(blocks=(TEXT, IMAGE), data={"a": 1}, reward=1.0))

    assert (result["structured_content"], result["data"], result["is_error"]) == ({"a": 1}, {"a": 1}, False)
    assert [block["type"] for block in result["content"]] == ["text", "image"]
    assert result["content"][1]["mimeType"] == "image/png"


def test_tools_that_spell_the_running_of_an_episode_are_not_shown() -> None:
    names = ["submit", "reset", "step", "state", "close"]

    tools = read_tools({"tools": [{"name": name, "description": None, "input_schema": None} for name in names]})

    assert [tool["name"] for tool in mcp_tools(tools)["tools"]] == ["submit"]
    assert tools[0]["input_schema"] == {"type": "object", "properties": {}}


async def test_errors_say_what_can_be_gone_on_from() -> None:
    store = MemoryStore()
    wrong = await refusal(TaskInvalid([("config.files", "an object is wanted")]), environment(), store)
    gone = await refusal(SessionClosed("a reason of tomorrow"), environment(), store)

    assert (wrong.code, wrong.entries[0]["loc"]) == (Code.VALIDATION_ERROR, ["data", "task", "config", "files"])
    assert (gone.code, gone.status, "a reason of tomorrow" in gone.message) == (Code.SESSION_ERROR, 410, True)
    for error in (UnknownTask("Unknown task: x"), UpstreamTimeout("late")):
        refused = await refusal(error, environment(), store)
        assert (refused.code, refused.closes, refused.message) == (Code.EXECUTION_ERROR, False, error.detail)

"""Frames and replies of OpenEnv have their exact form for any result of an environment."""

from __future__ import annotations

import json
import math
from json.encoder import encode_basestring_ascii
from typing import Any

import pytest

from gateway.core.episode import Block, ImageBlock, StepResult, TextBlock
from gateway.core.errors import SessionClosed, TaskInvalid, UnknownTask, UpstreamTimeout
from gateway.frontends.openenv import replies
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
def test_a_frame_is_read_as_its_type_and_data(text: str, read: tuple[str, Json]) -> None:
    assert read_frame(text) == read


@pytest.mark.parametrize("text", ["[" * 100_000, "", "\x00", '{"type":"step","data":{"x":Infinity}}', "1" * 5000])
def test_invalid_json_is_refused_and_the_socket_stays_open(text: str) -> None:
    with pytest.raises(FrameError) as refused:
        read_frame(text)

    assert refused.value.code is Code.INVALID_JSON
    assert not refused.value.closes


@pytest.mark.parametrize("text", ['{"type":"step","data":[]}', '{"type":"reset","data":"x"}', '{"type":"mcp"}'])
def test_the_refusal_of_a_frame_is_written_as_an_error_frame(text: str) -> None:
    with pytest.raises(FrameError) as refused:
        read_frame(text)

    reply = json.loads(error_frame(refused.value))
    assert (reply["type"], reply["data"]["code"]) == ("error", "VALIDATION_ERROR")
    assert reply["data"]["errors"][0]["loc"] == ["data"]


def test_keys_unknown_to_the_gateway_are_passed_to_the_environment() -> None:
    wish = validated(ResetRequest, {"seed": 1, "level": 2, "task": None}, "data")

    assert (wish.seed, wish.config) == (1, {"level": 2})


def test_a_validation_error_names_the_place_of_the_fault_in_the_request() -> None:
    with pytest.raises(FrameError) as refused:
        validated(ToolCall, {"type": "call_tool", "tool_name": "x", "arguments": [1]})

    assert [entry["loc"] for entry in refused.value.entries] == [["arguments"]]
    assert "arguments: Input should be a valid dictionary" in refused.value.message


def test_a_reply_contains_only_values_that_json_and_utf8_can_encode() -> None:
    text = frame("observation", {"nan": math.nan, "list": [math.inf, 1.5], "lone": "\ud800", "word": "ü"})

    assert json.loads(text) == {
        "type": "observation",
        "data": {"nan": None, "list": [None, 1.5], "lone": "\ud800", "word": "ü"},
    }
    text.encode()


def test_metadata_is_repeated_next_to_an_observation_only_if_it_is_not_empty() -> None:
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
        pytest.param((TEXT,), {"url": "/"}, None, {"text": "hello", "url": "/", "metadata": {}}, id="structured data"),
        pytest.param((TEXT,), {"text": "own"}, None, {"text": "own", "metadata": {}}, id="a text in the data"),
        pytest.param(
            (TEXT,), [1], None, {"text": "hello", "data": [1], "metadata": {}}, id="data that is not an object"
        ),
        pytest.param(
            (TEXT,),
            {"reward": 9, "done": True},
            None,
            {"text": "hello", "metadata": {}},
            id="reward and end are not repeated inside",
        ),
        pytest.param(
            (),
            {"metadata": {"a": 1, "b": 1}},
            {"b": 2},
            {"text": "", "metadata": {"a": 1, "b": 2}},
            id="metadata of the data and of the result",
        ),
    ],
)
def test_a_result_becomes_an_observation(blocks: tuple[Block, ...], data: Any, metadata: Any, seen: Json) -> None:
    reply = step_reply(StepResult(blocks=blocks, data=data, metadata=metadata, reward=0.5, finished=True), {})

    assert (reply["observation"], reply["reward"], reply["done"]) == (seen, 0.5, True)


def test_a_prompt_may_contain_a_structured_observation() -> None:
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
def test_a_failed_plain_action_is_an_error_and_the_socket_stays_open(reason: str, code: Code) -> None:
    with pytest.raises(FrameError) as refused:
        step_reply(StepResult(error="boom from env", reason=reason), {"op": 1})

    assert (refused.value.code, refused.value.closes) == (code, False)
    assert "boom from env" in refused.value.message


def test_validation_errors_that_a_worker_lists_keep_their_places() -> None:
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
def test_a_message_without_a_list_of_validation_errors_is_passed_on_unchanged(rest: str) -> None:
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
def test_a_failed_tool_call_is_an_observation_with_an_error(reason: str, kind: str) -> None:
    seen = tool_reply("t", StepResult(error="no", reason=reason))["observation"]

    error = {"error_type": kind, "message": "no"}
    assert seen == {"metadata": {}, "tool_name": "t", "result": None, "error": error}


def test_a_tool_call_after_the_end_of_the_episode_is_an_error() -> None:
    with pytest.raises(FrameError):
        tool_reply("t", StepResult(error="over", reason="episode_finished"))


def test_the_result_of_a_tool_has_its_data_and_blocks() -> None:
    result = tool_result(StepResult(blocks=(TEXT, IMAGE), data={"a": 1}, reward=1.0))

    assert (result["structured_content"], result["data"], result["is_error"]) == ({"a": 1}, {"a": 1}, False)
    assert [block["type"] for block in result["content"]] == ["text", "image"]
    assert result["content"][1]["mimeType"] == "image/png"


def test_a_listed_tool_has_a_schema_and_excluded_names_are_left_out() -> None:
    listing = {"tools": [{"name": name, "description": None, "input_schema": None} for name in ("submit", "step")]}

    tools = read_tools(listing, without={"step"})

    assert [tool["name"] for tool in mcp_tools(tools)["tools"]] == ["submit"]
    assert tools[0]["input_schema"] == {"type": "object", "properties": {}}
    assert [tool["name"] for tool in read_tools(listing)] == ["submit", "step"]


async def test_a_refusal_states_whether_the_session_can_continue() -> None:
    store = MemoryStore()
    wrong = await refusal(TaskInvalid([("config.files", "must be an object")]), environment(), store)
    gone = await refusal(SessionClosed("a reason of tomorrow"), environment(), store)

    assert (wrong.code, wrong.entries[0]["loc"]) == (Code.VALIDATION_ERROR, ["data", "task", "config", "files"])
    assert (gone.code, gone.status, "a reason of tomorrow" in gone.message) == (Code.SESSION_ERROR, 410, True)
    for error in (UnknownTask("Unknown task: x"), UpstreamTimeout("late")):
        refused = await refusal(error, environment(), store)
        assert (refused.code, refused.closes, refused.message) == (Code.EXECUTION_ERROR, False, error.detail)


ODD_TEXTS = ["x" * 3000, '"\\\n\x00é' * 600, "😀" * 1500, "\ud800" * 1500]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes 1,000 characters a large text. Returns the lengths of the slices that were written."""
    written: list[int] = []

    def write(text: str) -> str:
        written.append(len(text))
        return encode_basestring_ascii(text)

    monkeypatch.setattr(replies, "_LARGE_CHARS", 1000)
    monkeypatch.setattr(replies, "encode_basestring_ascii", write)
    return written


@pytest.mark.parametrize("text", ODD_TEXTS, ids=["plain", "escapes", "pairs", "surrogates"])
def test_a_large_text_is_written_once_for_all_its_places(text: str, small: list[int]) -> None:
    result = StepResult(blocks=(TextBlock(text),), reward=1.0, metadata={"text": "a", "nan": math.nan})

    called, acted = tool_reply("give", result), step_reply(result, {})
    frames = [json.loads(frame("observation", data)) for data in (called, acted)]

    assert sum(small) == 2 * len(text)
    for found, data in zip(frames, (called, acted), strict=True):
        data["metadata"]["nan"] = None  # JSON has no NaN
        assert found == {"type": "observation", "data": data}


@pytest.mark.parametrize("text", ODD_TEXTS, ids=["plain", "escapes", "pairs", "surrogates"])
def test_a_text_above_the_limit_of_a_frame_loses_its_end_and_says_so(
    text: str, small: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "REPLY_MAX_BYTES", 8_000)
    result = StepResult(blocks=(TextBlock(text),), reward=1.0)

    reply = frame("observation", tool_reply("give", result))
    found = json.loads(reply)["data"]

    kept, _, note = found["observation"]["result"]["data"].rpartition("\n[")
    assert text.startswith(kept)
    assert note.startswith(f"{len(text) - len(kept)} characters left out")
    assert len(encode_basestring_ascii(kept)) > 1500
    assert len(reply) <= 8_000
    assert found["observation"]["result"]["content"][0]["text"] == found["observation"]["result"]["data"]
    assert found["reward"] == 1.0


def test_a_text_that_stands_once_may_be_as_long_as_the_reply(small: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "REPLY_MAX_BYTES", 4_000)

    reply = frame("observation", step_reply(StepResult(blocks=(TextBlock("x" * 3_500),)), {}))

    assert json.loads(reply)["data"]["observation"]["text"] == "x" * 3_500

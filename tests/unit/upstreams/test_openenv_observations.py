"""What agents see of an OpenEnv server's observations: every field, unless it is hidden."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.environment import ObservationMapping
from gateway.core.episode import Block, ImageBlock, StepResult, TextBlock
from gateway.core.errors import UpstreamError
from gateway.upstreams.openenv import observations
from gateway.upstreams.openenv.observations import EMPTY, NUMBERS_MAX
from tests.unit.upstreams.test_openenv_frames import observed

ALL = ObservationMapping()
PIXELS = [[[row, column, 255] for column in range(10)] for row in range(8)]
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(60)).decode()


def step_result(reply: bytes, mapping: ObservationMapping = ALL) -> StepResult:
    return observations.step_result(reply, mapping)


def first_blocks(reply: bytes, mapping: ObservationMapping = ALL) -> list[Block]:
    return observations.first_blocks(reply, mapping)


def seen(observation: Any, mapping: ObservationMapping = ALL, **more: Any) -> list[str]:
    """Return what an agent sees after a step: texts, and the type of each image."""
    blocks = step_result(observed(observation, **more), mapping).blocks
    return [block.text if isinstance(block, TextBlock) else block.mime_type for block in blocks]


def pixels(block: Block) -> tuple[int, int, list[list[int]]]:
    """Return the width and height of a PNG image, and the bytes of each of its rows. Check its checksums."""
    assert isinstance(block, ImageBlock)
    assert block.mime_type == "image/png"
    data, chunks, at = base64.b64decode(block.data), dict[bytes, bytes](), 8
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", data, at + 8 + size) == (zlib.crc32(name + body),)
        chunks[name], at = body, at + 12 + size
    width, height, bits, _, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (bits, rest) == (8, [0, 0, 0])
    lines = zlib.decompress(chunks[b"IDAT"])
    each = len(lines) // height
    rows = [lines[row * each : (row + 1) * each] for row in range(height)]
    assert all(row[0] == 0 for row in rows), "no row has a filter"
    return width, height, [list(row[1:]) for row in rows]


# -- texts ------------------------------------------------------------------------------------------------------------


def test_an_observation_becomes_a_result_with_text_data_and_metadata() -> None:
    result = step_result(observed({"text": "hi", "n": 1, "metadata": {"a": 1}}, reward=1, metadata={"b": 2}))

    assert result == StepResult(
        blocks=(TextBlock("hi\n\nn: 1\nmetadata.a: 1\nmetadata.b: 2"),),
        reward=1.0,
        metadata={"a": 1, "b": 2},
        data={"text": "hi", "n": 1},
    )


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        pytest.param({"message": "m", "text": "", "error": None, "moves": [], "more": {}}, "m", id="others are empty"),
        pytest.param({"stdout": "é", "exit_code": 0}, '{"stdout":"é","exit_code":0}', id="no usual text"),
        pytest.param({}, EMPTY, id="nothing"),
        pytest.param({"text": "", "metadata": {"n": None}}, EMPTY, id="only empty fields"),
        pytest.param(
            {"prompt": "Guess.", "messages": [{"content": "Higher."}], "current_player_id": 0},
            'Guess.\n\nmessages: [{"content":"Higher."}]\ncurrent_player_id: 0',
            id="a game with messages",
        ),
        pytest.param({"question": "Why?", "context": "Two\nlines."}, "Why?\n\ncontext:\nTwo\nlines.", id="a context"),
        pytest.param({"x": 1, "y": 0, "message": "Go on."}, "Go on.\n\nx: 1\ny: 0", id="a grid"),
        pytest.param(
            {"board": [[0, 1]], "metadata": {"next_player": 2}},
            '{"board":[[0,1]],"metadata.next_player":2}',
            id="a board",
        ),
    ],
)
def test_every_field_that_says_something_is_seen(observation: Any, text: str) -> None:
    assert seen(observation) == [text]


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
    lambda name: name not in ("metadata", "tool_name")
)
VALUES = st.integers() | st.text(st.sampled_from("abc é"), min_size=1) | st.lists(st.integers(), min_size=1, max_size=4)


@given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_no_value_is_left_out(observation: dict[str, Any]) -> None:
    text = "".join(seen(observation))

    for value in observation.values():
        assert (value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))) in text


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        (ObservationMapping(text=("context", "question")), "Fever.\n\nWhat?\n\nturn: 1\nmetadata.id: 7"),
        (ObservationMapping(text=("context", "question"), hide=("turn", "metadata")), "Fever.\n\nWhat?"),
        (ObservationMapping(hide=("metadata.id", "context", "unknown")), "What?\n\nturn: 1"),
        (ObservationMapping(text=("unknown",), hide=("metadata",)), '{"context":"Fever.","question":"What?","turn":1}'),
    ],
)
def test_an_environment_chooses_the_order_and_what_is_hidden(mapping: ObservationMapping, text: str) -> None:
    observation = {"context": "Fever.", "question": "What?", "turn": 1, "metadata": {"id": 7}}

    assert seen(observation, mapping) == [text]
    assert step_result(observed(observation), mapping).data == {"context": "Fever.", "question": "What?", "turn": 1}


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"goal": "Win.", "text": "board"}, "Win.\n\nboard"),
        ({"goal": "Win.", "text": "Win. board"}, "Win. board\n\ngoal: Win."),
        ({"instruction": "Win.", "n": 1}, "Win.\n\nn: 1"),
        ({}, EMPTY),
    ],
)
def test_the_first_observation_starts_with_the_goal_and_includes_its_data(observation: Any, text: str) -> None:
    assert first_blocks(observed(observation)) == [TextBlock(text, {"observation": observation})]


@pytest.mark.parametrize(
    ("prompt", "blocks"),
    [
        ("Who owns the zebra?", ["Who owns the zebra?"]),
        (
            [{"type": "text", "text": "Look:"}, {"type": "image", "data": PNG, "mimeType": "image/png"}],
            ["Look:", "image/png"],
        ),
        (
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Go."}]},
            ],
            ["[system]", "Be brief.", "[user]", "Go."],
        ),
    ],
)
def test_a_prompt_in_the_metadata_is_seen(prompt: Any, blocks: list[str]) -> None:
    found = first_blocks(observed({"metadata": {"prompt": prompt, "left": 3}}))

    texts = [block.text if isinstance(block, TextBlock) else block.mime_type for block in found]
    assert "\n\n".join(texts) == "\n\n".join([*blocks, "metadata.left: 3"])


# -- images and arrays ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("observation", "left"),
    [
        pytest.param({"images": [{"data": PNG, "mime_type": "image/png"}], "x": 1}, '{"x":1}', id="with its type"),
        pytest.param({"screenshot": PNG, "x": 1}, '{"x":1}', id="base64"),
        pytest.param({"screenshot": f"data:image/png;base64,{PNG}", "x": 1}, '{"x":1}', id="an URL"),
        pytest.param({"seen": {"picture": PNG, "n": 1}}, '{"seen":{"picture":"[an image]","n":1}}', id="in an object"),
        pytest.param({"screen": PIXELS, "x": 1}, '{"x":1}', id="rows of pixels"),
        pytest.param(
            {"screen": [value for row in PIXELS for pixel in row for value in pixel], "screen_shape": [8, 10, 3]},
            '{"screen_shape":[8,10,3]}',
            id="pixels without rows",
        ),
    ],
)
def test_images_become_blocks_and_are_in_no_text_and_no_data(observation: Any, left: str) -> None:
    result = step_result(observed(observation))

    assert seen(observation) == [left, "image/png"]
    assert PNG not in json.dumps(result.data)
    assert len(json.dumps(result.data)) < 200


@pytest.mark.parametrize("alpha", [[], [128]])
def test_pixels_are_the_image_that_an_agent_sees(alpha: list[int]) -> None:
    screen = [[[*pixel, *alpha] for pixel in row] for row in PIXELS]

    (block,) = step_result(observed({"screen": screen})).blocks

    assert pixels(block) == (10, 8, [[value for pixel in row for value in pixel] for row in screen])


def test_gray_values_are_an_image_only_if_the_environment_says_so() -> None:
    rows = [[row * 10 + column for column in range(9)] for row in range(8)]

    (text,) = seen({"board": rows})
    (block,) = step_result(observed({"board": rows}), ObservationMapping(images=("board",))).blocks

    assert json.loads(text) == {"board": rows}
    assert pixels(block) == (9, 8, rows)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        pytest.param([0] * (NUMBERS_MAX + 1), f"[{NUMBERS_MAX + 1} numbers, left out]", id="long"),
        pytest.param([[0.5] * 100] * 100, "[100 x 100 numbers, left out]", id="rows"),
        pytest.param([[[300, 0, 0]] * 20] * 20, "[20 x 20 x 3 numbers, left out]", id="no pixels"),
        pytest.param([0] * NUMBERS_MAX, [0] * NUMBERS_MAX, id="short"),
        pytest.param(["x"] * 2000, ["x"] * 2000, id="texts"),
    ],
)
def test_a_long_array_of_numbers_is_marked_as_left_out_in_text_and_data(value: Any, shown: Any) -> None:
    result = step_result(observed({"values": value, "n": 1}))

    assert result.data == {"values": shown, "n": 1}
    assert seen({"values": value, "n": 1}) == [json.dumps({"values": shown, "n": 1}, separators=(",", ":"))]


def test_a_hidden_image_is_not_seen() -> None:
    assert seen({"screen": PIXELS, "text": "Go."}, ObservationMapping(hide=("screen",))) == ["Go."]


# -- tools ------------------------------------------------------------------------------------------------------------


def called(result: Any = None, error: Any = None, **more: Any) -> StepResult:
    return step_result(observed({"tool_name": "t", "result": result, "error": error}, **more))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("tool_not_found", "not_found"),
        ("invalid_args", "input_validation"),
        ("timeout", "tool_error"),
        ("", "tool_error"),
    ],
)
def test_a_tool_that_failed_says_why(kind: str, reason: str) -> None:
    result = called(error={"error_type": kind, "message": "no"})

    assert (result.error, result.reason) == ("no", reason)


def test_a_failure_that_ends_the_episode_keeps_its_reward_and_end() -> None:
    result = called(error={"error_type": "timeout", "message": "no"}, reward=-1.0, done=True)

    assert (result.error, result.blocks, result.reward, result.finished) == (None, (TextBlock("no"),), -1.0, True)


@pytest.mark.parametrize(
    ("result", "blocks"),
    [
        ("plain", (TextBlock("plain"),)),
        ({"data": [1]}, (TextBlock("[1]"),)),
        (
            {
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "image", "data": "aGk=", "mimeType": "image/gif"},
                    {"x": 1},
                ]
            },
            (TextBlock("a"), ImageBlock("aGk=", "image/gif"), TextBlock('{"x":1}')),
        ),
        ({"blocks": [{"type": "text", "text": "a"}], "reward": None}, (TextBlock("a"),)),
        ([{"x": 1}, {"x": 2}], (TextBlock('[{"x":1},{"x":2}]'),)),
    ],
)
def test_a_tools_result_becomes_blocks(result: Any, blocks: tuple[Any, ...]) -> None:
    assert called(result).blocks == blocks


def test_what_comes_beside_a_tools_result_is_seen_too() -> None:
    observation = {"tool_name": "t", "result": "done", "error": None, "left": 2, "metadata": {"lives": 3}}

    assert seen(observation) == ["done", "left: 2\nmetadata.lives: 3"]
    assert seen(observation, ObservationMapping(hide=("left", "metadata"))) == ["done"]


def test_a_result_marked_as_an_error_is_an_error() -> None:
    result = called({"content": [{"type": "text", "text": "no"}], "is_error": True})

    assert (result.error, result.reason) == ("no", "tool_error")


@pytest.mark.parametrize(
    "reply",
    [
        b"nonsense",
        b'{"type":"state","data":{}}',
        observed([]),
        observed({}, reward="1"),
        b'{"type":"observation","data":{"observation":{},"reward":NaN,"done":false}}',
        b'{"type":"error","data":{"message":"gone","code":"SESSION_ERROR"}}',
    ],
)
def test_a_reply_that_is_not_a_result_is_an_error(reply: bytes) -> None:
    with pytest.raises(UpstreamError):
        step_result(reply)

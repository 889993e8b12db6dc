"""Event streams: clients' parsers lose nothing, and no line is too long."""

import json

import pytest
from envserver.http import responses
from envserver.http.json_text import encode
from hypothesis import given
from hypothesis import strategies as st

from tests.envserver.raw import events

LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
RAW_WHITE_SPACE = [chr(code) for code in range(0x20, 0x3001) if chr(code).isspace()]


def through_client(frames: bytes) -> str:
    """Read a result as the official clients do, which strip all white space before the data."""
    data = []
    for line in frames.decode().split("\n"):
        if line.startswith("data:"):
            data.append(line[len("data:") :].strip("\r").lstrip())
    return "".join(data)


def test_twenty_kinds_of_white_space_are_unescaped_in_json() -> None:
    assert len(RAW_WHITE_SPACE) == 20


@given(st.text(alphabet=[*RAW_WHITE_SPACE, "a", "é", "😀", "\n", '"', "\\"], max_size=60), st.integers(1, 9))
def test_no_slice_starts_with_white_space_and_nothing_is_lost(text: str, size: int) -> None:
    written = encode({"text": text}).decode()

    slices = responses.safe_slices(written, size=size, longest=size + 5)

    assert not any(part[0].isspace() for part in slices)
    assert json.loads("".join(slices)) == {"text": text}


@pytest.mark.parametrize("character", [*RAW_WHITE_SPACE, "\t", "\x1f"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_white_space_at_a_cut_survives_the_clients(character: str, position: int) -> None:
    text = "x" * (responses.SLICE_CHARS - len('{"text":"') - position) + character * 3 + "y" * 5000

    frames = responses.sse_result(encode({"text": text}))

    assert json.loads(through_client(frames)) == {"text": text}


@pytest.mark.parametrize("character", [" ", "\u3000", "é", "😀"])
def test_twenty_thousand_equal_characters_survive_in_short_lines(character: str) -> None:
    frames = responses.sse_result(encode({"text": character * 20_000}))

    assert json.loads(through_client(frames)) == {"text": character * 20_000}
    assert max(map(len, frames.split(b"\r\n"))) <= 65_536


@pytest.mark.parametrize("size", [1, responses.SLICE_CHARS])
@pytest.mark.parametrize("end", LINE_ENDS, ids=ascii)
def test_a_client_that_splits_at_any_line_end_reads_the_whole_result(end: str, size: int) -> None:
    value = {"text": f"a\\{end}b" * size}

    lines = responses.sse_result(encode(value)).decode().splitlines()

    assert all(line.startswith(("event: ", "data: ")) for line in lines if line)
    assert json.loads("".join(line.removeprefix("data: ") for line in lines if line.startswith("data: "))) == value


def test_a_small_result_is_one_event() -> None:
    assert responses.sse_result(b'{"ok":true}') == b'event: end\r\ndata: {"ok":true}\r\n\r\n'


def test_a_result_one_character_longer_than_a_slice_is_two_events() -> None:
    payload = encode("x" * (responses.SLICE_CHARS - 1))

    assert [name for name, _ in events(responses.sse_result(payload))] == ["chunk", "end"]


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("", [""]),
        ("one", ["one"]),
        ("one\ntwo\r\nthree\rfour", ["one", "two", "three", "four"]),
        ("end\n", ["end", ""]),
        (LINE_ENDS, [""] * (len(LINE_ENDS) + 1)),
        ("x" * 20_000, ["x" * 16_384, "x" * 3_616]),
        ("\ud800", ["?"]),
    ],
)
def test_an_error_has_a_data_line_for_each_line(text: str, data: list[str]) -> None:
    frames = responses.sse_error(text)

    assert frames.decode() == "event: error\r\n" + "".join(f"data: {line}\r\n" for line in data) + "\r\n"

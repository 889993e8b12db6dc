"""Server-sent events, as the ORS SDKs read them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core import sse
from gateway.core.json_text import dump

LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


@pytest.mark.parametrize(
    ("name", "data", "wire"),
    [
        ("task_id", "abc", b"event: task_id\r\ndata: abc\r\n\r\n"),
        ("end", "", b"event: end\r\ndata: \r\n\r\n"),
        ("error", "one\ntwo", b"event: error\r\ndata: one\r\ndata: two\r\n\r\n"),
        ("error", "one\r\ntwo\r", b"event: error\r\ndata: one\r\ndata: two\r\ndata: \r\n\r\n"),
        ("error", "one\n\ntwo", b"event: error\r\ndata: one\r\ndata: \r\ndata: two\r\n\r\n"),
        ("error", "é €", "event: error\r\ndata: é €\r\n\r\n".encode()),
    ],
)
def test_an_event_has_its_name_and_one_data_field_for_each_line(name: str, data: str, wire: bytes) -> None:
    assert sse.event(name, data) == wire


@given(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(LINE_ENDS)))
def test_no_data_can_escape_from_its_event(data: str) -> None:
    head, *lines, last = sse.event("error", data).decode().splitlines()

    assert (head, last) == ("event: error", "")
    assert lines
    assert all(line.startswith("data: ") for line in lines)


@pytest.mark.parametrize(
    ("stream", "read"),
    [
        (b"event: task_id\ndata: a\n\nevent: chunk\ndata: 1\n\nevent: end\nid: 7\ndata: 2\n\n", ("a", "end", "12", 7)),
        (b"event: chunk\r\ndata: 1\r\n\r\nevent: end\r\ndata: 2", ("", "chunk", "1", 0)),
        (b"event: chunk\ndata: 1\n\nevent: error\nid: 2\ndata: a\ndata: b\n\n", ("", "error", "a\nb", 2)),
        (b"event: end\nid: +1\ndata: 1\n\n", ("", "end", "1", 0)),
        (b"event: end\nid: 9999999999\ndata: 1\n\n", ("", "end", "1", 0)),
        (b"event: end\ndata: \xff\n\n", ("", "error", "the worker's stream is not UTF-8", 0)),
        (b": ping\n\n", ("", "", "", 0)),
    ],
)
def test_the_stream_of_a_call_is_read_as_far_as_it_came(stream: bytes, read: tuple[str, str, str, int]) -> None:
    assert sse.read_result(stream) == read


@pytest.mark.parametrize("size", [1, sse.SLICE_CHARS])
@pytest.mark.parametrize("end", LINE_ENDS, ids=ascii)
def test_a_client_that_splits_at_any_line_end_reads_the_whole_result(end: str, size: int) -> None:
    value = {"text": f"a\\{end}b" * size}

    lines = sse.result(dump(value)).decode().splitlines()

    assert all(line.startswith(("event: ", "data: ")) for line in lines if line)
    assert json.loads("".join(line.removeprefix("data: ") for line in lines if line.startswith("data: "))) == value


def test_a_lone_surrogate_in_a_message_causes_no_crash() -> None:
    assert sse.event("error", "half \ud800").startswith(b"event: error\r\ndata: half ")


def test_a_stream_is_neither_cached_nor_buffered() -> None:
    headers = dict(sse.HEADERS)

    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"

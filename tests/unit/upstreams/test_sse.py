"""Server-sent events, as the ORS SDKs read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstreams import sse


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


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_no_data_can_escape_from_its_event(data: str) -> None:
    head, *lines, last, end = sse.event("error", data).decode().split("\r\n")

    assert (head, last, end) == ("event: error", "", "")
    assert lines
    assert all(line.startswith("data: ") for line in lines)
    assert all("\n" not in line and "\r" not in line for line in lines)


def test_a_lone_surrogate_in_a_message_causes_no_crash() -> None:
    assert sse.event("error", "half \ud800").startswith(b"event: error\r\ndata: half ")


def test_a_stream_is_neither_cached_nor_buffered() -> None:
    headers = dict(sse.HEADERS)

    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"

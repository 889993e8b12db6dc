"""Finding a command's output between marks, however the terminal's bytes are split."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.envs.os_sandboxes import os_module

marks = os_module("os_marks")


def printed(mark: Any, *, status: int = 0, pid: int = 7, end: bytes = b"\n") -> bytes:
    """Return the bytes that a shell prints for the mark's line."""
    halves = re.findall(r" ([0-9a-f]{12})", mark.line)
    return end + f"{halves[0]}{halves[1]}:{status}:{pid}:".encode() + end


def test_the_output_precedes_the_mark() -> None:
    mark = marks.Mark()
    capture = marks.Capture(mark)

    found = capture.feed(b"31\n" + printed(mark, status=2, pid=40) + b"$ ")

    assert (found.status, found.shell_pid, capture.output) == (2, 40, b"31\n")


def test_only_the_marks_own_newline_is_cut() -> None:
    mark = marks.Mark()
    capture = marks.Capture(mark)

    capture.feed(b"no newline" + printed(mark, end=b"\r\n"))

    assert capture.output == b"no newline"


def test_an_echo_of_the_typed_line_is_not_a_mark() -> None:
    mark = marks.Mark()
    capture = marks.Capture(mark)

    assert capture.feed(mark.line.encode() + b"\r\n") is None


def test_the_mark_of_another_command_does_not_count() -> None:
    old, new = marks.Mark(), marks.Mark()
    capture = marks.Capture(new)

    assert capture.feed(printed(old)) is None


def test_a_word_that_looks_like_a_mark_is_not_a_mark() -> None:
    capture = marks.Capture(marks.Mark())

    assert capture.feed(b"\n0123456789ab0123456789ab:0:7:\n") is None


def test_a_mark_is_found_after_its_own_word_without_numbers() -> None:
    mark = marks.Mark()
    capture = marks.Capture(mark)
    word = printed(mark)[1:25]

    found = capture.feed(word + b"\n" + word + b":0:\r\n" + printed(mark, status=3) + b"\n")

    assert found is not None
    assert (found.status, capture.output) == (3, word + b"\n" + word + b":0:\r\n")


@given(st.lists(st.integers(1, 40), max_size=60), st.binary(max_size=900))
def test_the_split_of_the_bytes_makes_no_difference(cuts: list[int], output: bytes) -> None:
    mark = marks.Mark()
    capture = marks.Capture(mark)
    stream = output + printed(mark)

    for size in [*cuts, len(stream)]:
        capture.feed(stream[:size])
        stream = stream[size:]
        if capture.found is not None:
            break

    assert capture.found is not None
    assert capture.output == output.removesuffix(b"\r")  # together with the mark's own newline, it is one line end


def test_a_bounded_part_of_an_endless_output_is_kept_and_its_mark_is_still_found() -> None:
    mark = marks.Mark()
    capture = marks.Capture(mark)

    for _ in range(100):
        assert capture.feed(b"y\n" * 32_768) is None
    found = capture.feed(printed(mark))

    assert found is not None
    assert capture.output == b"y\n" * (marks.KEPT_BYTES // 2)
    assert capture.seen_bytes > 100 * 65_536

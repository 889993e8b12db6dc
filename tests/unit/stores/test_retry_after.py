"""The retry times and messages that both stores return to openings without a slot, as plain functions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gateway.stores.redis.client as client
from gateway.stores.retry_after import (
    GROUP_KEPT_S,
    LAST_CALL_S,
    MESSAGE_BYTES,
    PACE_KEPT_S,
    PACE_WEIGHT,
    bounded,
    mean,
    retry_after,
)


def test_the_lua_operations_use_the_same_constants() -> None:
    shared = Path(client.__file__).parent / "lua" / "shared"
    text = "".join((shared / f"{name}.lua").read_text() for name in ("admission", "groups"))

    numbers = dict(re.findall(r"^local ([A-Z_]+) = ([0-9.]+)$", text, re.MULTILINE))

    del numbers["LOOKED_AT"]  # the memory store scans all workers
    assert {name: float(value) for name, value in numbers.items()} == {
        "PACE_WEIGHT": PACE_WEIGHT,
        "PACE_KEPT_S": PACE_KEPT_S,
        "GROUP_KEPT_MS": 1000 * GROUP_KEPT_S,
        "LAST_CALL_MS": 1000 * LAST_CALL_S,
    }


def test_the_first_interval_is_taken_as_the_pace() -> None:
    assert mean(None, 7.0, 1) == mean(None, 7.0, 5) == 7.0


def test_slots_that_arrive_together_weigh_as_much_as_consecutive_slots() -> None:
    one_by_one = 10.0
    for _ in range(3):
        one_by_one = mean(one_by_one, 2.0, 1)

    assert mean(10.0, 2.0, 3) == pytest.approx(one_by_one)
    assert 2.0 < one_by_one < 10.0


@pytest.mark.parametrize(("interval_s", "counts_as_s"), [(-5.0, 0.0), (0.0, 0.0), (1e9, PACE_KEPT_S)])
def test_an_interval_counts_as_at_least_zero_and_at_most_the_kept_time(interval_s: float, counts_as_s: float) -> None:
    assert mean(None, interval_s, 1) == counts_as_s


@pytest.mark.parametrize(
    ("place", "pace_s", "told_s"),
    [(1, None, 0.0), (1, 0.0, 1.0), (3, 0.1, 1.0), (3, 2.5, 7.5), (1000, 2.5, 300.0)],
)
def test_the_retry_time_is_between_one_second_and_five_minutes(place: int, pace_s: float | None, told_s: float) -> None:
    assert retry_after(place, pace_s) == told_s


@pytest.mark.parametrize("text", ["", "short", "x" * MESSAGE_BYTES, "é" * (MESSAGE_BYTES // 2), "\udc80"])
def test_a_message_that_is_short_enough_stays_unchanged(text: str) -> None:
    assert bounded(text) == text


@pytest.mark.parametrize("letter", ["x", "é", "€", "𝄞", "\udc80"])
@pytest.mark.parametrize("shift", range(4))
def test_a_message_that_is_too_long_is_cut_between_characters(letter: str, shift: int) -> None:
    cut = bounded("a" * shift + letter * (MESSAGE_BYTES + 1) + "b" * shift)

    assert len(cut.encode()) <= MESSAGE_BYTES
    head, tail = cut.split(" … ")
    assert set(head) <= {"a", letter}
    assert set(tail) <= {"b", letter}

"""The memory store's deadlines: the earliest comes first, and renewals need no more memory."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.stores.memory.queue import SLACK, Deadlines


def popped(deadlines: Deadlines[str], now: float) -> list[tuple[str, float]]:
    found = []
    while (entry := deadlines.pop(now)) is not None:
        found.append(entry)
    return found


def test_keys_are_popped_earliest_first_and_only_when_due() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for key, at in [("c", 3.0), ("a", 1.0), ("d", 4.0), ("b", 2.0)]:
        deadlines.set(key, at)

    assert popped(deadlines, 3.0) == [("a", 1.0), ("b", 2.0), ("c", 3.0)]
    assert popped(deadlines, 3.9) == []
    assert len(deadlines) == 1
    assert "d" in deadlines


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(5.0, 20.0, id="a later second deadline"),
        pytest.param(20.0, 5.0, id="an earlier second deadline"),
        pytest.param(5.0, 5.0, id="the same deadline"),
    ],
)
def test_a_key_has_the_last_deadline_that_was_set(first: float, second: float) -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", first)
    deadlines.set("b", 10.0)

    deadlines.set("a", second)

    assert deadlines.at("a") == second
    assert popped(deadlines, 99.0) == sorted([("a", second), ("b", 10.0)], key=lambda entry: entry[1])


def test_a_discarded_key_is_never_popped_and_may_be_set_again() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 1.0)
    deadlines.discard("a")
    deadlines.discard("never there")
    assert popped(deadlines, 99.0) == []

    deadlines.set("a", 7.0)

    assert popped(deadlines, 6.0) == []
    assert popped(deadlines, 7.0) == [("a", 7.0)]


def test_renewing_and_replacing_keys_repeatedly_needs_no_more_memory() -> None:
    deadlines: Deadlines[str] = Deadlines()
    keys = [f"k{n}" for n in range(10)]

    for turn in range(1000):
        for key in keys:
            deadlines.set(key, 1e6 + turn)  # renewed
            deadlines.set(key, 1e6 - turn)  # moved to the front, which needs a new entry

    assert len(deadlines._heap) <= 2 * len(keys) + SLACK + 1
    assert len(popped(deadlines, 2e6)) == 10


@settings(derandomize=os.environ.get("CI") == "true")
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), st.sampled_from("abcdef"), st.integers(0, 50)),
            st.tuples(st.just("discard"), st.sampled_from("abcdef"), st.just(0)),
            st.tuples(st.just("pop"), st.just(""), st.integers(0, 50)),
        ),
        max_size=60,
    )
)
def test_deadlines_behave_like_a_sorted_dictionary(steps: list[tuple[str, str, int]]) -> None:
    deadlines: Deadlines[str] = Deadlines()
    naive: dict[str, float] = {}

    for verb, key, number in steps:
        if verb == "set":
            deadlines.set(key, float(number))
            naive[key] = float(number)
        elif verb == "discard":
            deadlines.discard(key)
            naive.pop(key, None)
        else:
            entry = deadlines.pop(float(number))
            passed = {at for at in naive.values() if at <= number}
            if entry is None:
                assert not passed
            else:
                assert entry[1] == naive.pop(entry[0]) == min(passed)
        assert len(deadlines) == len(naive)
        assert all(deadlines.at(key) == at for key, at in naive.items())

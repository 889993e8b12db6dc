"""Differences between a recorded result and its replay."""

from __future__ import annotations

import base64
import hashlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.frontends.admin.comparison import COMPARED, END, EXCERPT_CHARS, REWARD, TEXT, differences

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(list(COMPARED)), JSON))
def test_a_result_does_not_differ_from_itself(result: dict[str, Any]) -> None:
    assert list(differences(result, result)) == []


@pytest.mark.parametrize(
    ("recorded", "replayed", "found"),
    [
        ({"reward": 1.0}, {"reward": 0.0}, [(REWARD, "reward", 1.0, 0.0)]),
        ({"reward": 0.0}, {}, [(REWARD, "reward", 0.0, None)]),
        ({"reward": 1}, {"reward": 1.0}, []),
        ({"reward": math.nan}, {"reward": math.nan}, []),
        ({"finished": True}, {"finished": False}, [(END, "finished", True, None)]),
        ({"data": {"ok": True}}, {"data": {"ok": 1}}, [(TEXT, "data.ok", True, 1)]),
        ({"observation": {"a": [1, 2]}}, {"observation": {"a": [1]}}, [(TEXT, "observation.a[1]", 2, None)]),
        ({"blocks": [{"text": "a"}]}, {"blocks": [{"text": "b"}]}, [(TEXT, "blocks[0].text", "a", "b")]),
        ({"blocks": [{"text": "a"}]}, {"blocks": "a"}, [(TEXT, "blocks", [{"text": "a"}], "a")]),
        ({"error": "x: y"}, {}, [(TEXT, "error", "x: y", None)]),
    ],
)
def test_each_value_that_differs_is_named(recorded: Any, replayed: Any, found: Any) -> None:
    assert list(differences(recorded, replayed)) == found


@pytest.mark.parametrize(
    ("recorded", "replayed"),
    [
        ({"finished": False, "reward": None, "blocks": [], "data": {}}, {}),
        ({"metadata": {"at": 1}, "turn": 1}, {"metadata": {"at": 2}, "turn": 2}),
    ],
)
def test_absent_values_and_values_beside_the_observation_do_not_differ(recorded: Any, replayed: Any) -> None:
    assert list(differences(recorded, replayed)) == []
    assert list(differences(replayed, recorded)) == []


def test_long_texts_are_cut_around_the_first_difference() -> None:
    same = "-x" * 5_000
    ((_, path, recorded, replayed),) = differences({"text": f"{same}one{same}"}, {"text": f"{same}two{same}"})

    assert path == "text"
    assert "xone" in recorded
    assert "xtwo" in replayed
    assert len(recorded) == len(replayed) == EXCERPT_CHARS + 2
    ((_, _, recorded, replayed),) = differences({"text": same}, {"text": same + "end"})
    assert (recorded[-1], replayed[-3:]) == ("x", "end")


PICTURE = bytes(range(256)) * 20
OTHER = PICTURE[1:] + b"x"


def whole(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


def stored(picture: bytes) -> str:
    return f"blob:sha256:{hashlib.sha256(picture).hexdigest()}"


@pytest.mark.parametrize("form", ["{}", "data:image/png;base64,{}", '{{"image": "{}", "at": "\ud800"}}'])
def test_a_picture_is_the_same_whether_the_log_found_it_in_one_piece_or_in_chunks(form: str) -> None:
    """The chunks of a stream hide a picture from the log."""
    one, other = ({"blocks": [{"image": form.format(text)}]} for text in (whole(PICTURE), stored(PICTURE)))
    assert list(differences(one, other)) == list(differences(other, one)) == []

    another = {"blocks": [{"image": form.format(whole(OTHER))}]}
    for known in (one, other):
        ((kind, path, recorded, replayed),) = differences(known, another)
        assert (kind, path) == (TEXT, "blocks[0].image")
        assert (stored(PICTURE) in recorded, stored(OTHER) in replayed) == (True, True)

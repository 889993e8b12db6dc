"""JSON as the server writes it, also for values that JSON does not allow."""

import json
import math
from enum import Enum
from typing import Any

import pytest
from envserver import Task
from envserver.http import json_text
from envserver.http.json_text import canonical, encode
from hypothesis import given
from hypothesis import strategies as st


class Size(Enum):
    BIG = "big"


class Array:
    """Has `tolist`, as numpy's arrays and numbers do."""

    def __init__(self, plain: object) -> None:
        self._plain = plain

    def tolist(self) -> object:
        return self._plain


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, 2.0, True, None], "é": "ü\n"}, '{"a":[1,2.0,true,null],"é":"ü\\n"}'),
        ({"a": math.nan, "b": [math.inf, (-math.inf, 1.5)]}, '{"a":null,"b":[null,[null,1.5]]}'),
        ("\ud800é", '"\\ud800\\u00e9"'),
        (Size.BIG, '"big"'),
        ({2, 1}, "[1,2]"),
        (Task({"q": 1}), '{"q":1}'),
        (Array([1, math.nan]), "[1,null]"),
        ({"a": math.nan, "b": Task({"q": Size.BIG})}, '{"a":null,"b":{"q":"big"}}'),
    ],
)
def test_values_are_written_as_json(value: object, text: str) -> None:
    assert encode(value) == text.encode()


@pytest.mark.parametrize("value", [object(), {"a": object()}, b"bytes", [math.nan, object()]])
def test_a_value_without_a_json_form_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="has no JSON form"):
        encode(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)

    with pytest.raises(ValueError, match="Circular"):
        encode(loop)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@given(JSON)
def test_json_values_survive_writing_and_reading(value: Any) -> None:
    assert json.loads(encode(value)) == value


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=5))
def test_the_order_of_keys_makes_no_difference_to_the_canonical_text(value: dict[str, Any]) -> None:
    assert canonical(value) == canonical(dict(reversed(value.items())))


def test_true_and_1_have_different_canonical_texts() -> None:
    assert canonical([True]) != canonical([1]) != canonical([1.0])


def test_a_task_is_a_frozen_mapping() -> None:
    task = Task({"id": 7, "q": "x"})

    assert (task.id, task["q"], task.get("hint"), list(task), len(task)) == ("7", "x", None, ["id", "q"], 2)
    assert task == {"id": 7, "q": "x"}
    task.spec["q"] = "y"
    assert task["q"] == "x"
    assert Task({"task_id": "a"}).id == "a"
    assert Task({}, task_id="train-3").id == "train-3"
    assert Task({}).id is None


@given(texts=st.lists(st.text(max_size=60), max_size=4), more=st.dictionaries(st.text(max_size=5), st.integers()))
def test_a_result_with_long_texts_is_written_as_any_other(texts: list[str], more: dict[str, int]) -> None:
    blocks = [{"type": "text", "text": text, "detail": more} for text in texts] + [{"type": "image", "data": "aa"}]
    output = {"blocks": blocks, "reward": 0.5, "metadata": more}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "LONG_CHARS", 7)
        written = json_text.encode_result(output)

    assert json.loads(written) == {"ok": True, "output": output}

"""The validators and schemas in comparison with pydantic, whose texts the reference servers send."""

import dataclasses
import json
import math
import re
from enum import Enum
from typing import Annotated, Any, Literal, NotRequired

import pydantic
import pytest
from envserver.errors import ConfigError
from envserver.schema.signatures import node_of
from envserver.schema.validators import Fault
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import TypedDict


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.5
    tags: list[str] = dataclasses.field(default_factory=list)


class Person(TypedDict):
    name: str
    age: NotRequired[int]


VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    2,
    -7,
    1.0,
    2.5,
    "",
    "1",
    " 1",
    "1.0",
    "2.5",
    "x",
    "true",
    "ON",
    "red",
    "a",
    [],
    [1],
    ["a"],
    ["a", 1],
    [1, 2, 3],
    {},
    {"x": 1},
    {"x": "2", "y": 3, "tags": ["t"], "more": 1},
    {"x": 2.5, "tags": [1]},
    {"name": "n", "age": "3"},
    {"name": 1},
    {"a": [1]},
]
ANNOTATIONS: list[Any] = [
    str,
    int,
    float,
    bool,
    None,
    Any,
    list[int],
    list,
    dict[str, int],
    dict,
    tuple[int, str],
    Literal["a", "b"],
    Literal["a", 1],
    Literal["a", True],
    Colour,
    int | None,
    int | str,
    int | list[str],
    list[int | None],
    Point,
    list[Point],
    Person,
    Annotated[str, "described"],
    dict[str, list[int]],
]


def ours(annotation: Any, value: Any) -> tuple[Any, list[Fault]]:
    faults: list[Fault] = []
    checked = node_of(annotation, "here").check(value, (), faults)
    return checked, faults


def theirs(annotation: Any, value: Any) -> tuple[Any, list[Any]]:
    try:
        checked = pydantic.TypeAdapter(annotation).validate_python(value)
    except pydantic.ValidationError as error:
        keys = ("type", "loc", "msg", "input")
        return value, [{key: entry[key] for key in keys} for entry in error.errors(include_url=False)]  # type: ignore[literal-required]  # the keys are those
    return checked, []


@pytest.mark.parametrize("annotation", ANNOTATIONS, ids=str)
def test_values_are_accepted_and_refused_as_by_pydantic(annotation: Any) -> None:
    for value in VALUES:
        if annotation in (int | str, int | list[str]) and not _is_plain_union_case(annotation, value):
            continue

        checked, faults = ours(annotation, value)
        expected, their_faults = theirs(annotation, value)

        assert faults == their_faults, f"{value!r}"
        if not faults:
            assert (checked, type(checked)) == (expected, type(expected)), f"{value!r}"


def _is_plain_union_case(annotation: Any, value: Any) -> bool:
    """Return False for the cases in which pydantic names the branches of a union in its own way."""
    return not theirs(annotation, value)[1]


SCALARS = (
    st.integers(-(2**62), 2**62)
    | st.floats(-1e15, 1e15)
    | st.sampled_from([math.nan, math.inf, -math.inf])
    # Three oddities that no tool needs are excluded: pydantic reads "0-6" and "0_-6" as -6, and "1 .0" not as 1.
    | st.text("0123456789.+-eE naifyt\t\n", max_size=8).filter(lambda text: not re.search(r"0-|\s\.", text))
    | st.booleans()
    | st.none()
)


@given(SCALARS)
def test_scalars_are_accepted_and_refused_as_by_pydantic(value: Any) -> None:
    for annotation in (int, float, bool, str, int | None):
        checked, faults = ours(annotation, value)
        expected, their_faults = theirs(annotation, value)

        if their_faults and their_faults[0]["type"] == "finite_number":
            assert faults  # for numbers that no tool means, a refusal is enough
            continue
        assert [fault["type"] for fault in faults] == [fault["type"] for fault in their_faults], repr(value)
        if not faults:
            assert checked == expected or (math.isnan(checked) and math.isnan(expected))


@pytest.mark.parametrize("annotation", [*ANNOTATIONS, set[int], frozenset[str]], ids=str)
def test_schemas_equal_those_of_pydantic(annotation: Any) -> None:
    schema = node_of(annotation, "here").schema()

    expected = _plain(pydantic.TypeAdapter(annotation).json_schema())
    assert json.loads(json.dumps(schema)) == expected


def _plain(schema: Any) -> Any:
    """Remove titles and inline the definitions, as in the server's own schemas."""
    definitions = schema.pop("$defs", {}) if isinstance(schema, dict) else {}

    def walk(node: Any) -> Any:
        if isinstance(node, list):
            return [walk(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return walk(definitions[node["$ref"].rsplit("/", 1)[1]])
        found = {key: walk(value) for key, value in node.items() if not (key == "title" and isinstance(value, str))}
        found.pop("description", None)
        if found == {"type": "array", "items": {}, "default": []}:
            return found
        return found

    return walk(schema)


def test_unknown_keys_are_ignored_and_defaults_are_left_to_the_class() -> None:
    checked, faults = ours(Point, {"x": 1, "unknown": 2})

    assert not faults
    assert checked == Point(1, 0.5, [])


def test_an_unhashable_value_cannot_be_in_a_set() -> None:
    _, faults = ours(set[Any], [[1]])

    assert faults[0]["type"] == "set_item_not_hashable"


@pytest.mark.parametrize("annotation", [bytes, complex, 3, "int", Exception, int | bytes], ids=str)
def test_annotations_that_json_cannot_carry_are_refused(annotation: Any) -> None:
    with pytest.raises(ConfigError, match="here"):
        node_of(annotation, "here")


@dataclasses.dataclass
class Chain:
    next: "Chain | None" = None


def test_a_class_that_contains_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="contains itself"):
        node_of(Chain, "here")

"""ORS request bodies: each row of the protocol's table of validation errors is reproduced exactly."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from gateway.core.errors import InvalidRequest
from gateway.core.json_text import dump
from gateway.upstreams.ors_bodies import (
    CreateSession,
    OfRange,
    OfSplit,
    OfTask,
    Unprocessable,
    is_json,
    parse_json,
    read_secrets,
    validate,
    without_platform_keys,
)

JSON = "application/json"
NO_SOURCE = "Value error, Provide either task_spec or both split and index, not both/neither"
HALF = "Value error, split and index must both be provided together"


def entries(model: type[BaseModel], body: bytes, content_type: str | None = JSON) -> list[Any]:
    """Return the entries of the 422 answer to *body*, as sent over the wire."""
    with pytest.raises(Unprocessable) as refusal:
        validate(model, body, content_type)
    shown: list[Any] = json.loads(dump(list(refusal.value.entries)))
    return shown


def entry(kind: str, loc: list[str | int], msg: str, value: Any, **ctx: Any) -> dict[str, Any]:
    return {"type": kind, "loc": loc, "msg": msg, "input": value, **({"ctx": ctx} if ctx else {})}


def missing(name: str, body: Any) -> dict[str, Any]:
    return entry("missing", ["body", name], "Field required", body)


def no_object(value: Any) -> dict[str, Any]:
    text = "Input should be a valid dictionary or object to extract fields from"
    return entry("model_attributes_type", ["body"], text, value)


def broken_rule(text: str, body: Any) -> dict[str, Any]:
    return entry("value_error", ["body"], text, body, error={})


INT_TYPE = "Input should be a valid integer"
INT_PARSING = "Input should be a valid integer, unable to parse string as an integer"
INT_FRACTION = "Input should be a valid integer, got a number with a fractional part"


@pytest.mark.parametrize(
    ("model", "body", "expected"),
    [
        pytest.param(OfSplit, {}, [missing("split", {})], id="a key is missing"),
        pytest.param(
            OfTask, {"index": 1}, [missing("split", {"index": 1})], id="the input of a missing key is the whole body"
        ),
        pytest.param(OfTask, {}, [missing("split", {}), missing("index", {})], id="two keys are missing"),
        pytest.param(
            OfSplit,
            {"split": "a", "x": 1},
            [entry("extra_forbidden", ["body", "x"], "Extra inputs are not permitted", 1)],
            id="an unknown key",
        ),
        pytest.param(
            OfSplit,
            {"x": {"y": 1}},
            [
                missing("split", {"x": {"y": 1}}),
                entry("extra_forbidden", ["body", "x"], "Extra inputs are not permitted", {"y": 1}),
            ],
            id="a missing and an unknown key",
        ),
        pytest.param(
            OfSplit,
            {"split": 3},
            [entry("string_type", ["body", "split"], "Input should be a valid string", 3)],
            id="a number instead of a string",
        ),
        pytest.param(
            OfSplit,
            {"split": None},
            [entry("string_type", ["body", "split"], "Input should be a valid string", None)],
            id="null instead of a string",
        ),
        pytest.param(
            OfTask,
            {"split": "a", "index": None},
            [entry("int_type", ["body", "index"], INT_TYPE, None)],
            id="null instead of an index",
        ),
        pytest.param(
            OfTask,
            {"split": "a", "index": [1]},
            [entry("int_type", ["body", "index"], INT_TYPE, [1])],
            id="a list instead of an index",
        ),
        pytest.param(
            OfTask,
            {"split": "a", "index": "two"},
            [entry("int_parsing", ["body", "index"], INT_PARSING, "two")],
            id="a word instead of an index",
        ),
        pytest.param(
            OfTask,
            {"split": "a", "index": 2.5},
            [entry("int_from_float", ["body", "index"], INT_FRACTION, 2.5)],
            id="a fraction instead of an index",
        ),
        pytest.param(
            OfRange,
            {"split": "a", "start": "x", "stop": 0.5},
            [
                entry("int_parsing", ["body", "start"], INT_PARSING, "x"),
                entry("int_from_float", ["body", "stop"], INT_FRACTION, 0.5),
            ],
            id="both ends of a range",
        ),
        pytest.param(
            CreateSession,
            {"task_spec": "text"},
            [entry("dict_type", ["body", "task_spec"], "Input should be a valid dictionary", "text")],
            id="a task that is not an object",
        ),
        pytest.param(
            CreateSession,
            {"task_spec": {}, "secrets": {"A": 1}},
            [entry("string_type", ["body", "secrets", "A"], "Input should be a valid string", 1)],
            id="a secret that is not a string",
        ),
        pytest.param(
            CreateSession,
            {"task_spec": {}, "env_name": 1},
            [entry("string_type", ["body", "env_name"], "Input should be a valid string", 1)],
            id="a name that is not a string",
        ),
        pytest.param(
            CreateSession,
            {"task_spec": {}, "colour": "red"},
            [entry("extra_forbidden", ["body", "colour"], "Extra inputs are not permitted", "red")],
            id="an unknown key of a create",
        ),
        *(
            pytest.param(CreateSession, body, [broken_rule(text, body)], id=f"{text[13:30]} {json.dumps(body)}")
            for text, bodies in (
                (
                    NO_SOURCE,
                    [
                        {},
                        {"env_name": "math"},
                        {"split": "train"},
                        {"index": 0},
                        {"split": None, "index": None, "task_spec": None},
                        {"split": "train", "index": None},
                        {"task_spec": {}, "split": "train", "index": 0},
                    ],
                ),
                (HALF, [{"task_spec": {}, "split": "train"}, {"task_spec": {"a": 1}, "index": 0}]),
            )
            for body in bodies
        ),
        pytest.param(OfSplit, [], [no_object([])], id="a list instead of an object"),
        pytest.param(OfSplit, "text", [no_object("text")], id="a string instead of an object"),
        pytest.param(OfSplit, 3, [no_object(3)], id="a number instead of an object"),
    ],
)
def test_an_invalid_body_is_refused_with_the_exact_entries_of_the_protocol(
    model: type[BaseModel], body: Any, expected: list[Any]
) -> None:
    told = entries(model, json.dumps(body).encode())

    assert told == expected
    # The order of the keys is part of the wire format.
    assert [list(one) for one in told] == [list(one) for one in expected]


def test_an_empty_body_counts_as_a_missing_body() -> None:
    assert entries(OfSplit, b"") == [entry("missing", ["body"], "Field required", None)]
    assert entries(OfSplit, b"", None) == [entry("missing", ["body"], "Field required", None)]


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/octet-stream", "application/jsonx", "json"])
def test_a_body_without_a_json_content_type_is_read_as_text(kind: str | None) -> None:
    assert entries(OfSplit, b'{"split":"a"}', kind) == [no_object('{"split":"a"}')]
    assert entries(OfSplit, b"{\xff", kind) == [no_object("{�")]


@pytest.mark.parametrize(
    ("body", "position", "error"),
    [
        (b"{bad", 1, "Expecting property name enclosed in double quotes"),
        (b'{"a":1', 6, "Expecting ',' delimiter"),
        (b'{"a":}', 5, "Expecting value"),
        (b"   ", 3, "Expecting value"),
        (b'{"a":1} x', 8, "Extra data"),
        ('{"é":x}'.encode(), 5, "Expecting value"),
        ('{"€€":"😀", x}'.encode(), 11, "Expecting property name enclosed in double quotes"),
    ],
)
def test_malformed_json_is_refused_with_the_position_in_characters(body: bytes, position: int, error: str) -> None:
    assert entries(OfSplit, body) == [
        {
            "type": "json_invalid",
            "loc": ["body", position],
            "msg": "JSON decode error",
            "input": {},
            "ctx": {"error": error},
        }
    ]


@pytest.mark.parametrize("body", [b"\xff{}", b'{"a":"\xff"}', b"[" * 100_000, b"9" * 10_000, b"\xef\xbb\xbf{"])
def test_an_unparsable_body_is_a_validation_error_too(body: bytes) -> None:
    with pytest.raises(Unprocessable) as refusal:
        validate(OfSplit, body, JSON)
    assert refusal.value.entries[0]["type"] in ("json_invalid", "model_attributes_type")


@pytest.mark.parametrize("depth", [100, 200, 400, 600, 800, 900, 950, 990, 1000])
def test_a_deeply_nested_body_is_read_or_refused_but_never_causes_a_crash(depth: int) -> None:
    body = b'{"task_spec":{"a":' + b"[" * depth + b"]" * depth + b"}}"
    try:
        wish = validate(CreateSession, body, JSON)
    except Unprocessable as refusal:
        json.loads(dump(list(refusal.entries)))
    else:
        wish.model_dump()


# -- valid bodies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "number"), [("2", 2), (2.0, 2), (True, 1), (False, 0), (-1, -1), ("-1", -1), (" 3 ", 3), (10**30, 10**30)]
)
def test_an_index_is_a_lenient_integer(index: Any, number: int) -> None:
    read = validate(OfTask, json.dumps({"split": "a", "index": index}).encode(), JSON)

    assert read.index == number
    assert type(read.index) is int


def test_the_ends_of_a_range_may_be_absent_or_null() -> None:
    for body in ({"split": "a"}, {"split": "a", "start": None, "stop": None}):
        read = validate(OfRange, json.dumps(body).encode(), JSON)
        assert (read.start, read.stop) == (None, None)


@pytest.mark.parametrize(
    "body",
    [
        {"task_spec": {}},
        {"task_spec": {"a": 1}, "env_name": None, "split": None, "index": None},
        {"split": "train", "index": 0},
        {"split": "train", "index": "0", "task_spec": None},
        {"split": "", "index": 0, "toolset_name": "web", "secrets": {}},
        {"task_spec": {}, "seed": 7, "config": {"x": [1]}, "secrets": {"A": "b"}},
        {"task_spec": {}, "seed": None, "config": None, "secrets": None, "toolset_name": None},
    ],
)
def test_a_body_with_exactly_one_source_of_a_task_is_accepted(body: dict[str, Any]) -> None:
    read = validate(CreateSession, json.dumps(body).encode(), JSON)

    assert read.task_spec == body.get("task_spec")
    assert read.secrets == body.get("secrets")


@pytest.mark.parametrize(
    ("kind", "json_or_not"),
    [
        ("application/json", True),
        ("application/json; charset=utf-8", True),
        ("Application/JSON", True),
        (" application/json ;x=y", True),
        ("application/problem+json", True),
        ("text/json", False),
        ("application/jsonlines", False),
        ("", False),
        (None, False),
    ],
)
def test_a_content_type_is_recognized_as_json_or_not(kind: str | None, json_or_not: bool) -> None:
    assert is_json(kind) is json_or_not


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=9))
def test_any_json_value_is_parsed_unchanged_and_refused_as_a_body(value: Any) -> None:
    assert parse_json(json.dumps(value).encode()) == value
    with pytest.raises(Unprocessable):
        validate(OfSplit, json.dumps(value).encode(), JSON)


# -- secrets --------------------------------------------------------------------------------------------------------


def encoded(value: Any) -> str:
    return base64.b64encode(json.dumps(value).encode()).decode()


@pytest.mark.parametrize(
    ("header", "body", "secrets"),
    [
        (None, None, {}),
        ("", {}, {}),
        (None, {"A": "a"}, {"A": "a"}),
        (encoded({"A": {"value": "a", "allowed_domains": ["x.example"]}}), None, {"A": "a"}),
        (encoded({"A": {"value": "a"}}), {"A": "from body", "B": "b"}, {"A": "a", "B": "b"}),
        (encoded({"A": "plain"}), None, {"A": "plain"}),
        (encoded({}), {"A": "a"}, {"A": "a"}),
        (encoded({"A": {"value": ""}}), None, {"A": ""}),
    ],
)
def test_secrets_may_be_in_the_header_and_in_the_body_and_the_header_wins(
    header: str | None, body: dict[str, str] | None, secrets: dict[str, str]
) -> None:
    assert read_secrets(header, body) == secrets


def test_the_platform_s_own_key_is_left_out_whether_in_header_or_body() -> None:
    header = encoded({"api_key": {"value": "k"}, "OPENREWARD_API_KEY": {"value": "k"}, "A": {"value": "a"}})
    body = {"api_key": "k", "B": "b"}

    found = read_secrets(header, body)

    assert found == {"A": "a", "B": "b", "api_key": "k", "OPENREWARD_API_KEY": "k"}
    assert without_platform_keys(found) == {"A": "a", "B": "b"}


@pytest.mark.parametrize(
    "header",
    [
        "not base64 !",
        "c2VjcmV0",  # base64 of "secret"
        "c2VjcmV0LXdpdGhvdXQtcGFkZGluZw",
        "é",
        base64.b64encode(b"\xff\xfe").decode(),
        base64.b64encode(b"[" * 100_000).decode(),
        encoded(["secret"]),
        encoded("secret"),
        encoded(None),
        encoded({"A": 1}),
        encoded({"A": None}),
        encoded({"A": {}}),
        encoded({"A": {"value": 1}}),
        encoded({"A": {"value": ["secret"]}}),
    ],
)
def test_a_malformed_header_is_refused_without_showing_its_content(header: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^X-Secrets is not base64 of") as refusal:
        read_secrets(header, None)

    assert "secret" not in refusal.value.detail
    assert refusal.value.__suppress_context__


def test_the_body_s_own_mapping_is_not_modified() -> None:
    body = {"A": "a"}

    read_secrets(encoded({"A": {"value": "b"}}), body)

    assert body == {"A": "a"}

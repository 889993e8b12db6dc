"""Arbitrary task documents: each is plain data, a task, or refused with a TaskInvalid."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.core.environment import Isolation
from gateway.core.errors import TaskInvalid
from gateway.tasks.documents import compact, listed, read_json, read_json_lines, read_yaml
from gateway.tasks.schema import parse

TAGS = (
    "int",
    "float",
    "bool",
    "null",
    "str",
    "binary",
    "timestamp",
    "set",
    "omap",
    "pairs",
    "seq",
    "map",
    "merge",
    "value",
)
WORDS = (
    "a",
    "1",
    "0x",
    "-",
    ".inf",
    ".nan",
    "1:30",
    "0b",
    "~",
    "<<",
    "=",
    "''",
    "2030-01-31",
    "[",
    "]",
    "{",
    "}",
    ", ",
    ": ",
)
YAML = st.lists(
    st.sampled_from(
        [*(f"!!{tag} " for tag in TAGS), *WORDS, "\n", "  ", "- ", "? ", "# ", "|\n", "---\n", "&x ", "*x", "%"]
    )
    | st.text(max_size=3),
    max_size=12,
).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = (
    *(
        "id",
        "task_id",
        "env_type",
        "name",
        "instruction",
        "goal",
        "config",
        "evaluation",
        "reward_function",
        "script",
        "split",
    ),
    *("tags", "aliases", "difficulty", "reference", "language", "expected", "class", "tasks", "metadata", "max_steps"),
)
CALLS = st.sampled_from(
    [
        "contains('x')",
        "exact_match",
        "f(",
        "f(**{})",
        "regex_match('(')",
        "a.b()",
        "f(" + "[" * 90 + ")",
        "f(1,1,a=2)",
        "9" * 5_000,
    ]
)
DOCUMENTS = st.recursive(
    JSON | CALLS | st.sampled_from(["custom/a", "../a", "\ud800", "\0", "a" * 300]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=16,
)


@given(text=YAML)
@example("!!float ''")
@example("!!int ''")
@example("!!bool x")
@example("!!timestamp x")
@example("!!binary '='")
@example("a: !!binary aGk=")
@example("!!set {a, b}")
@example("!!omap [a: 1]")
@example("!!pairs [a: 1]")
@example(".inf")
@example("a: .nan")
@example("{1: 2, 1.5: 3, null: 4, true: 5}")
@example("{? {a: 1} : 2}")
def test_any_yaml_is_a_task_or_refused(text: str) -> None:
    with contextlib.suppress(TaskInvalid):
        for _, one in listed(read_yaml(text.encode("utf-8", "surrogatepass"))):
            with contextlib.suppress(TaskInvalid):
                task = parse({"id": "a", "env_type": "a", "instruction": "x", "config": {"x": one}})
                assert json.loads(compact(task)) == task


@pytest.mark.parametrize(
    "text", ["1" + ":1" * 300_000, "1" + ":1" * 300_000 + ".5", "9" * 600_000, "0x" + "f" * 600_000]
)
def test_a_long_number_in_yaml_takes_no_time(text: str) -> None:
    with contextlib.suppress(TaskInvalid):
        compact(read_yaml(f"a: {text}".encode()))


@given(data=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
@example(b"[" * 100_000)
@example(b"9" * 5_000)
@example(b'{"a": NaN}')
@example(b'{"a": 1e999}')
@example(b'"\\ud800"')
def test_any_json_is_data_or_refused(data: bytes) -> None:
    for read in (read_json, read_json_lines):
        with contextlib.suppress(TaskInvalid):
            read(data, where="x")


@given(document=DOCUMENTS, isolation=st.sampled_from([None, *Isolation]), is_registered=st.booleans())
def test_any_data_is_a_task_or_refused(document: Any, isolation: Isolation | None, is_registered: bool) -> None:
    for _, one in listed(document):
        with contextlib.suppress(TaskInvalid):
            task = parse(one, isolation=isolation, is_registered=is_registered)
            assert json.loads(compact(task)) == task

"""The schema of generic tasks: accepted values, and refusals with their path."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from envserver.generic import parse_task
from envserver.generic.task import MAX_DEPTH, MAX_PROBLEMS
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.environment import Isolation
from gateway.core.errors import TaskInvalid
from gateway.core.ports.tasks import MAX_TASK_BYTES
from gateway.tasks.schema import MAX_VALUES, json_schema, parse

ROOT = Path(__file__).parents[3]
ISOLATION = {"coding": Isolation.SANDBOX, "os": Isolation.SANDBOX, "browser": Isolation.EXCLUSIVE}
FILES = sorted(ROOT.glob("tasks/*/*.jsonl"))
LOGIN = {
    "id": "custom/login-test",
    "env_type": "browser",
    "name": "Log in",
    "description": "A form",
    "version": "2",
    "tags": ["forms", "login"],
    "aliases": ["login"],
    "difficulty": 1,
    "instruction": "Log in as admin.",
    "config": {"start_url": "http://localhost:8000/login"},
    "evaluation": {"reward_function": "check_url_contains('dashboard')", "weight": 0.5},
    "rate_limit": {"starts": 10, "per_s": 60},
    "source": {"free": ["to", "use"]},
}


def problems(document: object, **known: Any) -> list[tuple[str, str]]:
    with pytest.raises(TaskInvalid) as refusal:
        parse(document, **known)
    return list(refusal.value.problems)


def paths(document: object, **known: Any) -> list[str]:
    return [path for path, _ in problems(document, **known)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_task_of_the_project_is_valid_and_stays_unchanged(path: Path) -> None:
    isolation = ISOLATION.get(path.parent.name, Isolation.SHARED)

    for line in path.read_bytes().splitlines():
        task = json.loads(line)
        assert parse(task, isolation=isolation) == task


def test_a_complete_task_stays_unchanged() -> None:
    task = parse(LOGIN, isolation=Isolation.EXCLUSIVE, is_registered=True)

    assert task == LOGIN


def test_the_short_form_of_a_registration_is_expanded() -> None:
    config = {
        "start_url": "http://localhost:8000/login",
        "goal": "log in as admin / 1234",
        "reward_fn": "check_url_contains('dashboard')",
    }
    meant = {
        "id": "custom/login-test",
        "env_type": "browser",
        "instruction": "log in as admin / 1234",
        "config": {"start_url": "http://localhost:8000/login"},
        "evaluation": {"reward_function": "check_url_contains('dashboard')"},
    }

    assert parse({"id": "custom/login-test", "env_type": "browser", **config}) == meant
    as_arguments = {"task_id": "custom/login-test", "env_type": "browser", "config": config}
    assert parse(as_arguments, is_registered=True) == meant


def test_the_short_form_keeps_what_proves_the_task() -> None:
    proof = {"reference": "Rome", "reward_floor": 0.1, "reward_full": 2}

    assert parse({"goal": "Say Rome.", **proof}) == {"instruction": "Say Rome.", "config": {}, **proof}


def test_a_registration_with_a_complete_task_keeps_its_keys() -> None:
    whole = {"instruction": "go", "config": {"goal": [3, 4]}, "tags": ["a"]}

    as_arguments = {"task_id": "a", "env_type": "game", "config": whole}

    assert parse(as_arguments) == {**whole, "id": "a", "env_type": "game"}


def test_all_problems_are_reported_together_each_with_its_path() -> None:
    wrong = {
        "id": "-no",
        "tags": ["a", 4],
        "difficulty": -1,
        "config": [],
        "evaluation": {"reward_function": "f(x)", "module": "m", "script": "true"},
        "rate_limit": {"starts": 0, "per_s": "1", "burst": 2},
    }

    assert paths(wrong, isolation=Isolation.SHARED) == [
        "config",
        "difficulty",
        "evaluation",
        "evaluation.module",
        "evaluation.reward_function",
        "evaluation.script",
        "id",
        "rate_limit.burst",
        "rate_limit.per_s",
        "rate_limit.starts",
        "tags[1]",
    ]


@pytest.mark.parametrize("document", [None, [], "a task", 3, [{"id": "a"}]])
def test_a_document_that_is_not_an_object_is_refused(document: object) -> None:
    assert problems(document)[0][1].startswith("a task is an object, not ")


def test_a_registered_task_needs_an_id_and_an_environment() -> None:
    assert paths({"instruction": "go"}, is_registered=True) == ["env_type", "id"]
    assert parse({"instruction": "go"}) == {"instruction": "go"}


@pytest.mark.parametrize("id", ["a", "custom/login-test", "miniwob/click-test", "HumanEval/0", "a" * 200, "0._-/"])
def test_a_valid_id_is_accepted(id: str) -> None:
    assert parse({"id": id}) == {"id": id}


@pytest.mark.parametrize("id", ["", "/a", ".a", "-a", "a b", "a\n", "é", "a" * 201, 3, None, "a?b", "a\x00"])
def test_an_invalid_id_is_refused(id: object) -> None:
    if id is None:
        assert parse({"id": id}) == {"id": None}
        assert paths({"id": id, "env_type": "x"}, is_registered=True) == ["id"]
    else:
        assert paths({"id": id}) == ["id"]


@pytest.mark.parametrize("key", ["module", "class", "python", "code_ref", "Class", "entry_point", "import", "pickle"])
def test_code_is_refused_where_data_is_expected(key: str) -> None:
    assert paths({"evaluation": {key: "os:system"}}) == [f"evaluation.{key}"]
    assert paths({key: "os:system"}) == [key]


@pytest.mark.parametrize("key", ["script", "test_scripts", "command"])
def test_scripts_are_allowed_only_in_sandboxes(key: str) -> None:
    task = {"evaluation": {key: "true" if key == "script" else ["true"]}}

    assert paths(task, isolation=Isolation.SHARED) == [f"evaluation.{key}"]
    assert paths(task, isolation=Isolation.EXCLUSIVE) == [f"evaluation.{key}"]
    assert parse(task, isolation=Isolation.SANDBOX) == task


def test_a_task_may_have_only_one_judge() -> None:
    assert problems({"evaluation": {"script": "true", "reward_function": "f"}}) == [
        ("evaluation", "either reward_function or script, not both")
    ]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (float("nan"), "config.a"),
        (float("-inf"), "config.a"),
        ("\ud800", "config.a"),
        ({1: 2}, "config.a"),
        ([{"b": object()}], "config.a[0].b"),
        (b"x", "config.a"),
        ({1, 2}, "config.a"),
    ],
)
def test_a_value_that_json_cannot_encode_is_refused_with_its_path(value: object, path: str) -> None:
    assert paths({"config": {"a": value}}) == [path]


def test_depth_number_and_size_are_bounded() -> None:
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]

    assert problems({"config": {"a": deep}})[-1][1] == f"nested more than {MAX_DEPTH} deep"
    assert problems({"config": {"a": [0] * MAX_VALUES}})[-1][1] == f"more than {MAX_VALUES} values"
    large = {"id": "a", "env_type": "os", "config": {"a": "x" * MAX_TASK_BYTES}}
    assert problems(large, is_registered=True)[0][1].startswith(f"a task has at most {MAX_TASK_BYTES} bytes as JSON, ")
    assert parse(large) == large, "given for one session it may be larger"


def test_the_reported_problems_are_bounded() -> None:
    many = {"config": {f"{'k' * 5000}{number}": float("nan") for number in range(1000)}, "tags": [3] * 64}

    told = problems(many)

    assert len(told) == MAX_PROBLEMS
    assert max(len(path) for path, _ in told) < 100


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from([*LOGIN, "goal", "reward_fn", "task_id", "split"]) | st.text()


@given(st.dictionaries(KEYS, JSON | st.sampled_from(list(LOGIN.values())), max_size=6))
def test_any_document_is_a_task_or_a_typed_error(document: dict[str, object]) -> None:
    try:
        task = parse(document, isolation=Isolation.SHARED)
    except TaskInvalid as error:
        said = [*error.problems, ("", error.detail)]
    else:
        said = [("", "taken")]
        assert parse(task) == task

    assert all(message and (path + message).encode() for path, message in said)


@given(st.dictionaries(KEYS, JSON | st.sampled_from(list(LOGIN.values())), max_size=6))
def test_a_task_that_the_gateway_accepts_is_accepted_by_the_environments_too(document: dict[str, object]) -> None:
    try:
        task = parse(document)
    except TaskInvalid:
        return
    assert isinstance(parse_task(task).to_dict(), dict)


def test_values_that_environments_refuse_are_refused_by_the_gateway_too() -> None:
    wrong = {"version": "1" * 201, "tags": [" a", "b\nc", ""], "evaluation": {"script": " "}}

    assert paths(wrong) == ["evaluation.script", "tags[0]", "tags[1]", "tags[2]", "version"]
    assert problems({"tags": [" a"]}) == [
        ("tags[0]", "must be a text in one line without white space at its ends, not ' a'")
    ]


# -- the JSON Schema ------------------------------------------------------------------------------------------------

SCHEMA = json.loads(json_schema())
KEYWORDS = {"type", "pattern", "errorMessage", "maxLength", "maxItems", "items", "minimum", "exclusiveMinimum"} | {
    "maximum",
    "required",
    "properties",
    "additionalProperties",
}
NOTES = {"$schema", "title", "description", "default", "examples"}


def schemas(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield schema
    for inner in (*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])):
        yield from schemas(inner)


def test_the_check_knows_every_keyword_of_the_json_schema() -> None:
    for schema in schemas(SCHEMA):
        assert set(schema) <= KEYWORDS | NOTES
        assert ("pattern" in schema) == ("errorMessage" in schema)


FITTING: Mapping[str, list[Any]] = {
    "id": ["a", "custom/a", "a~1", "x" * 200, None],
    "env_type": ["browser", "x" * 100, None],
    "name": ["", "n" * 200, None],
    "description": ["d" * 16_384, None],
    "version": ["1", 1, 1.5, None],
    "tags": [[], ["a b"], ["t" * 100] * 64],
    "aliases": [[], ["a/b"], ["a"] * 64],
    "difficulty": [0, 0.5, None],
    "seeds": [1, 10_000, None],
    "split": ["train", None],
    "instruction": ["", "i" * 262_144],
    "config": [{}, {"a": [None]}],
    "evaluation": [{}, {"a": 1}, {"reward_function": "f"}, {"reward_function": None}, {"script": "x" * 262_144}],
    "reference": ["", ["a", {"name": "n", "input": {}}], {"commands": [], "answer": None}, None],
    "reward_floor": [-1, 0, 0.5, None],
    "reward_full": [1, None],
    "rate_limit": [{"starts": 1, "per_s": 0.1}, {"starts": 10_000, "per_s": 86_400}, None],
    "anything": [None, True, [1]],
}
UNFITTING: Mapping[str, list[Any]] = {
    "id": ["", "/a", "a b", "a\n", "x" * 201, 1, True, [], {}],
    "env_type": ["", "a/b", "x" * 101, 1],
    "name": ["n" * 201, 1, []],
    "description": ["d" * 16_385, 1],
    "version": ["1" * 201, True, []],
    "tags": ["a", None, [1], [""], [" a"], ["a\nb"], ["t" * 101], ["a"] * 65],
    "aliases": ["a", None, [1], ["a b"], ["a"] * 65],
    "difficulty": [-1, -0.5, "1", True],
    "seeds": [0, -1, 10_001, 1.5, "2", True],
    "split": ["", "a/b", "é", 1],
    "instruction": ["i" * 262_145, None, 1],
    "config": [None, [], "a", 1],
    "evaluation": [None, [], "f", {"reward_function": 1}, {"script": " "}, {"script": 1}, {"script": "x" * 262_145}],
    "reference": [1, True, [1], [{"name": "n"}], [{"input": {}}], [{"name": 1, "input": {}}]],
    "reward_floor": ["0", True, []],
    "reward_full": ["1", True],
    "rate_limit": [
        [],
        {},
        {"starts": 1},
        {"starts": 0, "per_s": 1},
        {"starts": 10_001, "per_s": 1},
        {"starts": 1.5, "per_s": 1},
        {"starts": True, "per_s": 1},
        {"starts": 1, "per_s": 0},
        {"starts": 1, "per_s": 86_401},
        {"starts": 1, "per_s": "1"},
        {"starts": 1, "per_s": 1, "burst": 1},
    ],
}


def test_every_rule_of_the_schema_is_checked() -> None:
    taken = [{key: value} for key, values in FITTING.items() for value in values]
    refused = [{key: value} for key, values in UNFITTING.items() for value in values]

    assert set(UNFITTING) == set(SCHEMA["properties"])
    assert [task for task in taken if parse(task) != task] == []
    for task in refused:
        assert {path.partition(".")[0].partition("[")[0] for path in paths(task)} == set(task)

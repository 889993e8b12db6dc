"""The generic task's schema: what it takes, and every refusal with its path."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from envserver.generic import parse_task
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli.tasks import schema_text
from gateway.core.environment import Isolation
from gateway.core.errors import TaskInvalid
from gateway.core.ports.tasks import MAX_TASK_BYTES
from gateway.tasks.documents import MAX_DEPTH, MAX_PROBLEMS, MAX_VALUES
from gateway.tasks.schema import from_config, parse

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
def test_every_task_of_the_project_fits_and_comes_back_as_it_was(path: Path) -> None:
    isolation = ISOLATION.get(path.parent.name, Isolation.SHARED)

    for line in path.read_bytes().splitlines():
        task = json.loads(line)
        assert parse(task, isolation=isolation).to_dict() == task


def test_a_whole_task_comes_back_as_it_was() -> None:
    task = parse(LOGIN, isolation=Isolation.EXCLUSIVE, is_registered=True)

    assert task.to_dict() == LOGIN
    assert task.rate_limit is not None
    assert (task.rate_limit.starts, task.rate_limit.per_s) == (10, 60)


def test_the_registrations_short_form_is_written_out() -> None:
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

    assert from_config("custom/login-test", "browser", config) == meant
    assert parse({"id": "custom/login-test", "env_type": "browser", **config}).to_dict() == meant
    as_arguments = {"task_id": "custom/login-test", "env_type": "browser", "config": config}
    assert parse(as_arguments, is_registered=True).to_dict() == meant


def test_a_registration_with_a_whole_task_keeps_its_keys() -> None:
    whole = {"instruction": "go", "config": {"goal": [3, 4]}, "tags": ["a"]}

    assert from_config("a", "game", whole) == {**whole, "id": "a", "env_type": "game"}
    assert parse(from_config("a", "game", whole)).to_dict()["config"] == {"goal": [3, 4]}


def test_all_problems_are_told_at_once_each_with_its_path() -> None:
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
def test_what_is_no_object_is_no_task(document: object) -> None:
    assert problems(document)[0][1].startswith("a task is an object, not ")


def test_a_task_that_is_registered_needs_id_and_environment() -> None:
    assert paths({"instruction": "go"}, is_registered=True) == ["env_type", "id"]
    assert parse({"instruction": "go"}).id is None


@pytest.mark.parametrize("id", ["a", "custom/login-test", "miniwob/click-test", "HumanEval/0", "a" * 200, "0._-/"])
def test_an_id_may_be(id: str) -> None:
    assert parse({"id": id}).id == id


@pytest.mark.parametrize("id", ["", "/a", ".a", "-a", "a b", "a\n", "é", "a" * 201, 3, None, "a?b", "a\x00"])
def test_an_id_may_not_be(id: object) -> None:
    if id is None:
        assert parse({"id": id}).id is None
        assert paths({"id": id, "env_type": "x"}, is_registered=True) == ["id"]
    else:
        assert paths({"id": id}) == ["id"]


@pytest.mark.parametrize("key", ["module", "class", "python", "code_ref", "Class", "entry_point", "import", "pickle"])
def test_code_is_refused_where_data_is_expected(key: str) -> None:
    assert paths({"evaluation": {key: "os:system"}}) == [f"evaluation.{key}"]
    assert paths({key: "os:system"}) == [key]


@pytest.mark.parametrize("key", ["script", "test_scripts", "command"])
def test_scripts_are_only_for_sandboxes(key: str) -> None:
    task = {"evaluation": {key: "true" if key == "script" else ["true"]}}

    assert paths(task, isolation=Isolation.SHARED) == [f"evaluation.{key}"]
    assert paths(task, isolation=Isolation.EXCLUSIVE) == [f"evaluation.{key}"]
    assert parse(task, isolation=Isolation.SANDBOX).to_dict() == task


def test_one_judge_is_enough() -> None:
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
def test_what_json_has_no_word_for_is_told_with_its_path(value: object, path: str) -> None:
    assert paths({"config": {"a": value}}) == [path]


def test_depth_number_and_size_are_bounded() -> None:
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]

    assert problems({"config": {"a": deep}})[-1][1] == f"nested deeper than {MAX_DEPTH}"
    assert problems({"config": {"a": [0] * MAX_VALUES}})[-1][1] == f"more than {MAX_VALUES} values"
    large = {"id": "a", "env_type": "os", "config": {"a": "x" * MAX_TASK_BYTES}}
    assert problems(large, is_registered=True) == [("", f"larger than {MAX_TASK_BYTES} bytes")]
    assert parse(large).id == "a", "given for one session it may be larger"


def test_what_is_told_of_a_document_is_bounded() -> None:
    many = {"config": {f"{'k' * 5000}{number}": float("nan") for number in range(1000)}, "tags": [3] * 64}

    told = problems(many)

    assert len(told) == MAX_PROBLEMS
    assert max(len(path) for path, _ in told) < 100


def test_the_place_stands_before_the_problems() -> None:
    with pytest.raises(TaskInvalid, match=r"^train\.jsonl:3: id: "):
        parse({"id": 3}, where="train.jsonl:3")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from([*LOGIN, "goal", "reward_fn", "task_id", "split"]) | st.text()


@given(st.dictionaries(KEYS, JSON | st.sampled_from(list(LOGIN.values())), max_size=6))
def test_whatever_comes_it_is_a_task_or_a_typed_error(document: dict[str, object]) -> None:
    try:
        task = parse(document, isolation=Isolation.SHARED)
    except TaskInvalid as error:
        said = [*error.problems, ("", error.detail)]
    else:
        said = [("", "taken")]
        assert parse(task.to_dict()).to_dict() == task.to_dict()

    assert all(message and (path + message).encode() for path, message in said)


@given(st.dictionaries(KEYS, JSON | st.sampled_from(list(LOGIN.values())), max_size=6))
def test_what_is_taken_here_is_taken_by_the_environments_too(document: dict[str, object]) -> None:
    with contextlib.suppress(TaskInvalid):
        task = parse(document).to_dict()
        assert isinstance(parse_task(task).to_dict(), dict)


def test_what_environments_are_strict_about_is_refused_here() -> None:
    wrong = {"version": "1" * 201, "tags": [" a", "b\nc", ""], "evaluation": {"script": " "}}

    assert paths(wrong) == ["evaluation.script", "tags[0]", "tags[1]", "tags[2]", "version"]
    assert problems({"tags": [" a"]}) == [("tags[0]", "a text without white space at its ends, in one line, is wanted")]


def test_the_schema_in_the_docs_is_current() -> None:
    assert (ROOT / "docs" / "task.schema.json").read_text("utf-8") == schema_text(), (
        "gateway tasks schema -o docs/task.schema.json"
    )

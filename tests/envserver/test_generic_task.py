"""Generic tasks: the schema, and faults that are reported with their place."""

import json
from pathlib import Path
from typing import Any

import pytest
from envserver.generic import GenericTask, TaskError, parse_task
from envserver.generic.task import MAX_DEPTH, MAX_PROBLEMS, MAX_TASK_BYTES

TASKS = sorted((Path(__file__).parents[2] / "tasks").glob("*/*.jsonl"))
WHOLE: dict[str, Any] = {
    "id": "custom/login-test",
    "env_type": "browser",
    "name": "Login",
    "description": "Sign in.",
    "version": "1.2",
    "tags": ["login", "forms"],
    "instruction": "Log in as admin.",
    "config": {"start_url": "http://localhost:8000/login", "cookies": [{"name": "a", "value": None}]},
    "evaluation": {"reward_function": "check_url_contains('dashboard')"},
    "aliases": ["login"],
    "difficulty": 2,
    "rate_limit": {"starts": 3, "per_s": 0.5},
    "author": {"who": "us"},
}


def test_a_complete_task_is_read_and_written_again() -> None:
    task = parse_task(WHOLE)

    assert (task.id, task.env_type, task.version, task.tags) == ("custom/login-test", "browser", "1.2", WHOLE_TAGS)
    assert set(task.extra) == {"aliases", "difficulty", "rate_limit", "author"}
    assert task.to_dict() == WHOLE


WHOLE_TAGS = ("login", "forms")


def test_the_short_form_of_the_rfc_is_the_same_task() -> None:
    short = {
        "id": "custom/login-test",
        "env_type": "browser",
        "tags": ["forms"],
        "start_url": "http://localhost:8000/login",
        "goal": "log in as `admin` / `1234`",
        "reward_fn": "check_url_contains('dashboard')",
    }

    assert parse_task(short) == GenericTask(
        id="custom/login-test",
        env_type="browser",
        tags=("forms",),
        instruction="log in as `admin` / `1234`",
        config={"start_url": "http://localhost:8000/login"},
        evaluation={"reward_function": "check_url_contains('dashboard')"},
    )


def test_a_task_copies_its_input_and_returns_copies() -> None:
    given = json.loads(json.dumps(WHOLE))
    task = parse_task(given)

    given["config"]["start_url"] = "elsewhere"
    task.to_dict()["config"]["cookies"].clear()

    assert task.to_dict() == WHOLE


@pytest.mark.parametrize("path", TASKS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_task_of_the_project_is_a_generic_task(path: Path) -> None:
    tasks = [json.loads(line) for line in path.read_text().splitlines()]

    # An empty configuration may be omitted.
    assert [parse_task(task).to_dict() for task in tasks] == [
        {"config": {}, "evaluation": {}, **task} for task in tasks
    ]
    assert tasks


@pytest.mark.parametrize(
    ("change", "path", "reason"),
    [
        ({"id": 5}, "id", "must be a text, not the number 5"),
        ({"id": "../etc"}, "id", "that begins with a letter or digit, not '../etc'"),
        ({"id": "a b"}, "id", "not 'a b'"),
        ({"id": "a" * 201}, "id", "at most 200 letters"),
        ({"env_type": "a/b"}, "env_type", "not 'a/b'"),
        ({"name": "n" * 201}, "name", "at most 200"),
        ({"version": True}, "version", "must be a text or a number, not true"),
        ({"tags": "one"}, "tags", "must be a list, not a text"),
        ({"tags": ["a", 5]}, "tags[1]", "must be a text, not the number 5"),
        ({"tags": ["t"] * 65}, "tags", "at most 64"),
        ({"aliases": [" a"]}, "aliases[0]", "that begins with a letter or digit, not ' a'"),
        ({"instruction": ["do it"]}, "instruction", "must be a text, not a list"),
        ({"instruction": "x" * 300_000}, "instruction", "at most"),
        ({"config": "files"}, "config", "must be an object, not a text"),
        ({"config": {"a": [{"b": float("nan")}]}}, "config.a[0].b", "nan"),
        ({"config": {"a b": object()}}, 'config."a b"', "object has no JSON form"),
        ({"config": {3: 1}}, "config", "the key 3 is not a text"),
        ({"config": {"f": "x" * MAX_TASK_BYTES}}, "", "at most"),
        ({"evaluation": []}, "evaluation", "must be an object, not a list"),
        ({"evaluation": {"reward_function": "f(x)"}}, "evaluation.reward_function", "literals"),
        ({"evaluation": {"script": " "}}, "evaluation.script", "must be a text that is not empty"),
        ({"evaluation": {"script": "x" * 300_000}}, "evaluation.script", "at most"),
        ({"evaluation": {"reward_function": "f", "script": "true"}}, "evaluation", "not both"),
        ({"difficulty": -1}, "difficulty", "must be 0 or more, not -1"),
        ({"rate_limit": {"starts": 0, "per_s": 1}}, "rate_limit.starts", "must be 1 or more, not 0"),
        ({"rate_limit": {"starts": 1, "per_s": 0}}, "rate_limit.per_s", "must be more than 0"),
        ({"rate_limit": {"starts": 1.5, "per_s": 1}}, "rate_limit.starts", "must be a whole number"),
        ({"rate_limit": {"starts": 1}}, "rate_limit.per_s", "is missing"),
        ({"rate_limit": {"starts": 1, "per_s": 1, "burst": 2}}, "rate_limit.burst", "no such key"),
    ],
)
def test_a_fault_is_named_with_its_place(change: dict[str, Any], path: str, reason: str) -> None:
    with pytest.raises(TaskError) as caught:
        parse_task({**WHOLE, **change})

    assert [found for found, _ in caught.value.problems] == [path]
    assert reason in caught.value.problems[0][1]
    assert isinstance(caught.value, ValueError)


def test_all_faults_are_reported_together_up_to_a_bound() -> None:
    with pytest.raises(TaskError, match=r"id: .*; tags: .*; config: ") as several:
        parse_task({"id": 1, "tags": 2, "config": 3})
    with pytest.raises(TaskError) as many:
        parse_task({"config": {str(number): {1} for number in range(1_000)}})

    assert len(several.value.problems) == 3
    assert len(many.value.problems) == MAX_PROBLEMS


@pytest.mark.parametrize("value", ["\ud800", {"\ud800": 1}])
def test_half_a_surrogate_pair_is_refused(value: Any) -> None:
    with pytest.raises(TaskError, match=r"^config\.a"):
        parse_task({"config": {"a": value}})


def test_a_key_that_is_null_counts_as_absent() -> None:
    given = dict.fromkeys(("id", "env_type", "name", "tags", "instruction", "config", "evaluation"))

    assert parse_task({**given, "env_type": ""}) == GenericTask()


def test_the_split_of_a_task_in_a_file_may_be_anything() -> None:
    assert parse_task({"split": "my split"}).split == "my split"


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 100_000])
def test_a_task_that_is_nested_too_deeply_is_refused(depth: int) -> None:
    config: Any = "x"
    for _ in range(depth):
        config = [config]

    with pytest.raises(TaskError, match=f"nested more than {MAX_DEPTH} deep"):
        parse_task({"config": {"deep": config}})


@pytest.mark.parametrize("document", [None, "task", ["a"], 5])
def test_a_document_that_is_not_an_object_is_refused(document: Any) -> None:
    with pytest.raises(TaskError, match="a task is an object"):
        parse_task(document)

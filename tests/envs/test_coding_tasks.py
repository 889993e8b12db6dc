"""The coding environment's own tasks: their files, and each reference and each mistake through the judge."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from scripts.coding_problems import Problem
from scripts.coding_problems.making import UnsoundProblem, task_of
from tests.deadlines import COMMAND_S
from tests.envs.bundled import PROBLEMS, RecordProperty, note_plays
from tests.envs.coding_world import ROOT, TASKS, World, opened, read, tasks
from tests.envs.complaints import complaints

pytestmark = pytest.mark.sandbox

MAKER = ROOT / "scripts" / "make-coding-tasks"
TRAIN, TEST = read("train"), read("test")
ALL = {task["id"]: task for task in TRAIN + TEST}
MOST_OUTPUT_BYTES = 256 * 1024


def test_there_are_enough_tasks_at_each_of_three_levels() -> None:
    counts = {name: Counter(task["difficulty"] for task in split) for name, split in (("train", TRAIN), ("test", TEST))}

    assert len(TRAIN) >= 60
    assert len(TEST) >= 30
    assert all(set(levels) == {1, 2, 3} and min(levels.values()) >= 9 for levels in counts.values())


def test_no_task_occurs_twice_within_or_across_the_splits() -> None:
    slugs = Counter(task["id"].partition("-")[2] for task in TRAIN + TEST)
    texts = Counter(re.sub(r"\W+", " ", task["instruction"]).lower() for task in TRAIN + TEST)
    cases = Counter(json.dumps(task["evaluation"]["test_cases"]) for task in TRAIN + TEST)

    assert [name for name, count in (slugs + texts + cases).items() if count > 1] == []


@pytest.mark.parametrize("split", ["train", "test"])
def test_each_line_is_one_compact_json_object_with_the_documented_keys(split: str) -> None:
    text = (TASKS / f"{split}.jsonl").read_text("utf-8")
    keys = ["id", "tags", "difficulty", "instruction", "config", "evaluation"]

    lines = [json.loads(line) for line in text.split("\n")[:-1]]

    assert text == "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
    assert all(list(line) == keys for line in lines)


def test_the_tasks_are_those_of_the_problems() -> None:
    assert ALL.keys() == PROBLEMS.keys()


def test_each_task_has_public_examples_and_at_least_eight_other_hidden_cases() -> None:
    def faults(task: dict[str, Any]) -> list[str]:
        evaluation = tasks.read_evaluation(task)
        public = [case.arguments if case.stdin is None else case.stdin for case in evaluation.public]
        hidden = [case.arguments if case.stdin is None else case.stdin for case in evaluation.hidden]
        return [
            *([f"{len(public)} public cases"] if len(public) < 2 else []),
            *([f"{len(hidden)} hidden cases"] if len(hidden) < 8 else []),
            *(f"public and hidden: {given!r:.100}" for given in hidden if given in public),
            *(
                f"a long output: {case.output!r:.100}"
                for case in evaluation.hidden
                if len(json.dumps(case.output)) >= MOST_OUTPUT_BYTES
            ),
        ]

    assert {name: found for name, task in ALL.items() if (found := faults(task))} == {}


def test_a_task_whose_answers_are_yes_or_no_has_no_credit_for_a_part() -> None:
    read = {name: tasks.read_evaluation(task) for name, task in ALL.items()}
    yes_or_no = {name for name, tests in read.items() if all(isinstance(case.output, bool) for case in tests.hidden)}

    assert len(yes_or_no) == 4
    assert {name for name, tests in read.items() if tests.credit == "all"} == yes_or_no


def test_no_task_contains_its_reference_or_its_wrong_solution() -> None:
    def held(name: str, problem: Problem) -> list[str]:
        text = json.dumps(ALL[name])
        told = {line.strip().rstrip(":") for line in (problem.signature or "").splitlines()}
        body = [line.strip() for line in problem.reference.splitlines() if len(line.strip()) > 12]
        return [line for line in body if line.rstrip(":") not in told and json.dumps(line)[1:-1] in text]

    assert {name: found for name, problem in PROBLEMS.items() if (found := held(name, problem))} == {}


async def test_each_reference_passes_all_hidden_cases(tmp_path: Path, record_property: RecordProperty) -> None:
    """The public cases already pass when the files are made, see the examples of an unsound problem."""
    async with opened("library", tmp_path) as world:

        async def passes(task: dict[str, Any]) -> None:
            verdict = await world.judge(task, PROBLEMS[task["id"]].reference)
            assert [outcome for outcome in verdict.outcomes if outcome.kind != "passed"] == []
            assert verdict.score == 1.0

        found = await complaints(passes, ALL)
    note_plays(record_property, "coding", "local process", won=len(ALL) - len(found))
    assert found == {}


async def test_each_plausible_mistake_fails_a_hidden_case(tmp_path: Path, record_property: RecordProperty) -> None:
    async with opened("library", tmp_path) as world:

        async def fails(task: dict[str, Any]) -> None:
            assert await first_failure(world, task, PROBLEMS[task["id"]].wrong_solution) not in ("none", "not run")

        found = await complaints(fails, ALL)
    note_plays(record_property, "coding", "local process", lost=len(ALL) - len(found))
    assert found == {}


async def first_failure(world: World, task: dict[str, Any], source: str) -> str:
    """Judge *source* on one hidden case after the other until it fails a case, and return that outcome's kind.

    The judge runs each case in its own sandbox, so later cases could not restore a score of 1. The last cases come
    first: most problems list their hard cases at the end, which saves a third of the sandboxes.
    """
    for case in reversed(task["evaluation"]["test_cases"]):
        if not case.get("public"):
            evaluation = {**task["evaluation"], "test_cases": [case]}
            (outcome,) = (await world.judge({**task, "evaluation": evaluation}, source)).outcomes
            if outcome.kind != "passed":
                return str(outcome.kind)
    return "none"


def test_the_task_files_match_the_script_and_a_change_is_detected(tmp_path: Path) -> None:
    def check(directory: Path) -> int:
        command = [sys.executable, str(MAKER), "--check", "--directory", str(directory)]
        return subprocess.run(command, capture_output=True, timeout=COMMAND_S, check=False).returncode

    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_bytes((TASKS / f"{split}.jsonl").read_bytes())
    with (tmp_path / "test.jsonl").open("a") as file:
        file.write("{}\n")

    assert (check(TASKS), check(tmp_path)) == (0, 1)


@pytest.mark.parametrize(
    ("examples", "hidden"),
    [
        pytest.param([((2,), 5)], [(3,)], id="an example that the reference does not fulfil"),
        pytest.param([((2,), 4)], [(2,)], id="a hidden input that is also an example"),
    ],
)
def test_an_unsound_problem_is_refused(examples: Any, hidden: Any) -> None:
    problem = Problem(
        slug="square",
        level=1,
        topic="numbers",
        text="Square a number.",
        reference="def square(n: int) -> int:\n    return n * n\n",
        wrong=("n * n", "n + n"),
        examples=examples,
        hidden=hidden,
    )

    with pytest.raises(UnsoundProblem):
        task_of(problem, split="train")


CASES = {"test_cases": [{"input": "a", "output": "b"}]}


@pytest.mark.parametrize(
    "evaluation",
    [
        pytest.param({}, id="no evaluation"),
        pytest.param({"test_cases": []}, id="no cases"),
        pytest.param({"test_cases": [{"input": "a", "output": "b", "public": True}]}, id="no hidden cases"),
        pytest.param({"test_cases": [{"input": "a"}]}, id="no output"),
        pytest.param({"test_cases": [{"output": "a"}]}, id="no input"),
        pytest.param({"test_cases": [{"input": 3, "output": "b"}]}, id="a number as a program's input"),
        pytest.param(
            {"function": "f", "test_cases": [{"arguments": 3, "output": 3}]}, id="arguments that are not a list"
        ),
        pytest.param({"function": "a b", **CASES}, id="a function that is not a name"),
        pytest.param({"function": "f", "test_cases": [{"input": float("nan"), "output": 3}]}, id="NaN"),
        pytest.param({"test_cases": [{"input": "a" * 5_000_000, "output": "b"}]}, id="a case of five megabytes"),
        pytest.param({"test_cases": CASES["test_cases"] * 201}, id="too many cases"),
        pytest.param({**CASES, "time_limit_seconds": 0}, id="no time"),
        pytest.param({**CASES, "time_limit_seconds": True}, id="a boolean as a time"),
        pytest.param({**CASES, "time_limit_seconds": 61}, id="too much time"),
        pytest.param({**CASES, "credit": "most"}, id="an unknown credit"),
        pytest.param({"test_scripts": [{"code": 3}]}, id="a script that is not a text"),
        pytest.param({"test_scripts": [{"code": "1"}] * 200, **CASES}, id="too many tests together"),
        pytest.param({"test_cases": [{"call": "f("}]}, id="a call that is no expression"),
        pytest.param({"test_cases": [{"call": "f()"}]}, id="a call without a test"),
        pytest.param({"test_cases": [{"call": "f()", "test": "answer > 3"}]}, id="a test of another form"),
        pytest.param({"test_cases": [{"call": "f()", "test": "answer == print(1)"}]}, id="a test that runs code"),
        pytest.param({"test_cases": [{"call": 7, "test": "answer"}]}, id="a call that is not a text"),
        pytest.param({"setup": 7, **CASES}, id="a setup that is not a text"),
        pytest.param({"command": " "}, id="an empty command"),
        pytest.param({"command": "true", "passed": 0}, id="no tests to pass"),
        pytest.param({"command": "true", "files": {"../x": ""}}, id="a file outside"),
        pytest.param({"command": "true", "files": {"/etc/passwd": ""}}, id="an absolute path"),
        pytest.param({"command": "true", "files": {"x": 3}}, id="a file that is not a text"),
    ],
)
def test_an_evaluation_that_cannot_be_used_is_refused(evaluation: dict[str, Any]) -> None:
    with pytest.raises(tasks.InvalidTask):
        tasks.read_evaluation({"evaluation": evaluation})


async def test_a_task_in_the_form_of_the_open_reward_standard_is_judged(tmp_path: Path) -> None:
    task = {
        "problem_id": "reverse_string",
        "description": "reverse a string",
        "test_cases": [{"input": "hello", "output": "olleh"}, {"input": "world", "output": "dlrow"}],
        "time_limit_seconds": 5,
    }

    async with opened("library", tmp_path) as world:
        right = await world.judge(task, "print(input()[::-1])")
        half = await world.judge(task, "print('olleh')")

    assert tasks.instruction(task) == "reverse a string"
    assert (right.score, half.score) == (1.0, 0.5)

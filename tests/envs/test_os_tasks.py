"""The os environment's tasks, each played in a real box: its solution wins; a wrong and an empty solution lose."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import COMMAND_S
from tests.envs.bundled import RecordProperty, note_plays
from tests.envs.complaints import complaints
from tests.envs.os_sandboxes import opening_sandboxes, os_module

pytestmark = pytest.mark.sandbox

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "tasks" / "os"
MAKER = ROOT / "scripts" / "make-os-tasks"

episodes = os_module("os_episode")
problems = os_module("os_problem")
prompts = os_module("os_prompt")

KEYS = ["id", "tags", "difficulty", "instruction", "config", "evaluation", "reference"]
ABSENT = re.compile(r"\$RANDOM|/dev/u?random|\bshuf\b|\bdate \+|\bcurl\b|\bwget\b|\bapt\b|\bpip\b")
"""Chance, clock and network, which must not occur in a task."""


def read(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TASKS / f"{split}.jsonl").read_text("utf-8").split("\n") if line]


TRAIN, TEST = read("train"), read("test")
ALL = TRAIN + TEST


@pytest.fixture
async def worker() -> AsyncIterator[Any]:
    async with opening_sandboxes() as sandboxes:
        yield episodes.Episodes(sandboxes)


def test_there_are_enough_tasks_of_enough_templates() -> None:
    assert len(TRAIN) >= 100
    assert len(TEST) >= 40
    assert len({task["tags"][0] for task in TRAIN}) >= 20
    assert len({task["tags"][0] for task in TEST}) >= 10
    assert len({task["tags"][1] for task in ALL}) >= 14


def test_no_template_is_in_both_splits() -> None:
    assert {task["tags"][0] for task in TRAIN} & {task["tags"][0] for task in TEST} == set()


def test_no_instruction_and_no_id_occurs_twice() -> None:
    instructions, ids = Counter(task["instruction"] for task in ALL), Counter(task["id"] for task in ALL)

    assert [text for text, count in instructions.items() if count > 1] == []
    assert [name for name, count in ids.items() if count > 1] == []


@pytest.mark.parametrize("split", ["train", "test"])
def test_each_line_is_one_compact_json_object_with_the_documented_keys(split: str) -> None:
    text = (TASKS / f"{split}.jsonl").read_text("utf-8")

    tasks = [json.loads(line) for line in text.split("\n")[:-1]]

    assert text == "".join(json.dumps(task, ensure_ascii=False, separators=(",", ":")) + "\n" for task in tasks)
    assert all(list(task) == KEYS for task in tasks)
    assert all(re.fullmatch(rf"{split}-\d{{3}}-{task['tags'][0]}-\d{{5}}", task["id"]) for task in tasks)


def test_the_readme_names_each_template_in_the_row_of_its_topic_and_column_of_its_split() -> None:
    rows = {
        row.split("|")[1].strip(): row.split("|")[2:4]
        for row in (TASKS / "README.md").read_text().split("\n")
        if "|" in row
    }
    documented = {
        (topic, split, name)
        for topic, columns in rows.items()
        if topic in {task["tags"][1] for task in ALL}
        for split, column in zip(("train", "test"), columns, strict=True)
        for name in re.findall(r"`([a-z-]+)`", column)
    }

    assert documented == {(task["tags"][1], task["id"].split("-")[0], task["tags"][0]) for task in ALL}


def test_no_script_depends_on_chance_the_clock_or_the_network() -> None:
    def scripts(task: dict[str, Any]) -> str:
        return json.dumps([task["config"], task["evaluation"], task["reference"]])

    assert [task["id"] for task in ALL if ABSENT.search(scripts(task))] == []


def test_the_task_files_match_their_maker() -> None:
    done = subprocess.run([sys.executable, str(MAKER), "--check"], capture_output=True, text=True, timeout=COMMAND_S)

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_maker_detects_a_difference_and_makes_the_same_bytes_again(tmp_path: Path) -> None:
    def make(*arguments: str) -> int:
        line = [sys.executable, str(MAKER), "--directory", str(tmp_path), *arguments]
        return subprocess.run(line, capture_output=True, timeout=COMMAND_S).returncode

    assert make("--check") == 1
    assert make() == 0
    assert (tmp_path / "test.jsonl").read_bytes() == (TASKS / "test.jsonl").read_bytes()
    assert make("--check") == 0
    (tmp_path / "train.jsonl").write_text("{}\n")
    assert make("--check") == 1


async def test_each_reference_solves_its_task_and_wrong_and_empty_solutions_do_not(
    worker: Any, record_property: RecordProperty
) -> None:
    async def judged_as_expected(task: dict[str, Any]) -> None:
        assert await rewards(worker, task, task["reference"]["wrong"]) == [False], "the wrong solution"
        # A judge changes nothing in the box, so one box serves both ways to do nothing and the reference after them.
        assert await rewards(worker, task, task["reference"], before=(None, "")) == [False, False, True], "the others"

    found = await complaints(judged_as_expected, {task["id"]: task for task in ALL})
    note_plays(record_property, "os", "local process", won=len(ALL) - len(found), lost=len(ALL) - len(found))
    assert found == {}


async def test_a_stopped_process_that_had_no_cpu_time_yet_to_end_counts_as_stopped(worker: Any) -> None:
    task = next(task for task in ALL if task["tags"][0] == "stop-process")
    (named,) = re.findall(r"A program called (\w+) is running", task["instruction"])
    # It works for a second and then ends, like a stopped process that still waits for the CPU on a full machine.
    ending = f"/tmp/{named} -c 'while ((SECONDS < 2)); do :; done' > /dev/null 2>&1 &"
    begun = f"until grep -qx {named} /proc/$!/comm; do sleep 0.01; done"  # until then it is a fork of the shell
    solution = {"commands": [f"pkill -x {named}; cp /bin/bash /tmp/{named}; {ending} {begun}"], "answer": None}

    assert await rewards(worker, task, solution) == [True]


async def rewards(
    worker: Any, task: dict[str, Any], solution: dict[str, Any], *, before: tuple[str | None, ...] = ()
) -> list[bool]:
    """Play *solution*; return the verdict on each answer *before* its first command, then on its own answer.

    Where its commands print an answer, that answer must equal the solution's answer.
    """
    problem = problems.Problem.read(task)
    if before and problem.evaluation.scripts:  # its scripts stop the processes of the box
        worth = [(await rewards(worker, task, {"commands": [], "answer": answer}))[0] for answer in before]
        return [*worth, *await rewards(worker, task, solution)]
    episode = await worker.open(problem, seed=1)
    try:
        worth = [bool(await episode.judge(answer)) for answer in before]
        printed = ""
        for command in solution["commands"]:
            output = await episode.bash(command)
            assert output.notice == "", output
            printed = output.text.strip()
        if solution["commands"] and solution["answer"] is not None:
            assert printed == solution["answer"]
        return [*worth, bool(await episode.judge(solution["answer"]))]
    finally:
        await episode.close()


@pytest.mark.parametrize("task", [TRAIN[0], TEST[0]], ids=lambda task: task["id"])
async def test_neither_the_prompt_nor_the_box_contains_the_solution(worker: Any, task: dict[str, Any]) -> None:
    problem = problems.Problem.read(task)
    episode = await worker.open(problem, seed=1)
    secrets = [*task["reference"]["commands"], task["evaluation"].get("example", {}).get("code", "no example")]

    prompt = prompts.instructions(problem.instruction, max_turns=problem.max_turns)
    grep = " ; ".join(f"grep -rlF -- {_quoted(secret)} /etc /home /root /run /srv /tmp /var /opt" for secret in secrets)
    found = (await episode.bash(grep)).text.split()
    await episode.close()

    assert [secret for secret in secrets if secret in prompt] == []
    assert [path for path in found if path != "/run/command"] == []


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"

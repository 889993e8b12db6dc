"""`gateway tasks import` as an operator runs it: its files and messages. It never writes a partial file.

The command runs in the tests' process, except in tests whose standard output cannot be written.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from gateway.tasks.split_view import read_split
from tests.deadlines import COMMAND_S
from tests.fakes.command import Done, in_process

GATEWAY = str(Path(sys.executable).with_name("gateway"))
MBPP: dict[str, Any] = {"task_id": 11, "text": "Write f.", "test_list": ["assert f(1) == 2", "assert f(2) == 4"]}
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": "def f(): ...", "entry_point": "f", "test": "def check(f): f()"}
ITEM = {"description": "Say 7.", "evaluation": {"match": "7"}}
QUIZ = 'name = "quiz"\nimage = "quiz"\n\n[tasks]\ndirectory = "tasks/quiz"\n'


Run: TypeAlias = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Yield a function that runs the command with its arguments in *tmp_path*."""
    monkeypatch.chdir(tmp_path)
    variables = {"GATEWAY_CATALOG_DIR": str(tmp_path / "env_images"), "COLUMNS": "160", "NO_COLOR": "1"}
    with in_process(monkeypatch, capfd) as command:
        yield lambda *arguments: command("tasks", "import", *arguments, **variables)


def mbpp_file(folder: Path, *rows: object) -> str:
    """Write a file with *rows*, and return its name."""
    (folder / "mbpp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "mbpp.jsonl"


@pytest.fixture
def quiz(tmp_path: Path) -> Path:
    """Create an environment `quiz` in *tmp_path*'s catalog, and return its task folder."""
    (tmp_path / "env_images" / "quiz").mkdir(parents=True)
    (tmp_path / "env_images" / "quiz" / "environment.toml").write_text(QUIZ)
    (tmp_path / "tasks" / "quiz").mkdir(parents=True)
    return tmp_path / "tasks" / "quiz"


def refusal(done: Done) -> str:
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr


def test_lines_go_to_standard_output_and_the_summary_does_not(tmp_path: Path, run: Run) -> None:
    done = run("mbpp", mbpp_file(tmp_path, MBPP, MBPP | {"task_id": 12}))

    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ["mbpp-11", "mbpp-12"]
    assert done.stderr == "2 entries read, 2 tasks; written to standard output\n"


def test_a_compressed_humaneval_is_written_to_a_file(tmp_path: Path, run: Run) -> None:
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(HUMANEVAL).encode()))

    done = run("humaneval", "HumanEval.jsonl.gz", "--out", "out.jsonl")

    assert (done.returncode, done.stdout) == (0, "1 entry read, 1 task; written to out.jsonl\n")
    assert [json.loads(line)["id"] for line in read_split(tmp_path / "out.jsonl").tasks if line] == ["humaneval-0"]


def test_a_sanitized_mbpp_is_written_to_a_split_of_an_environment(tmp_path: Path, quiz: Path, run: Run) -> None:
    row = {"task_id": 601, "prompt": "Write f.", "test_imports": [], "test_list": MBPP["test_list"]}
    (tmp_path / "sanitized-mbpp.json").write_text(json.dumps([row, row | {"task_id": 11}]))

    done = run("mbpp", "sanitized-mbpp.json", "--part", "train", "-e", "quiz", "-s", "train")

    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["id"] for line in read_split(quiz / "train.jsonl").tasks if line] == ["mbpp-601"]


def test_agentbench_items_are_imported_with_notes_about_their_oddities(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "AgentBench" / "data" / "os_interaction" / "data"
    (data / "1").mkdir(parents=True)
    (data / "1" / "stock.json").write_text(json.dumps([ITEM, {**ITEM, "create": [{"init": "x"}]}]))
    (data / "dev.json").write_text(json.dumps([ITEM]))

    done = run("agentbench-os", "AgentBench", "--part", "test")

    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == [
        "std-001-stock-00000",
        "std-001-stock-00001",
    ]
    assert "stock.json: entry 2 (std-001-stock-00001): create is a list" in done.stderr


def test_all_unusable_entries_are_named_and_nothing_is_written(tmp_path: Path, run: Run) -> None:
    source = mbpp_file(tmp_path, MBPP, MBPP | {"task_id": None}, MBPP, [1])

    said = refusal(run("mbpp", source, "--out", "out.jsonl"))

    assert said.splitlines() == [
        "mbpp.jsonl:2: task_id: must be a text or a number",
        "mbpp.jsonl:3: mbpp-11 is already the name of mbpp.jsonl:1",
        "mbpp.jsonl:4: must be an object, not list",
        "gateway: 3 of 4 entries cannot be used; nothing was written (--skip-invalid leaves them out)",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["mbpp.jsonl"]


def test_unusable_entries_are_skipped_with_skip_invalid(tmp_path: Path, run: Run) -> None:
    done = run("mbpp", mbpp_file(tmp_path, {}, MBPP), "--skip-invalid")

    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr.splitlines() == [
        "mbpp.jsonl:1: task_id is missing",
        "2 entries read, 1 task, 1 skipped; written to standard output",
    ]


def test_entries_after_the_limit_are_ignored(tmp_path: Path, run: Run) -> None:
    done = run("mbpp", mbpp_file(tmp_path, MBPP, {}), "--limit", "1")

    assert done.returncode == 0
    assert done.stderr == "1 entry read, 1 task; written to standard output\n"


def test_an_existing_split_is_kept_unless_forced(tmp_path: Path, quiz: Path, run: Run) -> None:
    (quiz / "train.jsonl").write_text('{"mine":1}\n')
    arguments = ("mbpp", mbpp_file(tmp_path, MBPP), "--environment", "quiz", "--split", "train")

    said = refusal(run(*arguments))
    kept = (quiz / "train.jsonl").read_text()
    done = run(*arguments, "--force")

    assert said == f"gateway: {quiz}/train.jsonl exists: --force overwrites it\n"
    assert kept == '{"mine":1}\n'
    assert done.returncode == 0
    assert [json.loads(line)["id"] for line in read_split(quiz / "train.jsonl").tasks if line] == ["mbpp-11"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(["humaneval", "no.jsonl"], "gateway: no.jsonl: No such file or directory", id="no file"),
        pytest.param(["agentbench-os", "env_images"], "gateway: env_images: no items", id="no items"),
        pytest.param(["mbpp", "empty.jsonl"], "no entry became a task; nothing was written", id="an empty file"),
        pytest.param(["mbpp", "mbpp.jsonl", "--part", "train"], "no entry became a task", id="nothing of the part"),
        pytest.param(["mbpp", "mbpp.jsonl", "-o", "x", "-s", "y"], "--out is one place", id="two places"),
        pytest.param(["mbpp", "mbpp.jsonl", "-s", "y"], "--environment and --split go together", id="no environment"),
        pytest.param(["mbpp", "mbpp.jsonl", "-e", "quiz"], "--environment and --split go together", id="no split"),
        pytest.param(["mbpp", "mbpp.jsonl", "-e", "quiz", "-s", "../x"], "--split ../x: a split's name", id="a path"),
        pytest.param(["mbpp", "mbpp.jsonl", "-e", "nobody", "-s", "x"], "no environment nobody", id="unknown"),
        pytest.param(["mbpp", "mbpp.jsonl", "-e", "bare", "-s", "x"], "bare has no task folder", id="without tasks"),
        pytest.param(["mbpp", "mbpp.jsonl", "-o", "no/x.jsonl"], "no/x.jsonl: there is no folder no", id="no folder"),
        pytest.param(["mbpp", "mbpp.jsonl", "-o", "env_images", "-f"], "not a regular file", id="a folder"),
        pytest.param(["mbpp", "mbpp.jsonl", "--limit", "0"], "--limit", id="no limit"),
    ],
)
def test_a_wrong_argument_or_source_is_reported_and_nothing_is_written(
    tmp_path: Path, quiz: Path, arguments: list[str], says: str, run: Run
) -> None:
    mbpp_file(tmp_path, MBPP)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "env_images" / "bare").mkdir()
    (tmp_path / "env_images" / "bare" / "environment.toml").write_text('name = "bare"\nimage = "bare"\n')

    assert says in refusal(run(*arguments))
    assert list(quiz.iterdir()) == []


def test_a_full_disk_behind_standard_output_is_reported(tmp_path: Path) -> None:
    command = [GATEWAY, "tasks", "import", "mbpp", str(tmp_path / mbpp_file(tmp_path, MBPP))]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=COMMAND_S, check=False)

    assert (done.returncode, done.stderr) == (2, "gateway: standard output: No space left on device\n")


def test_a_closed_pipe_ends_the_import_quietly(tmp_path: Path) -> None:
    command = [GATEWAY, "tasks", "import", "mbpp", str(tmp_path / mbpp_file(tmp_path, MBPP))]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=COMMAND_S, check=False)

    assert (done.returncode, done.stderr) == (1, "")


def test_a_dash_means_standard_output(tmp_path: Path, run: Run) -> None:
    done = run("mbpp", mbpp_file(tmp_path, MBPP), "--out", "-")

    assert len(done.stdout.splitlines()) == 1
    assert not (tmp_path / "-").exists()


@pytest.mark.parametrize("command", ["agentbench-os", "humaneval", "mbpp"])
def test_help_has_examples(tmp_path: Path, command: str, run: Run) -> None:
    done = run(command, "--help")

    assert done.returncode == 0
    assert f"gateway tasks import {command} " in done.stdout
    assert "--skip-invalid" in done.stdout

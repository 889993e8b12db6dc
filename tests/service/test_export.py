"""`gateway tasks export` on a running gateway, and episodes of the rows that it writes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gateway.core.environment import Environment, TaskView
from tests.fakes.command import Command, Done, in_process
from tests.service.stack import environment, running, tasks

PUBLIC = {"id": "one", "instruction": "Add 1 and 1.", "tags": ["sum"], "difficulty": 1}
TASKS: dict[str, Any] = {
    "tasks_math": tasks(
        train=[
            {**PUBLIC, "question": "1+1", "evaluation": {"answer": "2"}},
            {"instruction": "Add 2 and 2.", "question": "2+2", "evaluation": {"answer": "4"}},
        ],
        test=[{"id": "silent", "question": "3+3", "evaluation": {"answer": "6"}}],
    )
}
TOOL = {
    "type": "function",
    "name": "echo",
    "description": "",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}
KEY = "a-trainers-key-for-tests"


def math(**policy: Any) -> Environment:
    return replace(environment(**policy), task_view=TaskView.PUBLIC)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    with in_process(monkeypatch, capfd) as command:
        yield command


async def exported(run: Command, url: object, *arguments: str, key: str = "") -> Done:
    """Run the command in a thread, because the gateway serves in this one."""
    where = ("--url", str(url), *(("--key", key) if key else ()))
    return await asyncio.to_thread(run, "tasks", "export", *arguments, *where)


def rows(done: Done) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_an_export_stops_at_its_limit(run: Command) -> None:
    async with running(math(), **TASKS) as (_, _, http):
        first = await exported(run, http.base_url, "jsonl", "math", "--limit", "1")
        both = await exported(run, http.base_url, "jsonl", "math", "-n", "2", "--split", "train")

    assert [row["id"] for row in rows(first)] == ["one"]
    assert len(rows(both)) == 2


async def test_rows_of_nemo_gym_have_input_tools_and_a_place_and_open_an_episode(run: Command) -> None:
    async with running(math(), **TASKS) as (stack, gateway, http):
        done = await exported(run, http.base_url, "nemo-gym", "math", "--split", "train")

        first, second = rows(done)
        messages = [{"role": "user", "content": "Add 1 and 1."}]
        assert first == {
            "responses_create_params": {"input": messages, "tools": [TOOL]},
            "verifier_metadata": {"environment": "math", "split": "train", "index": 0, "id": "one"},
        }
        assert second["verifier_metadata"] == {"environment": "math", "split": "train", "index": 1}
        assert "2 tasks; written to standard output" in done.stderr
        for row, question in ((first, "1+1"), (second, "2+2")):
            seeded = await http.post("/nemo/math/seed_session", json=row)
            assert seeded.json() == {"prompt": question}
        assert [one.task["evaluation"] for one in stack.backend.only.sessions.values()] == [{"answer": "4"}]
        assert await gateway.used() == 1, "the second seed of this client ended the first episode"


async def test_with_prompts_the_input_is_the_first_observation_and_no_episode_stays_open(run: Command) -> None:
    async with running(math(slots=1, max_workers=1), **TASKS) as (_, gateway, http):
        found = rows(await exported(run, http.base_url, "nemo-gym", "math", "--prompts"))

        inputs = [row["responses_create_params"]["input"] for row in found]
        assert [message["content"] for [message] in inputs] == ["1+1", "2+2", "3+3"]
        await gateway.eventually_used(0)


async def test_jsonl_is_the_public_view_of_all_splits_in_a_file(run: Command, tmp_path: Path) -> None:
    async with running(math(), trainers={"lab": KEY}, **TASKS) as (_, _, http):
        file = tmp_path / "math.jsonl"

        done = await exported(run, http.base_url, "jsonl", "math", "--out", str(file), key=KEY)

        assert done.returncode == 0, done.stderr
        assert done.stdout == f"3 tasks; written to {file}\n"
        empty: dict[str, Any] = {"instruction": "", "tags": [], "difficulty": None}
        assert [json.loads(line) for line in file.read_text().splitlines()] == [
            PUBLIC,
            {**empty, "id": "train/1", "instruction": "Add 2 and 2."},
            {**empty, "id": "silent"},
        ]
        assert names(tmp_path) == [file.name]


async def test_an_existing_file_stays_without_force(run: Command, tmp_path: Path) -> None:
    async with running(math(), **TASKS) as (_, _, http):
        file = tmp_path / "math.jsonl"
        file.write_text("mine")

        refused = await exported(run, http.base_url, "jsonl", "math", "--out", str(file))
        assert (refused.returncode, file.read_text()) == (2, "mine")
        assert "--force overwrites it" in refused.stderr
        done = await exported(run, http.base_url, "jsonl", "math", "--out", str(file), "--force")
        assert done.returncode == 0
        assert len(file.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("csv", "math"), "csv: the format must be one of nemo-gym, jsonl, parquet"),
        (("jsonl", "maths"), "math"),
        (("jsonl", "math", "--split", "trian"), "train"),
        (("jsonl", "math", "--prompts"), "only rows of nemo-gym"),
        (("nemo-gym", "math"), "silent: the task has no instruction"),
    ],
)
async def test_a_wrong_command_says_what_is_wrong_and_writes_nothing(
    run: Command, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    async with running(math(), **TASKS) as (_, _, http):
        done = await exported(run, http.base_url, *arguments, "--out", str(tmp_path / "file"))

        assert done.returncode == 2
        assert said in done.stderr
        assert names(tmp_path) == []


async def test_a_missing_key_is_reported_with_the_kind_of_key(run: Command) -> None:
    async with running(math(), trainers={"lab": KEY}, **TASKS) as (_, _, http):
        done = await exported(run, http.base_url, "jsonl", "math")

        assert done.returncode == 2
        assert "give a trainer's key with --key" in done.stderr


def test_parquet_without_its_package_names_the_package(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    done = run("tasks", "export", "parquet", "math")

    assert done.returncode == 2
    assert "install env-gateway[parquet]" in done.stderr


class Arrow(ModuleType):
    """A stand-in for pyarrow and pyarrow.parquet, whose files are JSON without a line feed at their end."""

    ArrowException = ZeroDivisionError

    def __init__(self) -> None:
        super().__init__("pyarrow")
        self.Table = self
        self.parquet = self
        self.is_mixed = False

    def from_pylist(self, rows: list[Any]) -> list[Any]:
        if self.is_mixed:
            raise self.ArrowException("cannot mix list and non-list")
        return rows

    def write_table(self, table: list[Any], file: Any) -> None:
        file.write(json.dumps(table).encode())


async def test_parquet_has_the_rows_of_jsonl_and_columns_that_do_not_fit_leave_no_file(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrow = Arrow()
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, arrow)
    async with running(math(), **TASKS) as (_, _, http):
        file = tmp_path / "math.parquet"

        done = await exported(run, http.base_url, "parquet", "math", "-s", "train", "-o", str(file))

        assert done.returncode == 0, done.stderr
        assert json.loads(file.read_text())[0] == PUBLIC
        assert not file.read_text().endswith("\n")
        arrow.is_mixed = True
        refused = await exported(run, http.base_url, "parquet", "math", "-o", str(tmp_path / "other"))
        assert refused.returncode == 2
        assert "do not fit into columns: cannot mix" in refused.stderr
        assert names(tmp_path) == [file.name]

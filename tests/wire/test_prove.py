"""An author runs `gateway tasks prove` on a real gateway, with sound tasks and with each kind of mistake."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import HANG_S
from tests.fakes.command import Command, Done, in_process
from tests.fakes.eventually import eventually
from tests.wire.catalog import EMBEDDED, PROJECT, serving
from tests.wire.gateways import OPERATOR_KEY, Gateway

pytestmark = pytest.mark.wire

TOML = """\
name = "scored"
protocol = "ors"
isolation = "shared"
command = ["python3", "proving.py"]

[pool]
slots = 16
max_workers = 1
idle_worker_s = 600

[limits]
memory_mib = 512
pids = 128
"""
INTERRUPTIBLE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from gateway.cli.main import main; main()"
)
"""Runs the command so that SIGINT interrupts it, even if this process ignores it, as a shell's background jobs do."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with `math` and with `scored`. Its operator has a key, and trainers need none."""
    folder = tmp_path_factory.mktemp("environments")
    (folder / "catalog/scored").mkdir(parents=True)
    (folder / "catalog/scored/environment.toml").write_text(TOML)
    shutil.copy(Path(__file__).with_name("proving.py"), folder / "catalog/scored")
    (folder / "catalog/math").symlink_to(PROJECT / "env_images/math")
    (folder / "tasks").symlink_to(PROJECT / "tasks")
    with serving(EMBEDDED, "math", "scored", GATEWAY_CATALOG_DIR=str(folder / "catalog")) as gateway:
        yield gateway


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    with in_process(monkeypatch, capfd) as command:
        yield command


def task(id: str, mistake: str = "", *, answer: str = "yes", **more: Any) -> dict[str, Any]:
    config = {"answer": answer, "mistake": mistake}
    return {"id": f"custom/{id}", "env_type": "scored", "tags": ["custom"], "config": config, **more}


GOOD = task("good", reference="yes")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.jsonl"


def written(file: Path, *tasks: dict[str, Any]) -> str:
    file.write_text("".join(json.dumps(one) + "\n" for one in tasks), "utf-8")
    return str(file)


def prove(run: Command, gateway: Gateway, *arguments: str) -> Done:
    return run("tasks", "prove", *arguments, "--url", gateway.url)


def report(done: Done) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return found


def test_sound_tasks_of_a_file_are_proven(gateway: Gateway, run: Command, file: Path) -> None:
    actions = [{"name": "wait", "input": {}}, {"name": "answer", "input": {"text": "yes"}}]

    done = prove(run, gateway, written(file, GOOD, task("acts", reference=actions), task("none")))

    assert done.returncode == 0, done.stdout + done.stderr
    row = next(line for line in done.stdout.splitlines() if "scored" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["scored", "custom", "3", "2 of 2", "0.00, 0.00", "0.00, 0.00", "1.00, 1.00", "0.00, 0.00", "0"]
    assert "no reference in 1 task (the task has none): custom/none" in done.stdout
    assert done.stdout.endswith("3 tasks, 0 problems\n")


@pytest.mark.parametrize(
    ("wrong", "play", "says"),
    [
        pytest.param(
            task("paid", "pays for nothing", reference="yes"),
            "no-op wait",
            "earns 0.5, more than the floor of 0 (fix: judge what the agent did",
            id="doing nothing is paid",
        ),
        pytest.param(
            task("loses", reference="no"),
            "reference",
            "earns 0 and does not win, which takes 1 (fix: correct",
            id="loses",
        ),
        pytest.param(
            task("full", reference="yes", reward_full=2),
            "reference",
            "earns 1 and does not win, which takes 2 (fix: correct",
            id="earns less than the full reward",
        ),
        pytest.param(
            task("once", "wins once", reference="yes"),
            "reference",
            "earns 1 in the first play and 0 in the second (fix: make start",
            id="wins once",
        ),
        pytest.param(
            task("raises", "raises", reference="yes"),
            "reference, empty, echo, constant",
            "failed: the tool answer raised: KeyError: 'toop' (fix: correct the tool)",
            id="the scorer raises",
        ),
        pytest.param(
            task("judge", "no judge", reference="yes"),
            "reference, empty, echo, constant",
            "failed: the judge failed (fix: repair the environment",
            id="the scorer ends the session",
        ),
        pytest.param(
            task("goes on", reference=[{"name": "wait", "input": {}}]) | {"reward_full": 0, "id": "custom/goes-on"},
            "reference",
            "does not end the episode (fix: add the action",
            id="does not end",
        ),
        pytest.param(
            task("tool", reference={"name": "shout", "input": {}}),
            "reference",
            "failed: the tool shout did not run: ",
            id="a tool that is not there",
        ),
        pytest.param(
            task("form", reference={"tool": "answer"}), "reference", "failed: the reference has ", id="another form"
        ),
        pytest.param(task("start") | {"config": {}}, "no-op", "failed: author_fault: ", id="no episode opens"),
    ],
)
def test_a_mistake_is_named_with_its_task_line_and_fix(
    gateway: Gateway, run: Command, file: Path, wrong: dict[str, Any], play: str, says: str
) -> None:
    done = prove(run, gateway, written(file, GOOD, wrong))

    assert done.returncode == 3, done.stdout + done.stderr
    (problem,) = [line for line in done.stdout.splitlines() if line.startswith(str(file))]
    assert problem.startswith(f"{file}:2: {wrong['id']}: {play}: {says}"), problem
    assert "(fix: " in problem
    assert done.stdout.endswith("2 tasks, 1 problem\n")


def test_a_failed_play_is_no_reward_of_0(gateway: Gateway, run: Command, file: Path) -> None:
    done = prove(run, gateway, written(file, task("raises", "raises", reference="yes")), "--json")

    found = report(done)
    assert done.returncode == 3
    (row,) = found["groups"]
    assert (row["won"], row["references"], row["failed"]) == (0, 1, 5)
    assert (row["empty"], row["echo"], row["constant"]) == (None, None, None)
    assert row["no-op"] == {"max": 0.0, "mean": 0.0}


def test_a_stated_floor_allows_a_reward_for_nothing(gateway: Gateway, run: Command, file: Path) -> None:
    paid = task("paid", "pays for nothing", reference="yes", reward_floor=0.5)

    assert prove(run, gateway, written(file, paid)).returncode == 0


def test_the_text_that_the_prompt_gives_away_is_a_remark(gateway: Gateway, run: Command, file: Path) -> None:
    empty = task("empty", answer="", reference="")

    done = prove(run, gateway, written(file, empty), "--json")

    assert done.returncode == 0, done.stderr
    (remark,) = report(done)["remarks"]
    assert (remark["play"], remark["remark"]) == ("empty", "earns 1, more than the floor of 0")


def test_texts_go_to_the_chosen_tool(gateway: Gateway, run: Command, file: Path) -> None:
    chosen = ("--text-tool", "answer", "--text-argument", "text")

    assert prove(run, gateway, written(file, GOOD), *chosen).returncode == 0
    assert "give both, or neither" in prove(run, gateway, written(file, GOOD), *chosen[:2]).stderr


def test_tasks_of_an_environment_are_proven_with_what_operators_see(gateway: Gateway, run: Command) -> None:
    chosen = ("math", "--split", "test", "--limit", "3")

    refused = prove(run, gateway, *chosen)
    done = prove(run, gateway, *chosen, "--operator-key", OPERATOR_KEY, "--json")

    assert refused.returncode == 2
    assert "give an operator's key with --operator-key or GATEWAY_OPERATOR_KEY" in refused.stderr
    assert done.returncode == 0, done.stderr
    found = report(done)
    assert [row["tasks"] for row in found["groups"]] == [1, 1, 1]
    assert [row["won"] for row in found["groups"]] == [1, 1, 1]
    assert not found["problems"]
    assert not found["skipped"]


def test_the_template_of_math_is_proven(gateway: Gateway, run: Command, file: Path) -> None:
    assert run("tasks", "new", "math", "--format", "json", "--out", str(file.with_suffix(".json"))).returncode == 0

    done = prove(run, gateway, str(file.with_suffix(".json")))

    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("1 task, 0 problems\n")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        pytest.param({"id": 3}, ":1: id: must be a text", id="the schema refuses it"),
        pytest.param(task("x", reference=4), ":1: reference: must be ", id="a number as the reference"),
        pytest.param({"id": "x"}, ":1: env_type: is missing; name the environment here", id="no environment"),
        pytest.param(
            {"id": "x", "env_type": "y"},
            ":1: env_type: the gateway has no environment 'y'; it has math, scored",
            id="y",
        ),
    ],
)
def test_a_file_that_cannot_be_played_is_refused_with_its_line(
    gateway: Gateway, run: Command, file: Path, line: dict[str, Any], says: str
) -> None:
    done = prove(run, gateway, written(file, line, GOOD))

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{file}{says}"), done.stderr


def test_the_command_says_which_argument_is_wrong(gateway: Gateway, run: Command, file: Path) -> None:
    missing = prove(run, gateway, "none.jsonl")
    unknown = prove(run, gateway, "none")
    no_split = prove(run, gateway, "math", "--split", "none")
    of_file = prove(run, gateway, written(file, GOOD), "--split", "train")

    assert [done.returncode for done in (missing, unknown, no_split, of_file)] == [2, 2, 2, 2]
    assert "none.jsonl: No such file" in missing.stderr
    assert "none" in unknown.stderr
    assert "split" in no_split.stderr
    assert "--split: only an environment has splits" in of_file.stderr


def test_a_gateway_that_is_not_there_is_named(run: Command, file: Path) -> None:
    done = run("tasks", "prove", written(file, GOOD), "--url", "http://127.0.0.1:1")

    assert done.returncode == 1
    assert done.stderr.startswith("gateway http://127.0.0.1:1: no connection")


async def test_an_interrupt_closes_the_open_episodes(gateway: Gateway, file: Path, tmp_path: Path) -> None:
    held = task("held", "holds", reference="yes")
    held["config"]["marked"] = str(tmp_path / "marked")
    arguments = ("tasks", "prove", written(file, held), "--url", gateway.url)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", INTERRUPTIBLE, *arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )

    async def plays_the_reference() -> None:
        assert (tmp_path / "marked").exists()

    async def nothing_is_left() -> None:
        assert await gateway.sessions() == []

    try:
        await eventually(plays_the_reference)
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(HANG_S):
            _, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()

    assert process.returncode == 130
    assert "interrupted, and closed the open episodes" in stderr.decode()
    await eventually(nothing_is_left)

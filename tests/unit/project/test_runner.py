"""The test runner: its preparation, lanes, and reports of failures, hangs and durations."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import COMMAND_S
from tests.fakes.eventually import until_now
from tests.runner import preparation, stacks
from tests.runner.__main__ import CORES, Run, busy, hunt, parsed, report
from tests.runner.lanes import reproduce

ROOT = Path(__file__).resolve().parents[3]
PYTEST = ("-m", "pytest", "-qq", "--no-summary", "-p", "tests.runner.needs", "-p", "tests.runner.plugin")


def run(
    folder: Path, text: str, *arguments: str, lane: str = "main", tests: Sequence[str] = ("",), **environ: str
) -> tuple[int, str]:
    """Run pytest with the runner's plugins on *tests* of a file with *text*, and return its exit status and output."""
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n  docker\n  redis\n  sandbox\n  cluster\n  needs\ntimeout = 60\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            *PYTEST,
            "--rootdir",
            str(folder),
            "-c",
            str(folder / "pytest.ini"),
            *arguments,
            *(f"{folder}/{test}" for test in tests),
        ],
        cwd=ROOT,
        env={**os.environ, "TESTS_RUN": str(folder), "TESTS_LANE": lane, "TESTS_ORDER": "", **environ},
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    return done.returncode, done.stdout + done.stderr


def rows(folder: Path, lane: str = "main") -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in (folder / f"{lane}.jsonl").read_text().splitlines()]


def test_a_failure_is_recorded_and_printed_with_the_command_that_reproduces_it(tmp_path: Path) -> None:
    status, output = run(tmp_path, "def test_wrong():\n    assert 1 == 2\ndef test_right(): pass\n")

    assert status == 1
    assert "FAILED test_it.py::test_wrong (call" in output
    assert "reproduce: make test ARGS='test_it.py::test_wrong'" in output
    assert """under load, until it fails again: make test ARGS="--hunt 20 'test_it.py::test_wrong'\"""" in output
    outcomes = {(row["test"], row["outcome"]) for row in rows(tmp_path) if row["when"] == "call"}
    assert outcomes == {("test_it.py::test_wrong", "failed"), ("test_it.py::test_right", "passed")}


LOGS = """
import pathlib, pytest
from tests.runner import logs

FILE = pathlib.Path(__file__).with_name("gateway.log")

@pytest.fixture(scope="module", autouse=True)
def server():
    with FILE.open("w") as log:
        logs.follow(FILE)
        yield log

def write(log, text):
    log.write(text + "\\n")
    log.flush()

def test_right(server):
    write(server, "of the test before")

def test_wrong(server):
    write(server, "of the failure")
    logs.ask("workers", lambda: "of its worker")
    logs.ask("dead workers", lambda: 1 / 0)
    FILE.unlink()
    assert False

def test_wrong_too(server): assert False
"""


@pytest.mark.parametrize("processes", [(), ("-n1",)], ids=["one process", "xdist"])
def test_a_failure_shows_what_servers_wrote_during_the_test_even_if_their_logs_are_removed(
    tmp_path: Path, processes: tuple[str, ...]
) -> None:
    _, output = run(tmp_path, LOGS, *processes)

    wrong, too = (row["sections"] for row in rows(tmp_path) if row["outcome"] == "failed")
    log = f"log of {tmp_path.name}/gateway.log"
    assert (wrong[log], wrong["log of workers"]) == ("of the failure\n", "of its worker")
    assert "ZeroDivisionError" in wrong["log of dead workers"]
    assert log not in too
    assert "of the failure" in output
    assert "of the test before" not in output


ORDERED = """
import pytest
@pytest.mark.parametrize("number", range(20))
def test_in_turn(number): assert number != 19
"""


def order(folder: Path, seed: str, tests: Sequence[str] = ("",)) -> list[str]:
    """Return the tests of `ORDERED` in the order of a run."""
    (folder / "main.jsonl").unlink(missing_ok=True)
    run(folder, ORDERED, tests=tests, TESTS_ORDER=seed)
    return [row["test"] for row in rows(folder) if row["when"] == "setup"]


def test_a_seed_determines_another_order_which_the_file_of_a_failure_repeats(tmp_path: Path) -> None:
    usual = order(tmp_path, "")
    shuffled = order(tmp_path, "7")
    again = order(tmp_path, "7")
    until_failure = (tmp_path / "order-main.txt").read_text().splitlines()

    assert usual == [f"test_it.py::test_in_turn[{number}]" for number in range(20)]
    assert shuffled == again != usual
    assert sorted(shuffled) == sorted(usual)
    assert until_failure == shuffled[: len(until_failure)]
    assert until_failure[-1] == "test_it.py::test_in_turn[19]"


def test_the_tests_of_a_file_of_arguments_run_in_its_order(tmp_path: Path) -> None:
    names = [f"test_it.py::test_in_turn[{number}]" for number in (3, 1, 2)]
    file = tmp_path / "order.txt"
    file.write_text("\n".join(names))

    options, chosen = parsed([f"@{file}", "-x"])

    assert chosen == [*names, "-x"]
    assert order(tmp_path, options.seed, names) == names


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["tests/unit", "-k", "a or b"], (0, 0, "", ["tests/unit", "-k", "a or b"])),
        (["--hunt", "20", "tests/unit"], (20, 10 * CORES, "", ["tests/unit"])),
        (["--load", "4", "--seed", "7"], (0, 4, "7", [])),
        (["--hunt=2", "--load=0"], (2, 0, "", [])),
    ],
)
def test_options_of_the_runner_stand_beside_those_of_pytest(
    arguments: list[str], found: tuple[int, int, str, list[str]]
) -> None:
    options, chosen = parsed(arguments)

    assert (options.hunt, options.load, options.seed, chosen) == found


def test_a_hunt_repeats_with_other_seeds_until_a_round_fails() -> None:
    seeds: list[str] = []

    def third_fails(seed: str) -> int:
        seeds.append(seed)
        return int(len(seeds) == 3)

    assert hunt(5, third_fails) == 1
    assert seeds == ["1", "2", "3"]
    assert hunt(2, lambda _: 0) == 0


def test_a_load_of_busy_processes_ends_with_its_block_and_with_its_parent(tmp_path: Path) -> None:
    before = set(stacks.descendants(os.getpid()))
    with busy(2):
        assert len(set(stacks.descendants(os.getpid())) - before) == 2
    assert set(stacks.descendants(os.getpid())) <= before

    code = (
        "import os, signal; from tests.runner.__main__ import busy\nwith busy(1): os.kill(os.getpid(), signal.SIGKILL)"
    )
    with (tmp_path / "output").open("wb") as output:  # the busy process has it as long as it lives
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=output, timeout=COMMAND_S)
    until_now(lambda: not _holders(tmp_path / "output"))


def test_orphans_of_a_run_are_found_by_its_variable() -> None:
    value = f"/nowhere/{os.getpid()}"
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    code = f"import subprocess; print(subprocess.Popen({sleeper!r}, stdout=-3, stderr=-3).pid)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TESTS_RUN": value},
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )

    found = stacks.with_variable("TESTS_RUN", value)
    stacks.kill(found)

    assert found == [int(done.stdout)]


def _holders(file: Path) -> list[str]:
    """Return the processes that have *file* open."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            found += [link.parts[2]] if link.readlink() == file else []
    return found


HANGS = """
import subprocess, sys, pytest

@pytest.mark.timeout(0.5)
def test_hangs():
    left = subprocess.Popen([sys.executable, "-c", "import time\\ndef dawdle(): time.sleep(600)\\ndawdle()"])
    print(f"child={left.pid}", file=sys.__stderr__, flush=True)
    left.wait()

def test_goes_on(): pass
"""


def test_a_test_that_hangs_fails_with_the_stacks_of_its_processes_and_they_are_killed(tmp_path: Path) -> None:
    status, output = run(tmp_path, HANGS, "-s")

    child = int(output.partition("child=")[2].split()[0])
    assert status == 1
    assert "did not end within" in output
    assert "in test_hangs" in output
    assert "dawdle" in output
    assert child not in stacks.descendants(1)
    assert [row["outcome"] for row in rows(tmp_path) if row["test"].endswith("goes_on")] == ["passed"] * 3


NEEDS = """
import pytest
@pytest.mark.docker
@pytest.mark.needs("image:os")
def test_it(): pass
def test_other(): pass
"""


def test_a_collection_records_the_needs_of_the_selected_tests(tmp_path: Path) -> None:
    assert run(tmp_path, NEEDS, "--collect-only", lane="collect")[0] == 0

    found = json.loads((tmp_path / "collected.json").read_text())
    assert found == {"needs": ["engine", "image:base", "image:os"], "lanes": ["main"], "tests": 2}


@pytest.mark.parametrize(("ci", "status", "outcome"), [("", 0, "skipped"), ("true", 1, "failed")], ids=["here", "CI"])
def test_an_unavailable_need_skips_its_tests_and_fails_them_in_ci(
    tmp_path: Path, ci: str, status: int, outcome: str
) -> None:
    for need in ("engine", "image:base"):
        (tmp_path / need).touch()
    (tmp_path / "image:os.failed").write_text("no such base")

    found, output = run(tmp_path, NEEDS, TESTS_READY=str(tmp_path), CI=ci)

    assert found == status, output
    assert next(row["outcome"] for row in rows(tmp_path) if row["test"].endswith("test_it")) == outcome
    assert "image:os could not be prepared: no such base" in json.dumps(rows(tmp_path))


LANES = """
import pytest
@pytest.mark.cluster
def test_machines(): pass
def test_other(): pass
"""


@pytest.mark.parametrize(("lane", "test"), [("main", "test_other"), ("cluster", "test_machines")])
def test_a_lane_runs_its_own_tests_only(tmp_path: Path, lane: str, test: str) -> None:
    assert run(tmp_path, LANES, lane=lane)[0] == 0

    assert {row["test"].rpartition("::")[2] for row in rows(tmp_path, lane)} == {test}


def test_a_need_includes_its_requirements_in_the_order_of_preparation() -> None:
    assert preparation.with_requirements(["image:os"]) == [
        *("engine", "base-image", "image:base", "image:base-sandbox", "image:os")
    ]
    assert preparation.with_requirements([]) == []


def test_an_unknown_need_is_refused_with_a_list_of_the_known_needs() -> None:
    with pytest.raises(KeyError, match="no such need: image:oss; there are packages, "):
        preparation.with_requirements(["image:oss"])


def test_each_step_is_listed_after_the_steps_that_it_waits_for() -> None:
    names = list(preparation.STEPS)

    assert [
        (need, other)
        for need, step in preparation.STEPS.items()
        for other in (*step.requires, *step.after)
        if names.index(other) > names.index(need)
    ] == []


def test_a_step_whose_requirement_failed_fails_with_the_same_reason_and_other_steps_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {
        "first": preparation.Step(["sh", "-c", "echo no disk >&2; exit 3"]),
        "second": preparation.Step(["true"], requires=["first"]),
        "other": preparation.Step(["true"], after=["first"]),
    }
    monkeypatch.setattr(preparation, "STEPS", steps)
    preparing = preparation.Preparation(list(steps), ready=tmp_path, log=tmp_path / "log")

    preparing.start()
    preparing.wait()

    assert (tmp_path / "other").exists()
    assert "no disk" in (tmp_path / "first.failed").read_text()
    assert "no disk" in (tmp_path / "second.failed").read_text()


def test_the_summary_sums_the_seconds_of_each_file_and_names_each_failure_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.runner.__main__.RUN", tmp_path)
    phases = [
        ("a.py::x", "call", "failed", 1.0),
        ("a.py::x", "teardown", "failed", 0.5),
        ("b.py::y", "call", "passed", 2),
    ]
    lines = [json.dumps(dict(zip(("test", "when", "outcome", "seconds"), phase, strict=True))) for phase in phases]
    (tmp_path / "main.jsonl").write_text("\n".join(lines))

    status = report(Run({}, statuses={"main": 1}))

    printed = capsys.readouterr().out
    assert status == 1
    assert json.loads((tmp_path / "durations.json").read_text())["files"] == {"a.py": 1.5, "b.py": 2.0}
    assert "slowest files:\n      2.0  b.py\n      1.5  a.py\n" in printed
    assert printed.count("failed: a.py::x") == 1
    assert printed.endswith("1 passed, 1 failed\n")


PLAYS = """
import pytest
@pytest.mark.parametrize(("won", "lost"), [(30, 0), (6, 46)])
def test_plays(record_property, won, lost):
    record_property("other", "of no interest")
    record_property("played", {"environment": "chat", "where": "image", "won": won, "lost": lost})
    assert won != 6
"""


def test_the_summary_counts_bundled_tasks_that_were_won_and_lost_including_those_of_failed_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, PLAYS, "-n1")
    monkeypatch.setattr("tests.runner.__main__.RUN", tmp_path)
    tasks = sum(
        len((ROOT / f"tasks/chat/{split}.jsonl").read_text("utf-8").splitlines()) for split in ("train", "test")
    )

    report(Run({}, statuses={"main": 1}))

    line = f"played chat (image): 36 won by their reference, 46 lost by a wrong play, of {tasks} tasks\n"
    assert line in capsys.readouterr().out
    assert all(row.keys() >= {"test"} and "other" not in row for row in rows(tmp_path))


@pytest.mark.parametrize(
    ("nodeid", "order", "command"),
    [
        ("tests/a.py::t", "", "make test ARGS='tests/a.py::t'"),
        ("tests/a.py::t[x y]", "given", "make test ARGS=\"'tests/a.py::t[x y]'\""),
        ("tests/a.py::t", "7", "make test ARGS=\"--seed 7 'tests/a.py::t'\""),
    ],
)
def test_a_failed_test_is_reproduced_by_one_command(
    nodeid: str, order: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTS_ORDER", order)

    assert reproduce(nodeid) == command

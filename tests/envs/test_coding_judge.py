"""The coding environment's judge: comparison, limits, credit, infrastructure faults and test commands."""

from __future__ import annotations

import asyncio
import base64
import importlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.deadlines import COMMAND_S
from tests.envs.coding_world import KINDS, World, comparing, faults, judging, opened, tasks, workspace
from tests.envs.plain_sandbox import Ended, PlainError, PlainSandbox, PlainSandboxes
from tests.envserver.eventually import eventually
from tests.sandbox.control_groups import LOOPS, PEERS, cpu_group, join

pytestmark = pytest.mark.sandbox

timing: Any = importlib.import_module("coding_time")
SQUARE = {
    "evaluation": {
        "function": "square",
        "time_limit_seconds": 1,
        "test_cases": [{"arguments": [n], "output": n * n, **({"public": True} if n == 0 else {})} for n in range(5)],
    }
}


@pytest.fixture(params=KINDS)
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    async with opened(request.param, tmp_path) as world:
        yield world


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[World]:
    """Yield the library's sandboxes on one CPU of their own, as in a worker's container."""
    with cpu_group() as group:
        async with opened("library", tmp_path) as world:
            await world.sandboxes.check()
            join(group)
            yield world


@pytest.mark.parametrize(
    ("answer", "expected", "is_same"),
    [
        pytest.param(1, 1, True, id="an integer"),
        pytest.param(1.0, 1, True, id="a float with an integer's value"),
        pytest.param(True, 1, False, id="True is not 1"),
        pytest.param(1, True, False, id="1 is not True"),
        pytest.param(0, None, False, id="0 is not null"),
        pytest.param(0.1 + 0.2, 0.3, True, id="floats within the tolerance"),
        pytest.param(0.31, 0.3, False, id="floats outside the tolerance"),
        pytest.param(10**4000, 0.5, False, id="an integer above any float"),
        pytest.param("a", "a", True, id="a text"),
        pytest.param(["a"], "a", False, id="a list instead of a text"),
        pytest.param([1, [2]], [1, [2]], True, id="nested lists"),
        pytest.param([1], [1, 2], False, id="a list too short"),
        pytest.param({"b": 1, "a": 2}, {"a": 2, "b": 1}, True, id="keys in another order"),
        pytest.param({"a": 2, "b": 1}, {"a": 2}, False, id="a superfluous key"),
    ],
)
def test_answers_are_compared_by_value_and_kind(answer: Any, expected: Any, is_same: bool) -> None:
    assert comparing.same(answer, expected) is is_same


@pytest.mark.parametrize(
    ("answer", "expected", "is_same"),
    [
        pytest.param("1 2\n", "1 2", True, id="the same"),
        pytest.param("1 2 \n\n", "1 2", True, id="blanks at the end"),
        pytest.param("0.30000000000000004", "0.3", True, id="a float in other digits"),
        pytest.param("x = 0.33333333, y", "x = 0.333333333333, y", True, id="a float in a line"),
        pytest.param("[0.1, 1e-07]", "[0.10000000001, 1.0e-7]", True, id="floats in a list"),
        pytest.param("0.3001", "0.3", False, id="another float"),
        pytest.param("3", "3.0", False, id="an integer for a float"),
        pytest.param("3.0", "3", False, id="a float for an integer"),
        pytest.param("1000001", "1000000", False, id="integers that differ by little"),
        pytest.param("9" * 5_000, "9" * 5_000, True, id="integers of any length"),
        pytest.param("9" * 5_000, "9" * 4_999 + "8", False, id="other integers of that length"),
        pytest.param("nan", "0.3", False, id="no number"),
        pytest.param("1e400", "1e401", False, id="beyond floats"),
        pytest.param("0.3 0.3", "0.3", False, id="one more"),
        pytest.param("0.3\n0.3", "0.3 0.3", False, id="on two lines"),
    ],
)
def test_floats_that_a_program_prints_are_equal_within_a_relative_tolerance(
    answer: str, expected: str, is_same: bool
) -> None:
    assert comparing.same_text(answer.encode(), expected) is is_same
    assert comparing.same_text(answer.encode(), expected, exact=True) is (
        is_same and answer.split() == expected.split()
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(JSON, JSON)
def test_every_value_equals_itself_and_no_list_of_it(value: Any, other: Any) -> None:
    assert comparing.same(value, value)
    assert not comparing.same([value], value)
    assert not comparing.same([other, value], [value])


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "", "1 2", "[" * 100_000, "9" * 5_000, '{"a": NaN}'])
def test_a_text_that_is_not_an_answer_is_refused(text: str) -> None:
    with pytest.raises(comparing.NotAnAnswer):
        comparing.parse(text)


PROGRAM_TASK = {"evaluation": {"test_cases": [{"input": "", "output": "7"}]}}
ONE = {"evaluation": {"function": "f", "test_cases": [{"arguments": [1], "output": 1}]}}
KEYED = {"evaluation": {"function": "f", "test_cases": [{"arguments": [1], "output": {"1": [{"2": 3}]}}]}}
ANNOTATED = """
from typing import NamedTuple

class Point(NamedTuple):
    x: int

def checked(function):
    def inner(value):
        assert type(function.__annotations__["value"]) is type
        assert Point.__annotations__["x"] is int
        return function.__annotations__["return"](value)
    return inner

@checked
def f(value: int) -> int:
    return value
"""


@pytest.mark.parametrize(
    ("task", "source", "score"),
    [
        pytest.param(ONE, ANNOTATED, 1.0, id="annotations that are read at run time"),
        pytest.param(ONE, "\ufeffdef f(x): return x", 1.0, id="a byte order mark"),
        pytest.param(PROGRAM_TASK, "\ufeffprint(7)", 1.0, id="a byte order mark in a program"),
        pytest.param(KEYED, "def f(x): return {'1': [{'2': 3}]}", 1.0, id="keys that are texts"),
        pytest.param(KEYED, "def f(x): return {1: [{'2': 3}]}", 0.0, id="a key that is a number"),
        pytest.param(KEYED, "def f(x): return {'1': ({2: 3},)}", 0.0, id="a number as an inner key"),
        pytest.param(KEYED, "def f(x): return {1: 'wrong', '1': [{'2': 3}]}", 0.0, id="a key twice"),
    ],
)
async def test_a_solution_runs_as_its_own_file_would_and_keys_keep_their_types(
    world: World, task: dict[str, Any], source: str, score: float
) -> None:
    assert (await world.judge(task, source)).score == score


async def test_the_credit_is_the_passed_fraction_or_all_or_nothing(world: World) -> None:
    half = "def square(n): return n * n if n < 3 else 0"
    strict = {"evaluation": {**SQUARE["evaluation"], "credit": "all"}}

    fraction, all_or_nothing = await world.judge(SQUARE, half), await world.judge(strict, half)

    assert (fraction.passed, fraction.score) == (2, 0.5)
    assert (all_or_nothing.passed, all_or_nothing.score) == (2, 0.0)


@pytest.mark.parametrize("source", ["", " \n", "\ufeff\n"])
async def test_an_empty_program_does_not_pass_a_case_without_output(tmp_path: Path, source: str) -> None:
    task = {"evaluation": {"test_cases": [{"input": "\n", "output": ""}, {"input": "a\n", "output": "a\n"}]}}

    async with opened("plain", tmp_path) as world:
        verdict = await world.judge(task, source)

    assert (verdict.score, {outcome.kind for outcome in verdict.outcomes}) == (0.0, {"fault"})


async def test_public_cases_report_the_fault_and_are_not_judged(world: World) -> None:
    verdict = await world.judge(SQUARE, "def square(n):\n    return 1 // n", public=True)

    assert [outcome.kind for outcome in verdict.outcomes] == ["fault"]
    assert verdict.outcomes[0].detail.startswith("ZeroDivisionError")
    assert "line 2" in verdict.outcomes[0].detail


async def test_no_cases_run_after_the_time_for_all_cases_is_over(worker: World) -> None:
    # A sleeping solution: other tests could keep a computing one from the CPU, which is a fault.
    endless = "import time\ndef square(n):\n    time.sleep(60)\n    return 0"

    verdict = await worker.judge(SQUARE, endless, total_s=0.5)

    assert verdict.outcomes[-1].kind == "not run"
    assert verdict.score == 0.0


class Failing(PlainSandboxes):
    """Sandboxes that run nothing: a watchdog ended them for *reason*, or for an unknown reason if it is None."""

    def __init__(self, directory: Path, reason: str | None) -> None:
        super().__init__(directory)
        self._reason = reason

    async def open(self, layer: Path | None = None) -> PlainSandbox:
        sandbox = await super().open(layer)
        await sandbox.close()
        sandbox.killed = self._reason
        return sandbox


@pytest.mark.parametrize("reason", [None, "lost"])
async def test_a_failing_sandbox_is_an_error_without_a_reward(tmp_path: Path, reason: str | None) -> None:
    failing = World(Failing(tmp_path, reason), PlainError)

    with pytest.raises(faults.SandboxFault):
        await failing.judge(SQUARE, "def square(n): return n * n")


async def test_a_sandbox_killed_for_its_memory_is_the_solutions_fault(tmp_path: Path) -> None:
    failing = World(Failing(tmp_path, "memory"), PlainError)

    verdict = await failing.judge(SQUARE, "def square(n): return n * n")

    assert {outcome.kind for outcome in verdict.outcomes} == {"killed"}
    assert verdict.score == 0.0


async def test_a_cancelled_judgement_leaves_no_sandbox(tmp_path: Path) -> None:
    async with opened("library", tmp_path) as world:
        judging_now = asyncio.create_task(world.judge(SQUARE, "def square(n):\n    while True: pass"))

        async def is_judging() -> bool:
            return repr(world.sandboxes).startswith("<Sandboxes 1 open")

        await eventually(is_judging)
        judging_now.cancel()
        with pytest.raises(asyncio.CancelledError):
            await judging_now

        assert repr(world.sandboxes) == "<Sandboxes 0 open, 0 layers>"


# Sessions that share the CPU

NEEDY = {"evaluation": {"function": "need", "time_limit_seconds": 1, "test_cases": [{"arguments": [7], "output": 7}]}}
NEED = """
import time
def need(n):
    begun = time.process_time()
    while time.process_time() - begun < 0.6: pass
    return n
"""
"""A right solution that needs a part of its CPU time limit."""


async def busy(sandboxes: Any, loops: str, *, judged_s: float | None = None) -> Any:
    """Open a sandbox with busy loops: of an agent, or judged with *judged_s* of CPU time."""
    sandbox = await sandboxes.open()
    if judged_s is not None:
        sandbox.judged = judging.Judged(judged_s)
    assert (await sandbox.run(["bash", "-c", loops])).status == 0
    return sandbox


async def test_a_hundred_busy_loops_of_another_session_change_no_reward(worker: World) -> None:
    await busy(worker.sandboxes, LOOPS)

    verdict = await worker.judge(NEEDY, NEED)

    assert verdict.score == 1.0, verdict


async def test_a_solution_that_other_sessions_keep_from_the_cpu_is_a_fault_without_a_reward(worker: World) -> None:
    await busy(worker.sandboxes, PEERS, judged_s=3600.0)  # as if many judges had started at the same time

    with pytest.raises(faults.SandboxFault, match="kept the solution from the CPU"):
        await worker.judge(NEEDY, NEED, total_s=3.0)


class Relieved:
    """Sandboxes next to a busy sandbox, which closes before the second sandbox opens."""

    def __init__(self, sandboxes: Any, hog: Any) -> None:
        self._sandboxes = sandboxes
        self._hog = hog
        self.opened = 0

    async def open(self, layer: Any = None) -> Any:
        self.opened += 1
        if self.opened == 2:
            await self._hog.close()
        return await self._sandboxes.open(layer)


async def test_a_solution_that_other_sessions_kept_from_the_cpu_is_run_again(
    worker: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "WALL_EXTRA_S", 2.0)
    task = {"evaluation": {**NEEDY["evaluation"], "time_limit_seconds": 0.3}}
    relieved = Relieved(worker.sandboxes, await busy(worker.sandboxes, PEERS, judged_s=3600.0))

    verdict = await World(relieved, worker.error).judge(task, NEED)

    assert (verdict.score, relieved.opened) == (1.0, 2), verdict


SELF_STARVING = {
    "busy children": "for _ in range(30):\n    if os.fork() == 0: break\nwhile True: pass",
    "busy children that others fork": "def burn():\n    if os.fork() == 0:\n        os.fork(); os.fork()\n"
    "        while True: pass\nfor _ in range(6): burn()\nwhile True: pass",
    "children that nobody waits for": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nif os.fork():\n"
    "    while True: pass\nwhile True:\n    if os.fork() == 0:\n        while time.process_time() < 0.01: pass\n"
    "        os._exit(0)\n    try: os.wait()\n    except ChildProcessError: pass",
    "a chain of orphans": "if os.fork():\n    while True: pass\nwhile True:\n"
    "    while time.process_time() < 0.01: pass\n    if os.fork(): os._exit(0)",
    "a lower priority, and children": "if os.fork(): os.nice(19)\nwhile True: pass",
}
SLEEPING = {
    "a lower priority": "os.nice(19)\nwhile True: pass",
    "the lowest priority": "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass",
    "sleep": "time.sleep(90)",
    "a stop": "os.kill(os.getpid(), signal.SIGSTOP)",
}
"""Solutions that leave the CPU to other programs, so the test may run them concurrently."""


async def test_a_solution_that_keeps_itself_from_the_cpu_fails(worker: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WALL_EXTRA_S", 2.0)
    task = {"test_cases": [{"input": "", "output": "7"}], "time_limit_seconds": 0.1}
    await busy(worker.sandboxes, PEERS)  # competes with the solution

    async def judged(code: str) -> tuple[str, float | None]:
        try:
            # Enough time for a second of CPU time next to other tests, which may really keep the solution from the CPU.
            verdict = await worker.judge(task, f"import os, signal, time\n{code}", total_s=100.0)
        except faults.SandboxFault as fault:
            return str(fault), None
        return verdict.outcomes[0].kind, verdict.score

    found = {name: await judged(code) for name, code in SELF_STARVING.items()}
    found |= zip(SLEEPING, await asyncio.gather(*map(judged, SLEEPING.values())), strict=True)

    assert found == dict.fromkeys(SELF_STARVING | SLEEPING, ("time", 0.0))


@pytest.mark.parametrize(
    ("used_s", "waited_s", "is_starved"),
    [
        pytest.param(0.0, 0.0, False, id="it slept"),
        pytest.param(0.5, 0.2, False, id="it ran a little, and slept"),
        pytest.param(0.9, 2.9, False, id="other programs took a quarter"),
        pytest.param(0.9, 3.0, True, id="other programs took more"),
        pytest.param(0.99, 7.0, True, id="it got nearly all, too late"),
        pytest.param(0.0, 8.0, True, id="it got nothing"),
        pytest.param(1.0, 8.0, False, id="it used its time, whatever else ran"),
        pytest.param(16.0, 7.9, False, id="its own processes delayed it"),
        pytest.param(0.9, 0.9, False, id="they did for a while, then it slept"),
    ],
)
def test_starving_is_distinguished_from_failing(used_s: float, waited_s: float, is_starved: bool) -> None:
    assert timing.is_starved(used_s=used_s, waited_s=waited_s, cpu_s=1.0, wall_s=8.0) is is_starved


def attempts_of(*, timed_out: bool, walls: list[float] | None = None, **had: float) -> Any:
    """Return an attempt function that always ends in the same way; a *waited* of 1 is the whole wall time."""

    async def attempt(judged: Any, wall_s: float) -> Ended:
        if walls is not None:
            walls.append(wall_s)
        judged.used_s, judged.unseen_s = had.get("used_s", 0.0), had.get("unseen_s", 0.0)
        judged.waited_s = had.get("waited", 0.0) * wall_s
        return Ended(-9 if timed_out else 0, b"", b"", timed_out, False)

    return attempt


async def test_a_starving_case_gets_twice_the_time_in_each_attempt_and_finally_no_verdict() -> None:
    walls: list[float] = []

    with pytest.raises(faults.SandboxFault):
        await timing.Time(1000.0, limit_s=1.0).give(attempts_of(timed_out=True, waited=1.0, walls=walls))

    assert walls == [8.0, 16.0, 32.0]


@pytest.mark.parametrize(
    ("is_charged", "had"),
    [
        pytest.param(True, {"used_s": 1.0, "waited": 1.0}, id="used its time"),
        pytest.param(True, {"unseen_s": 1.0, "waited": 1.0}, id="may have used its time"),
        pytest.param(False, {"used_s": 1.0, "waited": 1.0}, id="a test command that used its time"),
    ],
)
async def test_a_case_that_fails_by_itself_is_run_once(is_charged: bool, had: dict[str, float]) -> None:
    walls: list[float] = []
    time = timing.Time(1000.0, limit_s=1.0, is_charged=is_charged)

    done = await time.give(attempts_of(timed_out=True, walls=walls, **had))

    assert (done.timed_out, len(walls)) == (True, 1)


async def test_a_sleeping_case_is_run_once_more_and_fails_if_it_sleeps_again() -> None:
    walls: list[float] = []

    done = await timing.Time(1000.0, limit_s=1.0).give(attempts_of(timed_out=True, walls=walls))

    assert (done.timed_out, walls) == (True, [8.0, 8.0])


async def test_a_case_that_stood_still_with_the_machine_does_not_fail() -> None:
    attempts = iter((attempts_of(timed_out=True), attempts_of(timed_out=False, used_s=0.1)))

    async def attempt(judged: Any, wall_s: float) -> Any:
        return await next(attempts)(judged, wall_s)

    done = await timing.Time(1000.0, limit_s=1.0).give(attempt)

    assert not done.timed_out


async def test_a_case_that_slept_until_the_time_for_all_cases_was_over_is_not_run_again() -> None:
    walls: list[float] = []

    async def sleeping(judged: Any, wall_s: float) -> Any:
        walls.append(wall_s)
        await asyncio.sleep(wall_s)
        return Ended(-9, b"", b"", True, False)

    done = await timing.Time(0.05, limit_s=1.0).give(sleeping)

    assert (done.timed_out, len(walls)) == (True, 1)


async def test_a_test_command_is_not_charged_for_unseen_cpu_time() -> None:
    time = timing.Time(1000.0, limit_s=1.0, is_charged=False)

    with pytest.raises(faults.SandboxFault):
        await time.give(attempts_of(timed_out=True, unseen_s=9.0, waited=1.0))


async def test_cases_that_other_sessions_slow_down_until_the_time_for_all_is_over_are_a_fault() -> None:
    async def until_over(attempt: Any) -> None:
        time = timing.Time(0.05, limit_s=1.0)
        while not time.is_over():
            await time.give(attempt)

    with pytest.raises(faults.SandboxFault):
        await until_over(attempts_of(timed_out=False, waited=1.0))
    await until_over(attempts_of(timed_out=False, used_s=0.9))


async def test_each_case_has_its_own_sandbox(tmp_path: Path) -> None:
    async with opened("plain", tmp_path) as world:
        await world.judge(SQUARE, "def square(n): return n * n")

        assert len(world.sandboxes.opened) == 4


def test_a_completion_follows_its_prelude_and_a_whole_function_is_separate_from_it() -> None:
    completion = judging.with_prelude("def f():\n", "    return 1")
    whole = judging.with_prelude("def f():\n", "def f(): return 1")

    assert completion == {"source": "def f():\n    return 1"}
    assert whole == {"prelude": "def f():\n", "source": "def f(): return 1"}


# Test commands

TEST = """
import unittest
from solution import add

class TestAdd(unittest.TestCase):
    def test_small(self): self.assertEqual(add(1, 2), 3)
    def test_negative(self): self.assertEqual(add(-1, 1), 0)

if __name__ == "__main__":
    unittest.main()
"""
TREE: dict[str, Any] = {
    "instruction": "Mend solution.py.",
    "config": {"files": {"solution.py": "def add(a, b):\n    return a - b\n", "lib/notes.txt": "read me\n"}},
    "evaluation": {
        "command": "python3 -P -m unittest discover -p 'hidden_*.py'",
        "files": {"hidden_test.py": TEST},
        "passed": 2,
        "time_limit_seconds": 10,
    },
}
RIGHT = "printf 'def add(a, b):\\n    return a + b\\n' > solution.py"


@pytest.mark.parametrize(
    ("steps", "worth"),
    [
        pytest.param([], 0.0, id="nothing done"),
        pytest.param([RIGHT], 1.0, id="repaired"),
        pytest.param([RIGHT, "rm -r lib"], 1.0, id="repaired, and other files removed"),
        pytest.param(["rm solution.py"], 0.0, id="the solution removed"),
        pytest.param(["printf 'import os; os._exit(0)' > solution.py"], 0.0, id="exiting with success on import"),
        pytest.param(["printf 'raise SystemExit(0)' > solution.py"], 0.0, id="SystemExit(0) on import"),
        pytest.param(["printf 'import unittest' > hidden_test.py"], 0.0, id="a hidden test written by the agent"),
        pytest.param([RIGHT, "mkdir hidden_test.py"], 1.0, id="a directory in a hidden test's place"),
        pytest.param([RIGHT, "ln -s /dev/null hidden_test.py"], 1.0, id="a link in a hidden test's place"),
        pytest.param(["printf 'import os; os._exit(0)' > sitecustomize.py"], 0.0, id="a sitecustomize"),
        pytest.param(["printf 'import os; os._exit(0)' > conftest.py"], 0.0, id="a conftest"),
        pytest.param(["printf 'print(\"OK\")' > unittest.py"], 0.0, id="a module named unittest"),
        pytest.param(["ln -s /usr/lib x; ln -s / y; ln -s ../.. z"], 0.0, id="links out of the workspace"),
        pytest.param(["printf 'while True: pass' > solution.py"], 0.0, id="an endless loop on import"),
    ],
)
async def test_a_workspace_is_judged_by_its_command(tmp_path: Path, steps: list[str], worth: float) -> None:
    task = {**TREE, "evaluation": {**TREE["evaluation"], "time_limit_seconds": 2}}

    async with opened("library", tmp_path) as world:
        verdict = await world.submit_tree(task, *steps)

    assert verdict.score == worth


def git_bundle(folder: Path) -> tuple[str, str]:
    """Make a repository with two commits; return its bundle in base64 and the first commit."""

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "init.defaultBranch=main"]
        done = subprocess.run(
            ["git", "-C", str(folder), *identity, *arguments],
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=True,
        )
        return done.stdout.strip()

    git("init", "-q")
    for text in ("a - b", "a * b"):
        (folder / "solution.py").write_text(f"def add(a, b):\n    return {text}\n")
        git("add", ".")
        git("commit", "-q", "-m", text)
    git("bundle", "create", "-q", "all.bundle", "main")
    return base64.b64encode((folder / "all.bundle").read_bytes()).decode(), git("rev-parse", "main~1")


async def test_a_workspace_starts_as_a_commit_of_a_git_bundle(tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    bundle, commit = git_bundle(tmp_path / "repository")
    task = {**TREE, "config": {"git": {"bundle": bundle, "commit": commit}}}

    async with opened("library", tmp_path) as world:
        begun = await world.submit_tree(task, "grep -q 'a - b' solution.py")
        mended = await world.submit_tree(task, RIGHT)

    assert (begun.score, mended.score) == (0.0, 1.0)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"files": {"../x": ""}}, id="a file outside"),
        pytest.param({"files": ["x"]}, id="not a mapping"),
        pytest.param({"git": {"bundle": "?", "commit": "0123456"}}, id="not base64"),
        pytest.param({"git": {"bundle": "", "commit": "--help"}}, id="a commit that is an option"),
        pytest.param({"files": {"x": "a" * 17_000_000}}, id="seventeen megabytes"),
    ],
)
def test_an_invalid_start_is_refused(config: Any) -> None:
    with pytest.raises(tasks.InvalidTask):
        workspace.read_start(config)


async def test_a_bundle_that_git_refuses_opens_no_session(tmp_path: Path) -> None:
    config = {"git": {"bundle": base64.b64encode(b"no bundle").decode(), "commit": "0123456"}}

    async with opened("library", tmp_path) as world:
        with pytest.raises(tasks.InvalidTask, match=r"config\.git cannot be cloned"):
            await world.submit_tree({**TREE, "config": config})


async def test_an_error_ends_with_the_end_of_a_long_output(tmp_path: Path) -> None:
    async with opened("plain", tmp_path) as world:
        sandbox = await world.sandboxes.open()
        with pytest.raises(tasks.InvalidTask, match=r"config\.git cannot be cloned: [\d\s]+no such commit$"):
            await workspace.checked(
                sandbox, ["sh", "-c", "seq 900 >&2; echo no such commit >&2; exit 1"], "config.git cannot be cloned"
            )
        await sandbox.close()


async def test_a_workspace_that_is_too_large_is_not_judged(tmp_path: Path) -> None:
    async with opened("library", tmp_path) as world:
        with pytest.raises(tasks.InvalidTask, match="more than"):
            await world.submit_tree(TREE, "head -c 20000000 /dev/zero > large")

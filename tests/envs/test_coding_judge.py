"""The coding environment's judge: comparing, limits, credit, faults of the machinery, and test commands."""

from __future__ import annotations

import asyncio
import base64
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.envs.coding_world import KINDS, World, comparing, faults, judging, opened, tasks, workspace
from tests.envs.plain_sandbox import PlainError, PlainSandbox, PlainSandboxes
from tests.envserver.eventually import eventually

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


@pytest.mark.parametrize(
    ("answer", "expected", "is_same"),
    [
        pytest.param(1, 1, True, id="an integer"),
        pytest.param(1.0, 1, True, id="a float of an integer's value"),
        pytest.param(True, 1, False, id="True is not 1"),
        pytest.param(1, True, False, id="1 is not True"),
        pytest.param(0, None, False, id="0 is not null"),
        pytest.param(0.1 + 0.2, 0.3, True, id="floats within the tolerance"),
        pytest.param(0.31, 0.3, False, id="floats beyond it"),
        pytest.param(10**4000, 0.5, False, id="an integer beyond any float"),
        pytest.param("a", "a", True, id="a text"),
        pytest.param(["a"], "a", False, id="a list for a text"),
        pytest.param([1, [2]], [1, [2]], True, id="nested lists"),
        pytest.param([1], [1, 2], False, id="a list too short"),
        pytest.param({"b": 1, "a": 2}, {"a": 2, "b": 1}, True, id="keys in another order"),
        pytest.param({"a": 2, "b": 1}, {"a": 2}, False, id="a key too many"),
    ],
)
def test_answers_are_compared_by_value_and_kind(answer: Any, expected: Any, is_same: bool) -> None:
    assert comparing.same(answer, expected) is is_same


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(JSON, JSON)
def test_every_value_is_itself_and_nothing_is_the_same_as_a_list_of_it(value: Any, other: Any) -> None:
    assert comparing.same(value, value)
    assert not comparing.same([value], value)
    assert not comparing.same([other, value], [value])


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "", "1 2", "[" * 100_000, "9" * 5_000, '{"a": NaN}'])
def test_a_text_that_is_no_answer_is_refused(text: str) -> None:
    with pytest.raises(comparing.NotAnAnswer):
        comparing.parse(text)


async def test_the_credit_is_the_fraction_that_was_passed_or_all_or_nothing(world: World) -> None:
    half = "def square(n): return n * n if n < 3 else 0"
    strict = {"evaluation": {**SQUARE["evaluation"], "credit": "all"}}

    fraction, all_or_nothing = await world.judge(SQUARE, half), await world.judge(strict, half)

    assert (fraction.passed, fraction.score) == (2, 0.5)
    assert (all_or_nothing.passed, all_or_nothing.score) == (2, 0.0)


async def test_public_cases_tell_what_went_wrong_and_are_not_judged(world: World) -> None:
    verdict = await world.judge(SQUARE, "def square(n):\n    return 1 // n", public=True)

    assert [outcome.kind for outcome in verdict.outcomes] == ["fault"]
    assert verdict.outcomes[0].detail.startswith("ZeroDivisionError")
    assert "line 2" in verdict.outcomes[0].detail


async def test_an_endless_solution_ends_at_its_limit_and_when_the_time_for_all_is_over_no_more_are_run(
    world: World,
) -> None:
    verdict = await world.judge(SQUARE, "def square(n):\n    while n: pass\n    return 0", total_s=0.5)

    assert verdict.outcomes[-1].kind == "not run"
    assert verdict.score == 0.0


class Failing(PlainSandboxes):
    """Sandboxes of which none runs anything: killed by a watchdog for *reason*, or for none that anybody knows."""

    def __init__(self, directory: Path, reason: str | None) -> None:
        super().__init__(directory)
        self._reason = reason

    async def open(self, layer: Path | None = None) -> PlainSandbox:
        sandbox = await super().open(layer)
        await sandbox.close()
        sandbox.killed = self._reason
        return sandbox


@pytest.mark.parametrize("reason", [None, "lost"])
async def test_a_failing_sandbox_is_an_error_and_no_reward(tmp_path: Path, reason: str | None) -> None:
    failing = World(Failing(tmp_path, reason), PlainError)

    with pytest.raises(faults.SandboxFault):
        await failing.judge(SQUARE, "def square(n): return n * n")


async def test_a_sandbox_that_was_killed_for_its_memory_is_the_solutions_doing(tmp_path: Path) -> None:
    failing = World(Failing(tmp_path, "memory"), PlainError)

    verdict = await failing.judge(SQUARE, "def square(n): return n * n")

    assert {outcome.kind for outcome in verdict.outcomes} == {"killed"}
    assert verdict.score == 0.0


async def test_a_judgement_that_is_cancelled_leaves_no_sandbox(tmp_path: Path) -> None:
    async with opened("library", tmp_path) as world:
        judging_now = asyncio.create_task(world.judge(SQUARE, "def square(n):\n    while True: pass"))

        async def is_judging() -> bool:
            return repr(world.sandboxes).startswith("<Sandboxes 1 open")

        await eventually(is_judging)
        judging_now.cancel()
        with pytest.raises(asyncio.CancelledError):
            await judging_now

        assert repr(world.sandboxes) == "<Sandboxes 0 open, 0 layers>"


async def test_each_case_has_a_sandbox_of_its_own(tmp_path: Path) -> None:
    async with opened("plain", tmp_path) as world:
        await world.judge(SQUARE, "def square(n): return n * n")

        assert len(world.sandboxes.opened) == 4


def test_a_completion_is_put_behind_its_prelude_and_a_whole_function_beside_it() -> None:
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
        pytest.param([RIGHT], 1.0, id="mended"),
        pytest.param([RIGHT, "rm -r lib"], 1.0, id="mended, and other files removed"),
        pytest.param(["rm solution.py"], 0.0, id="the solution removed"),
        pytest.param(["printf 'import os; os._exit(0)' > solution.py"], 0.0, id="leaving with success on import"),
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
    """Make a repository with two commits; its bundle in base64, and the first commit."""

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "init.defaultBranch=main"]
        done = subprocess.run(
            ["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout.strip()

    git("init", "-q")
    for text in ("a - b", "a * b"):
        (folder / "solution.py").write_text(f"def add(a, b):\n    return {text}\n")
        git("add", ".")
        git("commit", "-q", "-m", text)
    git("bundle", "create", "-q", "all.bundle", "main")
    return base64.b64encode((folder / "all.bundle").read_bytes()).decode(), git("rev-parse", "main~1")


async def test_a_workspace_begins_as_a_commit_of_a_git_bundle(tmp_path: Path) -> None:
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
        pytest.param({"files": ["x"]}, id="no mapping"),
        pytest.param({"git": {"bundle": "?", "commit": "0123456"}}, id="no base64"),
        pytest.param({"git": {"bundle": "", "commit": "--help"}}, id="a commit that is an option"),
        pytest.param({"files": {"x": "a" * 17_000_000}}, id="seventeen megabytes"),
    ],
)
def test_a_start_that_cannot_be_made_is_refused(config: Any) -> None:
    with pytest.raises(tasks.InvalidTask):
        workspace.read_start(config)


async def test_a_bundle_that_git_refuses_makes_no_session(tmp_path: Path) -> None:
    config = {"git": {"bundle": base64.b64encode(b"no bundle").decode(), "commit": "0123456"}}

    async with opened("library", tmp_path) as world:
        with pytest.raises(tasks.InvalidTask, match=r"config\.git cannot be cloned"):
            await world.submit_tree({**TREE, "config": config})


async def test_a_workspace_that_is_too_large_is_not_judged(tmp_path: Path) -> None:
    async with opened("library", tmp_path) as world:
        with pytest.raises(tasks.InvalidTask, match="more than"):
            await world.submit_tree(TREE, "head -c 20000000 /dev/zero > large")

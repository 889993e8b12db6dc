"""Judges a workspace by a test command, in a fresh fork that holds the agent's files and the hidden tests.

The agent's code and the tests meet in one process, so code that sets out to deceive its own tests can: README.md says
what is kept from it and what is not.
"""

from __future__ import annotations

import re
from typing import Any

from coding_judge import LIMITED, Kind, Outcome, Verdict, past_a_limit
from coding_sandbox import ENVIRONMENT, Completed, Sandbox, Sandboxes, Stopped, to_judge_in
from coding_tasks import Command
from coding_time import TOTAL_S, Time
from coding_workspace import WORKSPACE, checked, put
from envserver import SessionFailed
from envserver.sandbox import Judged, missing_programs

GUARDED = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
    "sitecustomize.py",
    "usercustomize.py",
)
"""Names that decide how tests are run: they stay as the task has them, and new ones are left out."""
OUTPUT_BYTES = 256 * 1024

_NAMES = [word for name in GUARDED for word in ("!", "-name", name)]
# The repository that the task began with: a test command may ask it. The agent's own never comes here.
_NAMES += ["!", "-path", f"{WORKSPACE}/.git/*"]
CLEAR = ["find", WORKSPACE, "-mindepth", "1", "(", "-type", "f", "-o", "-type", "l", ")", *_NAMES, "-delete"]
UNPACK = [
    *("tar", "-C", WORKSPACE, "-xf", "-", "--no-same-owner", "--keep-directory-symlink", "--exclude=.git"),
    # Bytecode may claim to be of any source, a hidden test's too.
    *("--exclude=__pycache__", "--exclude=*.pyc"),
    *(f"--exclude={name}" for name in GUARDED),
]

_PYTEST = re.compile(rb"\b(\d+) passed\b")
_UNITTEST = re.compile(rb"^Ran (\d+) tests? in ", re.MULTILINE)


class CommandJudge:
    """Runs test commands in sandboxes of its own; one for a worker."""

    def __init__(self, *, sandboxes: Sandboxes, error: type[Exception]) -> None:
        """*error* is what the sandboxes raise when one cannot go on."""
        self._sandboxes = sandboxes
        self._error = error

    async def judge(self, evaluation: Command, tree: bytes, *, layer: Any) -> Verdict:
        """Run the command over *tree*, a tar archive from `collect`, on top of the task's own *layer*.

        Raises:
            InvalidTask: the archive cannot be unpacked.
            SessionFailed: the command needs a program that is not in the box; there is no verdict.
            SandboxFault: a sandbox failed, or had no CPU, for a reason that is not the solution's; there is no verdict.
        """
        time = Time(TOTAL_S, limit_s=evaluation.time_limit_s, is_charged=False)

        async def attempt(judged: Judged, wall_s: float) -> Completed:
            async with to_judge_in(self._sandboxes, self._error, layer) as sandbox:
                sandbox.judged = judged
                await checked(sandbox, CLEAR, "the workspace cannot be cleared")
                await checked(sandbox, UNPACK, "the workspace cannot be unpacked", stdin=tree)
                return await _run(sandbox, evaluation, cpu_s=time.cpu_s, wall_s=wall_s)

        try:
            done = await time.give(attempt)
        except Stopped as stopped:
            outcome = Outcome("killed", str(stopped))
        else:
            await self._refuse_missing(done, evaluation, layer, cpu_s=time.cpu_s)
            outcome = past_a_limit(done, cpu_s=time.cpu_s) or counted(done, evaluation)
        return Verdict((outcome,), float(outcome.kind == "passed"))

    async def _refuse_missing(self, done: Completed, evaluation: Command, layer: Any, *, cpu_s: int) -> None:
        """Tell a program that the box does not have from a wrong solution, by running the command without a solution.

        Raises:
            SessionFailed: there is one.
        """
        if done.status == 0 or not _missing(done, evaluation):
            return
        async with to_judge_in(self._sandboxes, self._error, layer) as sandbox:
            names = _missing(await _run(sandbox, evaluation, cpu_s=cpu_s, wall_s=evaluation.time_limit_s), evaluation)
        if names:
            raise SessionFailed(f"the task cannot be judged: its command needs {', '.join(names)}, missing in the box")


async def _run(sandbox: Sandbox, evaluation: Command, *, cpu_s: int, wall_s: float) -> Completed:
    """Write the hidden files and run the command."""
    for path, text in evaluation.files.items():
        await put(sandbox, f"{WORKSPACE}/{path}", text.encode("utf-8", "replace"))
    return await sandbox.run(
        ["sh", "-c", LIMITED, str(cpu_s), "bash", "-c", evaluation.command],
        cwd=WORKSPACE,
        env=ENVIRONMENT,
        timeout_s=wall_s,
        output_bytes=OUTPUT_BYTES,
    )


def _missing(done: Completed, evaluation: Command) -> list[str]:
    """List the programs that the command or a hidden file names, and that its errors call missing."""
    script = "\n".join((evaluation.command, *evaluation.files.values()))
    return missing_programs(script, done.stderr.decode("utf-8", "replace"))


def counted(done: Completed, evaluation: Command) -> Outcome:
    """Judge a test command that has ended by its status and its number of tests."""
    tests = counted_tests(done.stdout + b"\n" + done.stderr)
    right = done.status == 0 and evaluation.passed in (None, tests)
    kind: Kind = "passed" if right else "wrong"
    return Outcome(kind, f"exit status {done.status}, {tests} tests")


def counted_tests(output: bytes) -> int | None:
    """Read the number of tests in the last summary of pytest ("5 passed") or unittest ("Ran 5 tests"); else None."""
    found = _PYTEST.findall(output) or _UNITTEST.findall(output)
    return int(found[-1][:9]) if found else None

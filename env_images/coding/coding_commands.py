"""Judges a workspace by a test command, in a fresh fork with the agent's files and the hidden tests.

The agent's code and the tests run in one process, so code can deceive its own tests. README.md describes what is
protected from such code and what is not.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

from coding_judge import LIMITED, Kind, Outcome, Verdict, past_a_limit
from coding_sandbox import ENVIRONMENT, Completed, Sandbox, Sandboxes, Stopped, to_judge_in
from coding_tasks import Command
from coding_time import TOTAL_S, Time
from coding_workspace import WORKSPACE, checked, put
from envserver import SessionFailed
from envserver.sandbox import TELLING, Judged, missing_programs

RUNNERS = ("pytest", "_pytest", "pluggy", "unittest")
"""Python's test runners. `python3 -m` and PYTHONPATH would import modules of these names from the workspace."""
GUARDED = (
    *("conftest.py", "*.toml", "*.ini", "*.cfg", ".coveragerc", "Makefile", "GNUmakefile", "*.mk"),
    *("*.pth", "*.dist-info", "*.egg-info", "*.egg-link", "sitecustomize*", "usercustomize*"),
    *(f"{name}.*" for name in RUNNERS),
    *(f"{name}/__init__.*" for name in RUNNERS),
)
"""Patterns of names that decide how tests run, in any case of letters, since Python finds metadata in any case.

The task's own files of such names stay, and the agent's are omitted. A pattern covers a folder with all that is in it.
"""
OUTPUT_BYTES = 256 * 1024
NOT_FOUND = 127
"""A shell's status for a program that it does not find; the agent's code may end with it too."""
PROVIDE = """for name; do
    case $name in /*) path=$name ;; *) path=/usr/local/bin/$name ;; esac
    mkdir -p "${path%/*}" && printf '#!/bin/sh\\n' > "$path" && chmod 755 "$path"
done"""
"""A script for `sh -c` that makes each of the arguments a program that does nothing."""

_GUARDED = [word for name in GUARDED for path in (f"*/{name}", f"*/{name}/*") for word in ("!", "-ipath", path)]
# The task's original repository, which a test command may read. The agent's repository is never copied here.
_GUARDED += ["!", "-path", f"{WORKSPACE}/.git/*"]
CLEAR = ["find", WORKSPACE, "-mindepth", "1", "(", "-type", "f", "-o", "-type", "l", ")", *_GUARDED, "-delete"]
UNPACK = [
    *("tar", "-C", WORKSPACE, "-xf", "-", "--no-same-owner", "--keep-directory-symlink", "--exclude=.git"),
    # Bytecode may claim to belong to any source, even to a hidden test.
    *("--exclude=__pycache__", "--exclude=*.pyc", "--exclude=.pytest_cache", "--ignore-case"),
    *(f"--exclude={name}" for name in GUARDED),
]
# A link of a runner's name to a folder with a package in it, which no pattern of the archive's names covers.
_RUNNERS = [word for name in RUNNERS for word in ("-o", "-iname", name)][1:]
PRUNE = ["find", WORKSPACE, "-mindepth", "1", "-type", "l", "(", *_RUNNERS, ")", "-delete"]

_REPORTS = re.compile(r"(?<![^\s;&|(/])(?:pytest|py\.test)(?![^\s;&|)])(?!.*junit)", re.DOTALL)
"""A command that must leave pytest's report, unless it names a report of its own."""
_SUITE = re.compile(rb"<testsuite\s[^>]*")
_COUNT = re.compile(rb'\b(errors|failures|skipped|tests)="(\d{1,9})"')
REPORT_BYTES = 4_096
"""The read part of a report: its totals are at its beginning."""
_PYTEST = re.compile(rb"\b(\d+) passed\b")
_UNITTEST = re.compile(rb"^Ran (\d+) tests? in ", re.MULTILINE)


class CommandJudge:
    """Runs test commands in its own sandboxes; a worker has one judge."""

    def __init__(self, *, sandboxes: Sandboxes, error: type[Exception]) -> None:
        """Create a judge; *error* is the exception of a sandbox that cannot continue."""
        self._sandboxes = sandboxes
        self._error = error

    async def judge(self, evaluation: Command, tree: bytes, *, layer: Any) -> Verdict:
        """Run the command over *tree*, a tar archive from `collect`, on top of the task's own *layer*.

        Raises:
            InvalidTask: The archive cannot be unpacked.
            SessionFailed: The command needs a program that is not in the box; there is no verdict.
            SandboxFault: A sandbox failed or had no CPU through no fault of the solution; there is no verdict.
        """
        time = Time(TOTAL_S, limit_s=evaluation.time_limit_s, is_charged=False)
        report = f"/tmp/report-{secrets.token_hex(8)}.xml"
        reported: int | None = None

        async def attempt(judged: Judged, wall_s: float) -> Completed:
            nonlocal reported
            async with to_judge_in(self._sandboxes, self._error, layer) as sandbox:
                sandbox.judged = judged
                await checked(sandbox, CLEAR, "the workspace cannot be cleared")
                await checked(sandbox, UNPACK, "the workspace cannot be unpacked", stdin=tree)
                await checked(sandbox, PRUNE, "the workspace cannot be cleared")
                done = await _run(sandbox, evaluation, cpu_s=time.cpu_s, wall_s=wall_s, report=report)
                reported = await self._reported(sandbox, report) if done.status == 0 else None
                return done

        try:
            done = await time.give(attempt)
        except Stopped as stopped:
            outcome = Outcome("killed", str(stopped))
        else:
            outcome = past_a_limit(done, cpu_s=time.cpu_s) or counted(done, evaluation, reported=reported)
            if outcome.kind != "passed" and (done.status == NOT_FOUND or _missing(done, evaluation)):
                await self._refuse_missing(evaluation, layer, cpu_s=time.cpu_s)
        return Verdict((outcome,), float(outcome.kind == "passed"))

    async def _reported(self, sandbox: Sandbox, report: str) -> int | None:
        """Return the number of passed tests in pytest's report, or None if there is no report."""
        try:
            found = _SUITE.search(await sandbox.read_file(report, max_bytes=REPORT_BYTES))
        except self._error:
            if sandbox.killed is not None:
                raise
            return None
        totals = {name: int(number) for name, number in _COUNT.findall(found[0])} if found else {}
        return totals.pop(b"tests") - sum(totals.values()) if b"tests" in totals else None

    async def _refuse_missing(self, evaluation: Command, layer: Any, *, cpu_s: int) -> None:
        """Distinguish a program missing in the box from a wrong solution, by a run of the command without a solution.

        Raises:
            SessionFailed: The box lacks a program.
        """

        async def missing(provided: list[str]) -> list[str]:
            async with to_judge_in(self._sandboxes, self._error, layer) as sandbox:
                if provided:
                    await sandbox.run(["sh", "-c", PROVIDE, "sh", *provided])
                done = await _run(sandbox, evaluation, cpu_s=cpu_s, wall_s=evaluation.time_limit_s)
                return _missing(done, evaluation)

        try:
            if not (names := await missing([])):
                return
            # A name that is still missing is not a program: it is a folder that the agent must make, or a text that a
            # test expects. pytest may be required as a module, which no program provides.
            remaining = await missing(names)
        except Stopped:
            return  # the command without a solution exceeded a limit, which proves nothing
        if names := [name for name in names if name == "pytest" or name not in remaining]:
            raise SessionFailed(f"the task cannot be judged: its command needs {', '.join(names)}, missing in the box")


async def _run(
    sandbox: Sandbox, evaluation: Command, *, cpu_s: int, wall_s: float, report: str = "/tmp/report.xml"
) -> Completed:
    """Write the hidden files and run the command; pytest writes its report to *report*, outside the agent's tree."""
    for path, text in evaluation.files.items():
        await put(sandbox, f"{WORKSPACE}/{path}", text.encode("utf-8", "replace"))
    return await sandbox.run(
        ["sh", "-c", LIMITED, str(cpu_s), "bash", "-c", TELLING + evaluation.command],
        cwd=WORKSPACE,
        env={**ENVIRONMENT, "PYTEST_ADDOPTS": f"--junitxml={report}"},
        timeout_s=wall_s,
        output_bytes=OUTPUT_BYTES,
    )


def _missing(done: Completed, evaluation: Command) -> list[str]:
    """Return the programs that the command or a hidden file names and the output calls missing."""
    script = "\n".join((evaluation.command, *evaluation.files.values()))
    return missing_programs(script, (done.stderr + b"\n" + done.stdout).decode("utf-8", "replace"))


def counted(done: Completed, evaluation: Command, *, reported: int | None) -> Outcome:
    """Judge an ended test command by its status, its number of tests, and the passed tests that pytest *reported*."""
    tests = counted_tests(done.stdout + b"\n" + done.stderr)
    if reported is None:
        is_reported = _REPORTS.search(evaluation.command) is None
    else:
        is_reported = evaluation.passed is None or reported >= evaluation.passed
    right = done.status == 0 and evaluation.passed in (None, tests) and is_reported
    kind: Kind = "passed" if right else "wrong"
    return Outcome(kind, f"exit status {done.status}, {tests} tests")


def counted_tests(output: bytes) -> int | None:
    """Return the number of tests in the last summary of pytest ("5 passed") or unittest ("Ran 5 tests"), or None."""
    found = _PYTEST.findall(output) or _UNITTEST.findall(output)
    return int(found[-1][:9]) if found else None

"""Judges solutions: each case runs in a fresh process of a fresh sandbox, and the server compares the answers.

No expected output ever enters a sandbox. A solution that takes over its whole sandbox gains nothing, because it still
needs the answer. A case sees no trace of another case: no file, no process and no clock.

Other sessions share the worker's CPUs and must not influence a solution's score: see `coding_time`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from coding_compare import NotAnAnswer, parse, same, same_text
from coding_sandbox import ENVIRONMENT, Completed, Sandboxes, Stopped, to_judge_in
from coding_tasks import Call, Case, Test, Tests
from coding_time import TOTAL_S, Time
from envserver.sandbox import Judged

DRIVER = Path(__file__).with_name("coding_driver.py").read_text("utf-8")
PROGRAM = "/tmp/solution.py"
OUTPUT_BYTES = 1024 * 1024
"""The maximum output of a case; the longest expected output of the project's own tasks has 4 KiB."""
MAX_SOURCE_BYTES = 256 * 1024
LIMITED = 'ulimit -t "$0"; exec "$@"'
"""A script for `sh -c`: the first argument is the CPU time in whole seconds, the others are the command."""

Kind: TypeAlias = Literal["passed", "wrong", "fault", "time", "killed", "output", "not run"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one case."""

    kind: Kind
    detail: str = ""
    """The solution's answer or its fault; for public cases only, and bounded by `shown`."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The score of a solution."""

    outcomes: tuple[Outcome, ...]
    score: float
    """The score in [0, 1]."""

    @property
    def passed(self) -> int:
        """The number of passed cases."""
        return sum(outcome.kind == "passed" for outcome in self.outcomes)


class Judge:
    """Runs solutions in its own sandboxes. A worker has one judge, which many sessions on one loop may use."""

    def __init__(self, *, sandboxes: Sandboxes, error: type[Exception], total_s: float = TOTAL_S) -> None:
        """Create a judge; *error* is the exception of a sandbox that cannot continue."""
        self._sandboxes = sandboxes
        self._error = error
        self._total_s = total_s

    async def judge(self, evaluation: Tests, source: str, *, public: bool = False) -> Verdict:
        """Run *source* on the hidden or the public tests.

        Raises:
            SandboxFault: A sandbox failed or had no CPU through no fault of the solution; there is no verdict.
        """
        source = source.removeprefix("\ufeff")  # Python reads a file that begins with a byte order mark
        tests: Sequence[Test] = evaluation.public if public else evaluation.hidden
        if not source.strip():  # an empty program prints nothing, which is the expected output of some cases
            return Verdict((Outcome("fault", "the solution is empty"),) * len(tests), 0.0)
        time = Time(self._total_s, limit_s=evaluation.time_limit_s)
        outcomes = [await self._one(time, evaluation, source, test) for test in tests]
        return Verdict(tuple(outcomes), score(outcomes, credit=evaluation.credit))

    async def _one(self, time: Time, evaluation: Tests, source: str, test: Test) -> Outcome:
        if time.is_over():
            return Outcome("not run", "the time for all tests was over")
        if isinstance(test, str):
            request: dict[str, object] = {"script": test}
            is_right: Callable[[object], bool] = _is_right
        elif isinstance(test, Call):
            request = {"call": test.call, "setup": evaluation.setup, "is_truth": test.check.is_truth}
            is_right = test.check.holds
        elif evaluation.function is not None:
            request = {"function": evaluation.function, "arguments": test.arguments}
            is_right = partial(same, expected=test.output)
        else:
            return await self._program(source, test, time, exact=evaluation.exact)
        return await self._driven({**request, **with_prelude(evaluation.prelude, source)}, is_right, time)

    async def _driven(self, request: dict[str, object], is_right: Callable[[object], bool], time: Time) -> Outcome:
        """Run the driver with *request*."""
        nonce = secrets.token_hex(16)
        stdin = json.dumps({"nonce": nonce, **request}).encode()
        ended = await self._run(["python3", "-I", "-c", DRIVER], stdin, None, time)
        return ended if isinstance(ended, Outcome) else framed(ended, nonce=nonce, is_right=is_right)

    async def _program(self, source: str, case: Case, time: Time, *, exact: bool) -> Outcome:
        """Run *source* as a program on the case's input."""
        stdin = (case.stdin or "").encode()
        ended = await self._run(["python3", "-I", PROGRAM], stdin, source.encode("utf-8", "replace"), time)
        if isinstance(ended, Outcome):
            return ended
        if ended.status != 0:
            return Outcome("fault", shown(_last_line(ended.stderr) or f"exit status {ended.status}"))
        kind: Kind = "passed" if same_text(ended.stdout, case.output, exact=exact) else "wrong"
        return Outcome(kind, shown(ended.stdout.decode("utf-8", "replace")))

    async def _run(self, argv: Sequence[str], stdin: bytes, program: bytes | None, time: Time) -> Completed | Outcome:
        """Run *argv* in its own sandbox; return an outcome if it exceeded a limit."""

        async def attempt(judged: Judged, wall_s: float) -> Completed:
            async with to_judge_in(self._sandboxes, self._error) as sandbox:
                sandbox.judged = judged
                if program is not None:
                    await sandbox.write_file(PROGRAM, program)
                return await sandbox.run(
                    ["sh", "-c", LIMITED, str(time.cpu_s), *argv],
                    stdin=stdin,
                    cwd="/tmp",
                    env=ENVIRONMENT,
                    timeout_s=wall_s,
                    output_bytes=OUTPUT_BYTES,
                )

        try:
            done = await time.give(attempt)
        except Stopped as stopped:
            return Outcome("killed", str(stopped))
        return past_a_limit(done, cpu_s=time.cpu_s) or done


def with_prelude(prelude: str, source: str) -> dict[str, str]:
    """Put *prelude* before *source*; a source that starts with a blank completes the prelude's last function."""
    first = next((line for line in source.splitlines() if line.strip()), "")
    if prelude and first[:1] in (" ", "\t"):
        return {"source": f"{prelude.rstrip()}\n{source}"}
    return {"prelude": prelude, "source": source}


def past_a_limit(done: Completed, *, cpu_s: int) -> Outcome | None:
    """Return the outcome of a process that exceeded a limit, or None."""
    if done.timed_out:
        return Outcome("time", "stopped: it took too long")
    if done.truncated:
        return Outcome("output", f"it printed more than {OUTPUT_BYTES} bytes")
    if done.status in (-9, 137, -24, 152):  # SIGKILL and SIGXCPU, as either kind of status
        return Outcome("killed", f"stopped: more than {cpu_s} s of CPU time, or too much memory")
    return None


def framed(done: Completed, *, nonce: str, is_right: Callable[[object], bool]) -> Outcome:
    """Read the driver's one line; with any other output before or after it, there is no answer."""
    text = done.stdout.decode("utf-8", "replace")
    if not (text.startswith(nonce) and text.endswith("\n")) or "\n" in text[:-1]:
        return Outcome("fault", f"no answer: the process ended with status {done.status}")
    try:
        match parse(text[len(nonce) :]):
            case {"answer": answer, **rest} if not rest:
                kind: Kind = "passed" if is_right(answer) else "wrong"
                # The original text: writing the value again could fail for a deeply nested value.
                return Outcome(kind, shown(text[len(nonce) + len('{"answer":') : -2]))
            case {"answer": answer, "shown": str(said), **rest} if not rest:
                return Outcome("passed" if is_right(answer) else "wrong", shown(said))
            case {"fault": str(fault), **rest} if not rest:
                return Outcome("fault", shown(fault))
    except NotAnAnswer as error:
        return Outcome("fault", f"the answer cannot be read: {error}")
    return Outcome("fault", "the answer cannot be read")


def _is_right(answer: object) -> bool:
    """Accept any answer of a script, which raises unless the solution is right."""
    return True


def score(outcomes: Sequence[Outcome], *, credit: Literal["fraction", "all"]) -> float:
    """Return the fraction of passed cases; with *credit* "all", return 1 or 0."""
    if not outcomes:
        return 0.0
    fraction = sum(outcome.kind == "passed" for outcome in outcomes) / len(outcomes)
    return fraction if credit == "fraction" else float(fraction == 1.0)


def shown(text: str, *, most: int = 1_000) -> str:
    """Cut *text* for display."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def _last_line(output: bytes) -> str:
    lines = output.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""

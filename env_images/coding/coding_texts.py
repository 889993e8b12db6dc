"""Texts for the agent: the opening, a command's output, and the results of the public tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from coding_judge import Outcome, Verdict, shown
from coding_sandbox import Completed
from coding_tasks import Call, Case, Command, Evaluation, Test, Tests
from coding_workspace import SOLUTION, WORKSPACE


def opening(text: str, evaluation: Evaluation, *, files: Sequence[str]) -> str:
    """Return the problem, the available files and the way to answer; only public tests are shown."""
    parts = [text]
    if not isinstance(evaluation, Command):
        if evaluation.public:
            parts.append("Examples:\n" + "\n".join(examples(evaluation)))
        limit = f"{evaluation.time_limit_s:g} s of CPU time for each test"
        parts.append(
            f"Write your solution to {SOLUTION} (Python 3, the standard library; {limit}), try it with `run_tests`, "
            "and hand it in with `submit`; or give `submit` the code itself. Hidden tests judge it. If you cannot call "
            "tools, answer with the code in one fenced block."
        )
    else:
        parts.append(f"Work in {WORKSPACE} and call `submit` when you are done: hidden tests are run on your files.")
    if files:
        parts.append("Files: " + ", ".join(files[:50]) + (" …" if len(files) > 50 else ""))
    parts.append("`execute` runs commands in a sandbox without a network. You can submit once.")
    return "\n\n".join(parts)


def examples(evaluation: Tests) -> Iterable[str]:
    """Yield the public tests as texts."""
    for test in evaluation.public:
        if isinstance(test, str):
            yield test.strip()
        elif isinstance(test, Call):
            yield f"{evaluation.setup}\nassert {test.check.shown}".strip()
        else:
            yield example(evaluation, test)


def example(evaluation: Tests, case: Case) -> str:
    """Return one public case as text: a call and its result, or an input and its output."""
    if evaluation.function is None:
        return f"input:\n{case.stdin}\noutput:\n{case.output}"
    arguments = ", ".join(map(repr, case.arguments or []))
    return f"{evaluation.function}({arguments}) == {case.output!r}"


def completed_text(done: Completed, *, timeout_s: float) -> str:
    """Return a command's output and its end as text."""
    parts = [stream.decode("utf-8", "replace").rstrip("\n") for stream in (done.stdout, done.stderr)]
    lines = [part for part in parts if part]
    if done.truncated:
        lines.append("[the output was cut]")
    if done.timed_out:
        lines.append(f"[stopped after {timeout_s:.3g} s]")
    elif done.status != 0:
        lines.append(f"[exit status {done.status}]")
    return "\n".join(lines) or "[no output]"


def public_report(evaluation: Tests, verdict: Verdict) -> str:
    """Return the result of each public test as text."""
    lines = [f"Passed {verdict.passed} of {len(verdict.outcomes)} public tests."]
    tests: Sequence[Test] = evaluation.public
    for text, test, outcome in zip(examples(evaluation), tests, verdict.outcomes, strict=True):
        lines.append(f"{'passed' if outcome.kind == 'passed' else 'FAILED'}: {shown(text)}")
        if outcome.kind != "passed":
            lines.append(f"  {reason(test, outcome)}")
    return "\n".join(lines)


def reason(test: Test, outcome: Outcome) -> str:
    """Return the reason why a public test was not passed."""
    if outcome.kind == "wrong" and isinstance(test, Case):
        return f"your answer: {outcome.detail}" + (
            "" if test.stdin is not None else f"\n  expected: {shown(json.dumps(test.output))}"
        )
    if outcome.kind == "wrong" and isinstance(test, Call):
        return f"your answer: {outcome.detail}"
    return outcome.detail

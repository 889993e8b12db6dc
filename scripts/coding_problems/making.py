"""Turns problems into tasks. The reference computes the hidden outputs, and must give the examples' outputs first."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .problem import Problem

TIME_LIMIT_S = 4
"""CPU time of a case in seconds; the slowest reference takes a tenth of it."""
RUN_S = 30.0


class UnsoundProblem(Exception):
    """The reference does not give an example's output, or an input occurs twice."""


def task_of(problem: Problem, *, split: str) -> dict[str, Any]:
    """Return the task of *problem*; tasks/coding/README.md describes the fields.

    Raises:
        UnsoundProblem: The reference does not give an example's output, or an input occurs twice.
    """
    answer = answers(problem, problem.reference)
    cases = [case_of(problem, given, output, public=True) for given, output in problem.examples]
    for given, output in problem.examples:
        if answer(given) != plain(output):
            raise UnsoundProblem(f"{problem.slug}: for {given!r} the reference gives {answer(given)!r}, not {output!r}")
    cases += [case_of(problem, given, answer(given), public=False) for given in problem.hidden]
    inputs = [json.dumps(case.get("arguments", case.get("input"))) for case in cases]
    if len(set(inputs)) < len(inputs):
        raise UnsoundProblem(f"{problem.slug}: an input is there twice")
    form = {"function": problem.slug} if problem.signature else {}
    return {
        "id": problem.task_id(split),
        "tags": [problem.topic, "function" if problem.signature else "program"],
        "difficulty": problem.level,
        "instruction": problem.statement,
        "config": {},
        "evaluation": {
            "reward_function": "test_cases",
            **form,
            "time_limit_seconds": TIME_LIMIT_S,
            # A function that always says yes would earn its share of the cases.
            **({"credit": "all"} if problem.is_yes_or_no else {}),
            "test_cases": cases,
        },
    }


def case_of(problem: Problem, given: Any, output: Any, *, public: bool) -> dict[str, Any]:
    """Return one test case."""
    shown = {"public": True} if public else {}
    if problem.signature:
        return {**shown, "arguments": plain(list(given)), "output": plain(output)}
    return {**shown, "input": given, "output": output}


def answers(problem: Problem, source: str) -> Callable[[Any], Any]:
    """Return a function that computes the output for an example's or hidden input, with *source* as the solution."""
    if problem.signature is None:
        return lambda given: run_program(source, given)
    namespace: dict[str, Any] = {"__name__": "solution"}
    exec(compile(source, problem.slug, "exec"), namespace)
    function = namespace[problem.slug]
    # The arguments as in the task file: new lists in each call, because a solution may change them.
    return lambda given: plain(function(*plain(list(given))))


def run_program(source: str, given: str) -> str:
    """Run one of the project's own programs in a separate process."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", source], input=given, capture_output=True, text=True, timeout=RUN_S, check=True
    )
    return done.stdout


def plain(value: Any) -> Any:
    """Return *value* as JSON keeps it: tuples become lists."""
    return json.loads(json.dumps(value, allow_nan=False))


def lines(problems: list[Problem], *, split: str) -> Iterator[str]:
    """Yield one compact task per line."""
    for problem in problems:
        yield json.dumps(task_of(problem, split=split), ensure_ascii=False, separators=(",", ":")) + "\n"

"""Imports HumanEval and MBPP as tasks of the coding environment.

Assertions about one call become cases, which the environment judges outside the solution's process. The others stay
Python code that runs in it, and the task gets the tag ``in-process``.

HumanEval's file is ``HumanEval.jsonl.gz``, compressed or not. MBPP's files are ``mbpp.jsonl`` and
``sanitized-mbpp.json``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gateway.core.environment import SplitType
from gateway.tasks.importing.assertions import BUILTINS, Case, Names, Renamed, bound_names, cases_of, parsed
from gateway.tasks.importing.rows import Entry, InvalidEntry, convert, read_rows, text_of, texts_of

IN_PROCESS = "in-process"
"""Tag of a task with a test that runs in the solution's own process, which code written for it can deceive."""
TIME_LIMIT_S = 10
"""Seconds of CPU time for one test. HumanEval's own runner allows 3 s of wall time, perhaps on a faster machine."""
MOST_TESTS = 200
"""Maximum number of tests of one task, which is the environment's limit."""
PARTS: Mapping[SplitType, range] = {
    SplitType.TEST: range(11, 511),
    SplitType.VALIDATION: range(511, 601),
    SplitType.TRAIN: range(601, 975),
}
"""Numbers of MBPP's tasks in each part, from its README. Tasks 1 to 10 are examples for prompts, in no part."""


def read_humaneval(path: Path) -> Iterator[Entry]:
    """Read HumanEval's rows: ``task_id``, ``prompt``, ``entry_point`` and ``test``, without ``canonical_solution``.

    A row's test defines ``check(candidate)`` with all assertions. A solution passes all of them, or fails.

    Raises:
        ConfigError: The file cannot be read, or is not JSON.
    """
    return convert(read_rows(path), humaneval_task)


def read_mbpp(path: Path, *, part: SplitType | None = None) -> Iterator[Entry]:
    """Read MBPP's rows: ``task_id``, ``text`` or ``prompt``, ``test_list``, and optionally ``test_setup_code``,
    ``test_imports`` and ``challenge_test_list``. Tasks do not contain ``code``, the solution.

    The first assertion is public, because only it shows the function's name and arguments. Each other assertion is a
    hidden test. A single assertion of a row is both public and hidden.

    Args:
        path: The file of rows.
        part: The part to select. None: all tasks.

    Raises:
        ConfigError: The file cannot be read, or is not JSON.
    """
    return convert(read_rows(path), partial(mbpp_task, part=part))


def humaneval_task(row: Mapping[str, Any]) -> dict[str, Any]:
    """Turn one row into a task line. Raises ``InvalidEntry`` if a field is missing or malformed."""
    number = _number_of(row)
    prompt, entry, test = text_of(row, "prompt"), text_of(row, "entry_point"), text_of(row, "test")
    if not entry.isidentifier():
        raise InvalidEntry(f"entry_point: {entry!r} is not a name of a function")
    cases, is_complete = humaneval_cases(test, entry)
    scripts = [] if is_complete and cases else [{"code": f"{test}\n\ncheck({entry})\n"}]
    if len(cases) + len(scripts) > MOST_TESTS:
        cases, scripts = [], [{"code": f"{test}\n\ncheck({entry})\n"}]
    return task_line(
        f"humaneval-{number}",
        tag="humaneval",
        instruction="Complete this function; give the whole of it, with its imports.\n\n"
        f"```python\n{prompt.rstrip()}\n```",
        cases=cases,
        scripts=scripts,
        prelude=prompt,
        credit="all",
    )


def humaneval_cases(test: str, entry: str) -> tuple[list[Case], bool]:
    """Return the cases that a row's ``check`` contains, and True if these are all that it checks."""
    tree = parsed(test)
    match [one for one in tree.body if isinstance(one, ast.FunctionDef)] if tree is not None else []:
        case [ast.FunctionDef("check", ast.arguments(args=[ast.arg(candidate)]), decorator_list=[]) as check] if tree:
            bound = bound_names(tree) - {candidate}
            rebound = frozenset[str]().union(*map(bound_names, check.body))
            if entry in bound | BUILTINS or candidate in rebound or any(map(_is_scope, ast.walk(tree))):
                return [], False
            names = Names(bound, lambda name: name == entry, lambda name: name not in bound)
            renamed = Renamed({candidate: ast.Name(entry, ast.Load())})
            cases, is_complete = cases_of([renamed.visit(statement) for statement in check.body], names)
            return cases, is_complete and all(statement is check or _is_quiet(statement) for statement in tree.body)
    return [], False


def _is_scope(node: ast.AST) -> bool:
    return isinstance(node, ast.Global | ast.Nonlocal)


def _is_quiet(statement: ast.stmt) -> bool:
    """Return True for an import, or a constant such as the benchmark's METADATA, which check nothing."""
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Expr(ast.Constant()):
            return True
        case ast.Assign(_, ast.Dict(keys, values)):
            return all(isinstance(value, ast.Constant) for value in (*keys, *values))
    return False


def mbpp_task(row: Mapping[str, Any], *, part: SplitType | None = None) -> dict[str, Any] | None:
    """Turn one row into a task line. Return None if the row is not in *part*.

    Raises:
        InvalidEntry: A field is missing or malformed, or there are too many tests.
    """
    number = _number_of(row)
    if part is not None and not (number.isdecimal() and len(number) < 10 and int(number) in PARTS[part]):
        return None
    text = text_of(row, "text" if "text" in row else "prompt")
    tests = [*texts_of(row, "test_list"), *texts_of(row, "challenge_test_list")]
    if not tests:
        raise InvalidEntry("test_list is empty" if "test_list" in row else "test_list is missing")
    code = row.get("test_setup_code") or ""
    if not isinstance(code, str):
        raise InvalidEntry("test_setup_code: must be a text")
    setup = "\n".join([*texts_of(row, "test_imports"), code]).strip()
    cases: list[dict[str, Any]] = []
    scripts: list[dict[str, Any]] = []
    for place, test in enumerate(tests * 2 if len(tests) == 1 else tests):
        public = {"public": True} if place == 0 else {}
        if (case := mbpp_case(test, setup)) is not None:
            cases.append({**public, **case})
        else:
            scripts.append({**public, "code": f"{setup}\n{test}" if setup else test})
    return task_line(f"mbpp-{number}", tag="mbpp", instruction=text.strip(), cases=cases, scripts=scripts, setup=setup)


def mbpp_case(test: str, setup: str) -> Case | None:
    """Return the case that a row's assertion is, or None if there is none. The row's *setup* runs before it."""
    before, tree = parsed(setup), parsed(test)
    if before is None or tree is None:
        return None
    bound = bound_names(before) | bound_names(tree)
    names = Names(bound, lambda name: name not in bound | BUILTINS, lambda name: True)
    cases, is_complete = cases_of(tree.body, names)
    return cases[0] if is_complete and len(cases) == 1 else None


def task_line(
    name: str,
    *,
    tag: str,
    instruction: str,
    cases: Sequence[Mapping[str, Any]],
    scripts: Sequence[Mapping[str, Any]],
    **further: str,
) -> dict[str, Any]:
    """Create a task line with further keys of its evaluation. The agent sees public tests.

    Args:
        cases: Tests whose outcome the environment judges outside the solution's process.
        scripts: Tests that run in it.

    Raises:
        InvalidEntry: There are more tests than the environment allows.
    """
    if len(cases) + len(scripts) > MOST_TESTS:
        raise InvalidEntry(f"{len(cases) + len(scripts)} tests; the maximum is {MOST_TESTS}")
    evaluation: dict[str, Any] = {
        "reward_function": "test_cases" if cases else "test_scripts",
        "time_limit_seconds": TIME_LIMIT_S,
    }
    evaluation |= {key: list(rows) for key, rows in (("test_cases", cases), ("test_scripts", scripts)) if rows}
    evaluation |= {key: value for key, value in further.items() if value}
    tags = [tag, IN_PROCESS] if scripts else [tag]
    return {"id": name, "tags": tags, "instruction": instruction, "config": {}, "evaluation": evaluation}


def _number_of(row: Mapping[str, Any]) -> str:
    """Return the last part of ``task_id``, ``12`` for ``HumanEval/12``. Raises ``InvalidEntry`` if it is missing."""
    given = row.get("task_id")
    if not isinstance(given, str | int) or isinstance(given, bool):
        raise InvalidEntry("task_id: must be a text or a number" if "task_id" in row else "task_id is missing")
    number = str(given).rpartition("/")[2].strip()
    if not number:
        raise InvalidEntry("task_id: must have a text after the slash" if given else "task_id is empty")
    return number

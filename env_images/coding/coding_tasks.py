"""A task's evaluation, read and checked: tests (cases and scripts), or a test command.

README.md describes the fields of a task. A task may have `test_cases` itself and omit `evaluation`, the form in which
the Open Reward Standard shows a coding task.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Literal, TypeAlias

from coding_checks import Check, InvalidCheck, read_check

MOST_CASES = 200
MOST_TIME_LIMIT_S = 60.0
DEFAULT_TIME_LIMIT_S = 5.0
MAX_INPUT_BYTES = 4 * 1024 * 1024
"""The maximum bytes of one case's input, as JSON."""
MAX_TREE_BYTES = 16 * 1024 * 1024
"""The maximum bytes of a task's files together, and of a judged workspace."""

Credit: TypeAlias = Literal["fraction", "all"]

_TEST = re.compile(r"test_.*\.py|.*_test\.py")
"""The names of the files that pytest collects.

Before a script judges, the task's files with such names are restored, and so are the files that the script names. The
agent may read them, and its changes to them have no effect on the judgement.
"""


class InvalidTask(ValueError):
    """The task cannot be asked or judged; no session starts."""


@dataclass(frozen=True, slots=True)
class Case:
    """One call of a function or one run of a program."""

    arguments: list[Any] | None
    """The arguments of a function, or None."""
    stdin: str | None
    """The input of a program, or None."""
    output: Any
    """The expected result: a JSON value from a function, a text from a program."""


@dataclass(frozen=True, slots=True)
class Call:
    """An expression that calls the solution, and a statement about its value."""

    call: str
    """The expression, such as `evens((1, 2, 3))`. It is evaluated in the sandbox, after `Tests.setup`."""
    check: Check
    """The statement, which no sandbox holds."""


Test: TypeAlias = Case | Call | str
"""One test. A text is Python code that raises unless the solution is right, in the solution's own process."""


@dataclass(frozen=True, slots=True)
class Tests:
    """An evaluation by cases, whose answers the server compares, and by scripts."""

    function: str | None
    """The function's name, or None for a program from standard input to standard output."""
    public: tuple[Test, ...]
    hidden: tuple[Test, ...]
    prelude: str
    """Code in front of every solution: a prompt's imports and definitions."""
    setup: str
    """Code between the solution and a `Call`: a test's imports and definitions."""
    time_limit_s: float
    """CPU time of one test in seconds."""
    credit: Credit
    exact: bool = False
    """Whether floats that a program prints must have the same digits."""


@dataclass(frozen=True, slots=True)
class Command:
    """An evaluation by the exit status of a command over the agent's files and hidden files."""

    command: str
    files: Mapping[str, str]
    """Texts by path within the workspace; they overwrite the agent's files."""
    passed: int | None
    """If given, the number of tests that the command's summary (pytest's or unittest's) must show."""
    time_limit_s: float


Evaluation: TypeAlias = Tests | Command


def read_evaluation(task: Mapping[str, Any]) -> Evaluation:
    """Read and check a task's evaluation.

    Raises:
        InvalidTask: The shape is wrong, a bound is exceeded, or it has no hidden test.
    """
    data = task.get("evaluation", task)
    if not isinstance(data, Mapping):
        raise InvalidTask("evaluation must be an object")
    if "script" in data:
        return _script(data, task.get("config"))
    if "test_cases" in data or "test_scripts" in data:
        return _tests(data)
    if "command" in data:
        return _command(data)
    raise InvalidTask("evaluation must have test_cases, test_scripts, command or script")


def instruction(task: Mapping[str, Any]) -> str:
    """Return the problem's statement.

    Raises:
        InvalidTask: The task has no statement.
    """
    for key in ("instruction", "description", "prompt"):
        if isinstance(text := task.get(key), str) and text.strip():
            return text.strip()
    raise InvalidTask("the task has no instruction")


def read_files(data: object, *, name: str) -> dict[str, str]:
    """Read and check a file tree: relative paths, without '..', to texts; *name* is for the error.

    Raises:
        InvalidTask: The value is something else, or larger than `MAX_TREE_BYTES`.
    """
    if not isinstance(data, Mapping):
        raise InvalidTask(f"{name} must map relative paths without '..' to texts")
    for path, text in data.items():
        if not (isinstance(path, str) and isinstance(text, str) and _is_inner(path)):
            raise InvalidTask(f"{name} must map relative paths without '..' to texts: not so {path!r:.200}")
    if sum(len(path) + len(text.encode("utf-8", "replace")) for path, text in data.items()) > MAX_TREE_BYTES:
        raise InvalidTask(f"{name} must have at most {MAX_TREE_BYTES} bytes")
    return dict(data)


def _tests(data: Mapping[str, Any]) -> Tests:
    function = data.get("function")
    if function is not None and not (isinstance(function, str) and function.isidentifier()):
        raise InvalidTask("function must be a name")
    prelude, setup = data.get("prelude", ""), data.get("setup", "")
    if not isinstance(prelude, str) or not isinstance(setup, str):
        raise InvalidTask("prelude and setup must be texts")
    cases = _rows(data.get("test_cases", []), name="test_cases")
    scripts = _rows(data.get("test_scripts", []), name="test_scripts")
    if len(cases) + len(scripts) > MOST_CASES:
        raise InvalidTask(f"test_cases and test_scripts must have at most {MOST_CASES} objects together")
    read: list[tuple[Test, bool]] = [
        *((_case(row, is_function=function is not None), row.get("public") is True) for row in cases),
        *((_code(row), row.get("public") is True) for row in scripts),
    ]
    public, hidden = (tuple(test for test, is_public in read if is_public is wanted) for wanted in (True, False))
    if not hidden:
        raise InvalidTask("at least one test must be hidden: without `public`")
    if not isinstance(exact := data.get("exact", False), bool):
        raise InvalidTask(f"exact must be true or false, not {exact!r:.60}")
    return Tests(function, public, hidden, prelude, setup, _time_limit_s(data), _credit(data), exact)


def _case(row: Mapping[str, Any], *, is_function: bool) -> Case | Call:
    if "call" in row:
        return _call(row)
    if "output" not in row or ("arguments" in row) == ("input" in row):
        raise InvalidTask("a test case must have output, and either arguments or input")
    try:
        large = len(json.dumps(row, allow_nan=False)) > MAX_INPUT_BYTES
    except ValueError:
        raise InvalidTask("a test case must not hold NaN or an infinity") from None
    if large:
        raise InvalidTask(f"a test case must have at most {MAX_INPUT_BYTES} bytes")
    if is_function:
        arguments = row.get("arguments", [row.get("input")])
        if not isinstance(arguments, list):
            raise InvalidTask("arguments must be a list")
        return Case(arguments, None, row["output"])
    if not isinstance(row.get("input"), str) or not isinstance(row["output"], str):
        raise InvalidTask("without a function, a test case's input and output must be texts")
    return Case(None, row["input"], row["output"])


def _call(row: Mapping[str, Any]) -> Call:
    try:
        return Call(row["call"], read_check(row.get("test"), call=row["call"]))
    except InvalidCheck as error:
        raise InvalidTask(str(error)) from None


def _code(row: Mapping[str, Any]) -> str:
    if not isinstance(code := row.get("code"), str):
        raise InvalidTask("a test script must have code")
    return code


def _script(data: Mapping[str, Any], config: object) -> Command:
    """Read the generic form: a script whose exit status decides, with its tests among the task's own files."""
    if "command" in data:
        raise InvalidTask("evaluation must have command or script, not both")
    command = _command({**data, "command": data["script"]}, name="script")
    files = read_files(config.get("files", {}) if isinstance(config, Mapping) else {}, name="config.files")
    words = set(re.split(r"[^\w./-]+", command.command))
    tests = {
        path: text
        for path, text in files.items()
        if str(PurePosixPath(path)) in {str(PurePosixPath(word)) for word in words if word}
        or _TEST.fullmatch(PurePosixPath(path).name)
    }
    return replace(command, files={**tests, **command.files})


def _command(data: Mapping[str, Any], *, name: str = "command") -> Command:
    command, passed = data["command"], data.get("passed")
    if not isinstance(command, str) or not command.strip():
        raise InvalidTask(f"evaluation.{name} must be a text")
    if passed is not None and (not isinstance(passed, int) or isinstance(passed, bool) or passed < 1):
        raise InvalidTask("passed must be a positive integer")
    files = read_files(data.get("files", {}), name="evaluation.files")
    return Command(command, files, passed, _time_limit_s(data))


def _rows(data: object, *, name: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(data, list) or len(data) > MOST_CASES or not all(isinstance(row, Mapping) for row in data):
        raise InvalidTask(f"{name} must be a list of at most {MOST_CASES} objects")
    return data


def _time_limit_s(data: Mapping[str, Any]) -> float:
    given = data.get("time_limit_seconds", DEFAULT_TIME_LIMIT_S)
    if not isinstance(given, int | float) or isinstance(given, bool) or not math.isfinite(given):
        raise InvalidTask("time_limit_seconds must be a number")
    if not 0 < given <= MOST_TIME_LIMIT_S:
        raise InvalidTask(f"time_limit_seconds must be above 0 and at most {MOST_TIME_LIMIT_S:g}")
    return float(given)


def _credit(data: Mapping[str, Any]) -> Credit:
    match data.get("credit", "fraction"):
        case "fraction":
            return "fraction"
        case "all":
            return "all"
    raise InvalidTask("credit must be 'fraction' or 'all'")


def _is_inner(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\0" not in path

"""Imports HumanEval and MBPP as tasks of the coding environment, with tests as Python code.

HumanEval's file is ``HumanEval.jsonl.gz``, compressed or not. MBPP's files are ``mbpp.jsonl`` and
``sanitized-mbpp.json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gateway.core.environment import SplitType
from gateway.tasks.importing.rows import Entry, InvalidEntry, convert, read_rows, text_of, texts_of

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

    A row's test defines ``check(candidate)`` with all assertions. So a task has one hidden test, which passes or fails.

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
    return scripted_task(
        f"humaneval-{number}",
        tag="humaneval",
        instruction="Complete this function; give the whole of it, with its imports.\n\n"
        f"```python\n{prompt.rstrip()}\n```",
        public=(),
        hidden=(f"{test}\n\ncheck({entry})\n",),
        prelude=prompt,
    )


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
    scripts = [f"{setup}\n{test}" if setup else test for test in tests]
    return scripted_task(
        f"mbpp-{number}", tag="mbpp", instruction=text.strip(), public=scripts[:1], hidden=scripts[1:] or scripts
    )


def scripted_task(
    name: str, *, tag: str, instruction: str, public: Sequence[str], hidden: Sequence[str], prelude: str = ""
) -> dict[str, Any]:
    """Create a task line. The agent sees the *public* tests, and *prelude* precedes each solution.

    The tests run in the solution's own process (``test_scripts``).

    Raises:
        InvalidEntry: There are more tests than the environment allows.
    """
    if len(public) + len(hidden) > MOST_TESTS:
        raise InvalidEntry(f"{len(public) + len(hidden)} tests; the maximum is {MOST_TESTS}")
    scripts: list[dict[str, Any]] = [{"public": True, "code": code} for code in public]
    scripts += [{"code": code} for code in hidden]
    evaluation: dict[str, Any] = {
        "reward_function": "test_scripts",
        "time_limit_seconds": TIME_LIMIT_S,
        "test_scripts": scripts,
    }
    if prelude:
        evaluation["prelude"] = prelude
    return {"id": name, "tags": [tag], "instruction": instruction, "config": {}, "evaluation": evaluation}


def _number_of(row: Mapping[str, Any]) -> str:
    """Return the last part of ``task_id``, ``12`` for ``HumanEval/12``. Raises ``InvalidEntry`` if it is missing."""
    given = row.get("task_id")
    if not isinstance(given, str | int) or isinstance(given, bool):
        raise InvalidEntry("task_id: must be a text or a number" if "task_id" in row else "task_id is missing")
    number = str(given).rpartition("/")[2].strip()
    if not number:
        raise InvalidEntry("task_id: must have a text after the slash" if given else "task_id is empty")
    return number

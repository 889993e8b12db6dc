"""HumanEval's and MBPP's files as tasks of the coding environment, whose tests are Python code.

HumanEval's file is ``HumanEval.jsonl.gz``, packed or not; MBPP's are ``mbpp.jsonl`` and ``sanitized-mbpp.json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gateway.core.environment import SplitType
from gateway.tasks.importing.rows import Entry, InvalidEntry, convert, read_rows, text_of, texts_of

TIME_LIMIT_S = 10
"""CPU time of one test; HumanEval's own runner gives 3 s of wall time, of a machine that may be a faster one."""
MOST_TESTS = 200
"""Of one task, as the environment bounds it."""
PARTS: Mapping[SplitType, range] = {
    SplitType.TEST: range(11, 511),
    SplitType.VALIDATION: range(511, 601),
    SplitType.TRAIN: range(601, 975),
}
"""Numbers of MBPP's tasks of each part, from its README; 1 to 10 are examples for prompts, in no part."""


def read_humaneval(path: Path) -> Iterator[Entry]:
    """Read ``task_id``, ``prompt``, ``entry_point`` and ``test``; ``canonical_solution`` goes into no task.

    A row's test defines ``check(candidate)`` with all assertions, so it is one hidden test: solved or not.

    Raises:
        ConfigError: the file cannot be read, or is no JSON.
    """
    return convert(read_rows(path), humaneval_task)


def read_mbpp(path: Path, *, part: SplitType | None = None) -> Iterator[Entry]:
    """Read ``task_id``, ``text`` or ``prompt``, ``test_list``, and where they are there ``test_setup_code``,
    ``test_imports`` and ``challenge_test_list``; ``code``, the solution, goes into no task.

    The first assertion is public, since it alone tells the function's name and arguments; each other one is a hidden
    test. A row with a single assertion keeps it public and hidden too.

    Args:
        part: leaves all tasks out that are not of it.

    Raises:
        ConfigError: the file cannot be read, or is no JSON.
    """
    return convert(read_rows(path), partial(mbpp_task, part=part))


def humaneval_task(row: Mapping[str, Any]) -> dict[str, Any]:
    """Turn one row into a task line. Raises ``InvalidEntry``: a field is missing or has another shape."""
    number = _number_of(row)
    prompt, entry, test = text_of(row, "prompt"), text_of(row, "entry_point"), text_of(row, "test")
    if not entry.isidentifier():
        raise InvalidEntry(f"entry_point: {entry!r} is no name of a function")
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
    """Turn one row into a task line, or into nothing if it is not of *part*.

    Raises:
        InvalidEntry: a field is missing or has another shape.
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
        raise InvalidEntry("test_setup_code: a text is wanted")
    setup = "\n".join([*texts_of(row, "test_imports"), code]).strip()
    scripts = [f"{setup}\n{test}" if setup else test for test in tests]
    return scripted_task(
        f"mbpp-{number}", tag="mbpp", instruction=text.strip(), public=scripts[:1], hidden=scripts[1:] or scripts
    )


def scripted_task(
    name: str, *, tag: str, instruction: str, public: Sequence[str], hidden: Sequence[str], prelude: str = ""
) -> dict[str, Any]:
    """Make a task line; *public* tests are shown to the agent, and *prelude* stands before each solution.

    The tests run in the solution's own process (``test_scripts``).

    Raises:
        InvalidEntry: there are more tests than the environment takes.
    """
    if len(public) + len(hidden) > MOST_TESTS:
        raise InvalidEntry(f"{len(public) + len(hidden)} tests; the environment takes {MOST_TESTS}")
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
    """The last part of ``task_id``: of ``HumanEval/12`` the ``12``. Raises ``InvalidEntry``: there is none."""
    given = row.get("task_id")
    if not isinstance(given, str | int) or isinstance(given, bool):
        raise InvalidEntry("task_id: a text or a number is wanted" if "task_id" in row else "task_id is missing")
    number = str(given).rpartition("/")[2].strip()
    if not number:
        raise InvalidEntry("task_id: nothing behind the slash" if given else "task_id is empty")
    return number

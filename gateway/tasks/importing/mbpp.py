"""MBPP's files (``mbpp.jsonl``, ``sanitized-mbpp.json``) as tasks of the coding environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gateway.core.environment import SplitType
from gateway.tasks.importing.rows import Entry, InvalidEntry, convert, read_rows, text_of, texts_of
from gateway.tasks.importing.scripted import number_of, scripted_task

PARTS: Mapping[SplitType, range] = {
    SplitType.TEST: range(11, 511),
    SplitType.VALIDATION: range(511, 601),
    SplitType.TRAIN: range(601, 975),
}
"""Numbers of the tasks of each part, from the benchmark's README; 1 to 10 are examples for prompts, in no part."""


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


def mbpp_task(row: Mapping[str, Any], *, part: SplitType | None = None) -> dict[str, Any] | None:
    """Turn one row into a task line, or into nothing if it is not of *part*.

    Raises:
        InvalidEntry: a field is missing or has another shape.
    """
    number = number_of(row)
    if part is not None and not _is_of(number, part):
        return None
    text = text_of(row, "text" if "text" in row else "prompt")
    tests = [*texts_of(row, "test_list"), *texts_of(row, "challenge_test_list")]
    if not tests:
        raise InvalidEntry("test_list is empty" if "test_list" in row else "test_list is missing")
    setup = "\n".join([*texts_of(row, "test_imports"), _setup_code(row)]).strip()
    scripts = [f"{setup}\n{test}" if setup else test for test in tests]
    return scripted_task(
        f"mbpp-{number}", tag="mbpp", instruction=text.strip(), public=scripts[:1], hidden=scripts[1:] or scripts
    )


def _is_of(number: str, part: SplitType) -> bool:
    return number.isdecimal() and len(number) < 10 and int(number) in PARTS[part]


def _setup_code(row: Mapping[str, Any]) -> str:
    code = row.get("test_setup_code") or ""
    if not isinstance(code, str):
        raise InvalidEntry("test_setup_code: a text is wanted")
    return code

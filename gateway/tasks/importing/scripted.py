"""A task of the coding environment whose tests are Python code, as HumanEval and MBPP have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.tasks.importing.rows import InvalidEntry

TIME_LIMIT_S = 10
"""CPU time of one test; HumanEval's own runner gives 3 s of wall time, of a machine that may be a faster one."""
MOST_TESTS = 200
"""Of one task, as the environment bounds it."""


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


def number_of(row: Mapping[str, Any]) -> str:
    """The last part of ``task_id``: of ``HumanEval/12`` the ``12``. Raises ``InvalidEntry``: there is none."""
    given = row.get("task_id")
    if not isinstance(given, str | int) or isinstance(given, bool):
        raise InvalidEntry("task_id: a text or a number is wanted" if "task_id" in row else "task_id is missing")
    number = str(given).rpartition("/")[2].strip()
    if not number:
        raise InvalidEntry("task_id: nothing behind the slash" if given else "task_id is empty")
    return number

"""Checks tasks that arrive in requests: they must conform to the task schema and contain no code in place of data.

The schema is in ``envserver.generic.task``, which workers use too. Such a task names a reward function of the
environment, or contains scripts that run in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from envserver.generic.task import (
    MAX_PROBLEMS,
    SCHEMA,
    TaskError,
    joined,
    long_form,
    registered,
    schema_problems,
)
from envserver.generic.task import MAX_TASK_BYTES as MAX_INLINE_BYTES

from gateway.core.environment import Isolation
from gateway.core.errors import TaskInvalid
from gateway.core.ports.tasks import MAX_TASK_BYTES

MAX_VARIANTS_BYTES: Final = 64 * 2**20
"""Maximum size of all tasks for which one document with ``seeds`` stands, as JSON."""
MAX_VALUES: Final = 200_000
"""Maximum number of values in one document. Only a task designed to be slow has more within the size limit."""
CODE_KEYS: Final = frozenset(
    ("module", "modules", "class", "class_name", "class_path", "task_class", "python", "code_ref", "callable")
) | frozenset(("import", "entry_point", "entrypoint", "pickle", "eval", "exec"))
"""Keys that name or contain server code. Task classes come in images and mounts, never in a request."""
SCRIPT_KEYS: Final = frozenset(("script", "scripts", "test_scripts", "command"))
"""Keys of ``evaluation`` whose values the environment runs."""


def parse(document: object, *, isolation: Isolation | None = None, is_registered: bool = False) -> dict[str, Any]:
    """Check *document* (plain data) and return its task in the long form.

    The arguments of a registration, ``{"task_id", "env_type", "config"}``, are also a valid document.

    Args:
        document: The task as plain data.
        isolation: The isolation of the task's environment. Only ``SANDBOX`` permits scripts. None: the environment is
            unknown, and scripts pass.
        is_registered: True if the store is to keep the task, which then needs an ``id`` and an ``env_type``.

    Raises:
        TaskInvalid: The task is invalid. The error has at most `MAX_PROBLEMS` problems with their paths.
    """
    if isinstance(document, Mapping) and document.keys() == {"task_id", "env_type", "config"}:
        config = document["config"]
        if isinstance(config, Mapping):
            document = {**registered(config), "id": document["task_id"], "env_type": document["env_type"]}
    max_bytes = MAX_TASK_BYTES if is_registered else MAX_INLINE_BYTES
    try:
        task = long_form(document, max_bytes=max_bytes, max_values=MAX_VALUES)
    except TaskError as error:
        raise TaskInvalid(error.problems) from None
    problems = [*schema_problems(task), *_code(task, isolation)]
    if is_registered:
        problems += [(key, "a task that is registered needs one") for key in ("id", "env_type") if not task.get(key)]
    if problems:
        raise TaskInvalid(sorted(set(problems))[:MAX_PROBLEMS])
    return task


def variants_of(task: object) -> list[Any]:
    """Return the tasks that a document of a file or a registration stands for, usually the document alone.

    With ``"seeds": N`` they are N tasks with the ids ``ID~1`` to ``ID~N``. A task's seed comes from its id, so each of
    them begins in its own way.

    Raises:
        TaskInvalid: The number is invalid or too large for such a task, or the task has no id, or has aliases.
    """
    if not isinstance(task, Mapping) or task.get("seeds") is None:
        return [task]
    number = task["seeds"]
    problems = schema_problems({"seeds": number})
    if not isinstance(task.get("id"), str) or not task["id"]:
        problems.append(("id", "a task with seeds needs one"))
    if task.get("aliases"):
        problems.append(("aliases", "a task with seeds has none, because it stands for several tasks"))
    rest = {key: value for key, value in task.items() if key != "seeds"}
    if not problems and number * len(json.dumps(rest)) > MAX_VARIANTS_BYTES:
        problems.append(("seeds", f"{number} tasks of this size take more than {MAX_VARIANTS_BYTES} bytes"))
    if problems:
        raise TaskInvalid(problems)
    return [{**rest, "id": f"{task['id']}~{one}"} for one in range(1, number + 1)]


def json_schema() -> str:
    """Return the JSON Schema of a task, as text."""
    return json.dumps(SCHEMA, indent=2, ensure_ascii=False) + "\n"


def _code(task: Mapping[str, Any], isolation: Isolation | None) -> list[tuple[str, str]]:
    """List the keys of code, and of forbidden scripts, in the task and in its ``evaluation``."""
    evaluation = task.get("evaluation")
    inner: Mapping[str, Any] = evaluation if isinstance(evaluation, Mapping) else {}
    problems = [
        (joined(path, key), "code is not taken from outside: task classes come in images or mounted folders")
        for path, some in (("", task), ("evaluation", inner))
        for key in some
        if key.lower() in CODE_KEYS
    ]
    if isolation not in (None, Isolation.SANDBOX):
        problems += [
            (f"evaluation.{key}", "scripts are only for environments that run code in sandboxes")
            for key in inner
            if key in SCRIPT_KEYS
        ]
    return problems

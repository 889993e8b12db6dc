"""HumanEval's file (``HumanEval.jsonl.gz``, or unpacked) as tasks of the coding environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gateway.tasks.importing.rows import Entry, InvalidEntry, convert, read_rows, text_of
from gateway.tasks.importing.scripted import number_of, scripted_task


def read_humaneval(path: Path) -> Iterator[Entry]:
    """Read ``task_id``, ``prompt``, ``entry_point`` and ``test``; ``canonical_solution`` goes into no task.

    A row's test defines ``check(candidate)`` with all assertions, so it is one hidden test: solved or not.

    Raises:
        ConfigError: the file cannot be read, or is no JSON.
    """
    return convert(read_rows(path), humaneval_task)


def humaneval_task(row: Mapping[str, Any]) -> dict[str, Any]:
    """Turn one row into a task line. Raises ``InvalidEntry``: a field is missing or has another shape."""
    number = number_of(row)
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

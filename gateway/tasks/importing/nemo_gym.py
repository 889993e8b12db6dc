"""Imports rows of NeMo Gym's data sets as tasks of an environment whose workers are resources servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gateway.tasks.importing.rows import Entry, InvalidEntry, convert, read_rows
from gateway.upstreams.nemo.codec import PARAMETERS


def read_rows_of(path: Path) -> Iterator[Entry]:
    """Read the rows of a file. The ids are the file's name and the number of the row, from 0.

    Raises:
        ConfigError: The file cannot be read, or is not JSON.
    """
    name = path.name.partition(".")[0]
    for number, row in enumerate(read_rows(path)):

        def task_of(value: Mapping[str, Any], number: int = number) -> dict[str, Any]:
            parameters = value.get(PARAMETERS)
            if not isinstance(parameters, dict):
                raise InvalidEntry(f"{PARAMETERS}: must be an object with the agent's input")
            return {"id": f"{name}-{number}", "instruction": _last_text(parameters.get("input")), "row": dict(value)}

        yield from convert([row], task_of)


def _last_text(said: object) -> str:
    """Return the last text of a user in a row's input, for people and listings."""
    if isinstance(said, str):
        return said
    messages: list[object] = said if isinstance(said, list) else []
    for message in reversed(messages):
        content = message.get("content") if isinstance(message, dict) and message.get("role") == "user" else None
        parts: list[object] = content if isinstance(content, list) else [{"text": content}]
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        if found := "\n".join(text for text in texts if isinstance(text, str)).strip():
            return found
    return ""

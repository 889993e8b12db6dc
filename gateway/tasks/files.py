"""Read ``<split>.jsonl``: one JSON object a line, each a task.

Every line is parsed when the file is read, so that a bad one stops the start and not an episode; what is kept is the
compact text, which is a third of the size of parsed objects and is what discovery answers with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from gateway.core.errors import ConfigError

MAX_LINE_BYTES = 16 * 2**20
"""A task larger than this is a mistake: it has to fit into one request."""


def read_split(path: Path) -> Sequence[bytes]:
    """Read a split; each item is one task as compact JSON in UTF-8.

    Raises:
        ConfigError: with file, line and reason: not UTF-8, not JSON, not an object, an empty line, an id or alias that
            is no string or stands twice.
    """
    tasks: list[bytes] = []
    ids: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}:{number}"
                task = _parse(line.rstrip(b"\r\n"), where)
                for name in names_of(task, where):
                    if name in ids:
                        raise ConfigError(f"{where}: id: {name!r} stands on line {ids[name]} already")
                    ids[name] = number
                tasks.append(_compact(task, where))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return tasks


def _parse(line: bytes, where: str) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise ConfigError(f"{where}: longer than {MAX_LINE_BYTES} bytes")
    if not line.strip():
        raise ConfigError(f"{where}: an empty line")
    try:
        task = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}") from error
    if not isinstance(task, dict):
        raise ConfigError(f"{where}: a task is a JSON object, not {type(task).__name__}")
    return task


def _compact(task: dict[str, Any], where: str) -> bytes:
    try:
        return json.dumps(task, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:  # 1e999 is infinite, and \ud800 is half a character
        raise ConfigError(f"{where}: {error}") from error


def names_of(task: Mapping[str, Any], where: str = "") -> list[str]:
    """What *task* may be called by: its ``id`` and its ``aliases``, if it has them.

    Raises:
        ConfigError: with *where* it stands: they are not of the form that they should have.
    """
    aliases = task.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(name, str) and name for name in aliases):
        raise ConfigError(f"{where}: aliases: a list of non-empty strings is wanted")
    if "id" not in task:
        return aliases
    name = task["id"]
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: id: a non-empty string is wanted")
    return [name, *aliases]


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return found

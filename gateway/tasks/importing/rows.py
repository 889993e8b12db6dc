"""Reads a file of rows: JSON lines, one JSON array, or one object; packed with gzip or not.

The contents decide, not the name: a packed file is known by its first bytes, and lines in a file that is called
``.json`` are read as lines.

What becomes of one entry of a benchmark's file: a task, or a reason why not.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeAlias

from gateway.core.errors import ConfigError
from gateway.core.json_text import parse

MAX_FILE_BYTES = 256 * 2**20
"""Of one file, unpacked. The benchmarks' own files have a few MiB; a packed file could grow without end."""
_GZIP = b"\x1f\x8b"
_EXTRA_DATA = "Extra data"
"""What ``json`` says of a second value behind the first: the file holds lines."""


class InvalidEntry(ValueError):
    """An entry cannot be turned into a task; the message says what is wrong, and whoever reads the file says where."""


@dataclass(frozen=True, slots=True)
class Imported:
    """An entry that became a task."""

    where: str
    """File and line, or file and number of the entry, both counted from 1."""
    task: dict[str, Any]
    notes: tuple[str, ...] = ()
    """What of the entry was left out, where its author may have meant more."""


@dataclass(frozen=True, slots=True)
class RowRefused:
    """An entry that became none."""

    where: str
    reason: str


Entry: TypeAlias = Imported | RowRefused


@dataclass(frozen=True, slots=True)
class Row:
    """One JSON value of a file."""

    where: str
    """``file:line``, or ``file: entry n``; both are counted from 1."""
    value: object


def read_rows(path: Path) -> Sequence[Row | RowRefused]:
    """Read all rows of *path*; a line that is no JSON is refused alone, so that all of them can be told at once.

    Raises:
        ConfigError: with the file, and the line where it has one: it cannot be read or unpacked, is larger than
            ``MAX_FILE_BYTES``, is not UTF-8, or is an array or object that is no JSON.
    """
    text = _text(path)
    is_document = text.lstrip()[:1] == "[" or path.name.removesuffix(".gz").endswith(".json")
    if not is_document:
        return _lines(text, path)
    try:
        value = parse(text)
    except json.JSONDecodeError as error:
        if error.msg == _EXTRA_DATA:
            return _lines(text, path)
        raise ConfigError(f"{path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    values = value if isinstance(value, list) else [value]
    return [Row(f"{path}: entry {number}", value) for number, value in enumerate(values, 1)]


def convert(
    rows: Iterable[Row | RowRefused], task_of: Callable[[Mapping[str, Any]], dict[str, Any] | None]
) -> Iterator[Entry]:
    """Turn *rows* into tasks; a row for which *task_of* gives None is not asked for, and is left out."""
    for row in rows:
        if isinstance(row, RowRefused):
            yield row
            continue
        try:
            if not isinstance(row.value, dict):
                raise InvalidEntry(f"an object is wanted, not {type(row.value).__name__}")
            task = task_of(row.value)
        except InvalidEntry as error:
            yield RowRefused(row.where, str(error))
        else:
            if task is not None:
                yield Imported(row.where, task)


def text_of(row: Mapping[str, Any], key: str) -> str:
    """The text at *key*. Raises ``InvalidEntry``: there is none, or it is empty."""
    if not isinstance(value := row.get(key), str) or not value.strip():
        raise InvalidEntry(f"{key}: a text is wanted" if key in row else f"{key} is missing")
    return value


def texts_of(row: Mapping[str, Any], key: str) -> list[str]:
    """The list of texts at *key*, empty where it is missing or null. Raises ``InvalidEntry``: it is something else."""
    value = row.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidEntry(f"{key}: a list of texts is wanted")
    return value


def _lines(text: str, path: Path) -> list[Row | RowRefused]:
    # Not `splitlines`, which also parts at U+2028 and others that may stand in a JSON text.
    numbered = ((f"{path}:{number}", line) for number, line in enumerate(text.split("\n"), 1))
    return [_line(line, where) for where, line in numbered if line.strip()]


def _line(line: str, where: str) -> Row | RowRefused:
    try:
        return Row(where, parse(line))
    except json.JSONDecodeError as error:
        return RowRefused(where, f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return RowRefused(where, f"not JSON: {error}")


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = _unpacked(file)
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise ConfigError(f"{path}: {reason or error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8: {error.reason}") from error


def _unpacked(file: BufferedReader) -> bytes:
    if file.peek(2)[:2] != _GZIP:
        return file.read(MAX_FILE_BYTES + 1)
    with gzip.GzipFile(fileobj=file) as packed:
        return packed.read(MAX_FILE_BYTES + 1)

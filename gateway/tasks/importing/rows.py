"""Reads a file of JSON lines, or with one JSON array or object, optionally compressed with gzip, and converts its rows.

The content decides, not the name. The first bytes identify a compressed file, and lines in a ``.json`` file are read as
lines.

Each entry of a benchmark's file becomes a task, or a reason for its refusal.
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
"""Maximum uncompressed size of one file. Benchmarks' files have a few MiB, but a gzip file could expand endlessly."""
_GZIP = b"\x1f\x8b"
_EXTRA_DATA = "Extra data"
"""The message of ``json`` for a second value after the first, which shows that the file has lines."""


class InvalidEntry(ValueError):
    """An entry cannot become a task. The message has the reason, and the file's reader adds the place."""


@dataclass(frozen=True, slots=True)
class Imported:
    """An entry that became a task."""

    where: str
    """File and line, or file and number of the entry. Both count from 1."""
    task: dict[str, Any]
    notes: tuple[str, ...] = ()
    """Omitted parts of the entry that its author may have wanted in the task."""


@dataclass(frozen=True, slots=True)
class RowRefused:
    """An entry that did not become a task, with the reason."""

    where: str
    reason: str


Entry: TypeAlias = Imported | RowRefused


@dataclass(frozen=True, slots=True)
class Row:
    """One JSON value of a file."""

    where: str
    """``file:line``, or ``file: entry n``. Both count from 1."""
    value: object


def read_rows(path: Path) -> Sequence[Row | RowRefused]:
    """Read all rows of *path*. An invalid line becomes a `RowRefused`, so that one run reports all invalid lines.

    Raises:
        ConfigError: The file cannot be read or decompressed, is larger than ``MAX_FILE_BYTES``, is not UTF-8, or is an
            array or object of invalid JSON. The message has the file, and the line if there is one.
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
    """Turn *rows* into tasks. Omit rows for which *task_of* returns None, because the caller did not select them."""
    for row in rows:
        if isinstance(row, RowRefused):
            yield row
            continue
        try:
            if not isinstance(row.value, dict):
                raise InvalidEntry(f"must be an object, not {type(row.value).__name__}")
            task = task_of(row.value)
        except InvalidEntry as error:
            yield RowRefused(row.where, str(error))
        else:
            if task is not None:
                yield Imported(row.where, task)


def text_of(row: Mapping[str, Any], key: str) -> str:
    """Return the text at *key*. Raises ``InvalidEntry`` if the text is missing or blank."""
    if not isinstance(value := row.get(key), str) or not value.strip():
        raise InvalidEntry(f"{key}: must be a text" if key in row else f"{key} is missing")
    return value


def texts_of(row: Mapping[str, Any], key: str) -> list[str]:
    """Return the list of texts at *key*, empty if it is missing or null. Raises ``InvalidEntry`` for other values."""
    value = row.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidEntry(f"{key}: must be a list of texts")
    return value


def _lines(text: str, path: Path) -> list[Row | RowRefused]:
    # `splitlines` would also split at U+2028 and other characters that a JSON text may contain.
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

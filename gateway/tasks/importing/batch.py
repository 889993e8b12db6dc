"""Collects the results of an import, and writes the tasks to a split's file or to standard output.

It writes a file completely or not at all, and replaces an existing file only with *force*.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.core.errors import ConfigError
from gateway.tasks.importing.rows import Entry, Imported, InvalidEntry, RowRefused
from gateway.tasks.split_view import MAX_LINE_BYTES, names_of

MOST_SHOWN = 20
"""Maximum number of messages shown in full. The import only counts the rest."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The results of the entries, in their order."""

    lines: tuple[bytes, ...]
    """The lines of a split's file: one task each, as compact JSON without a line feed."""
    refused: tuple[RowRefused, ...]
    noted: tuple[tuple[str, str], ...]
    """The places of entries, and the omitted parts of these entries."""

    @property
    def entries(self) -> int:
        """The number of processed entries, without the entries after a limit."""
        return len(self.lines) + len(self.refused)

    def summary(self) -> str:
        """Return the numbers of entries, tasks and skipped entries as text."""
        skipped = f", {len(self.refused)} skipped" if self.refused else ""
        return f"{_count(self.entries, 'entry', 'entries')} read, {_count(len(self.lines), 'task', 'tasks')}{skipped}"

    def complaints(self) -> Iterator[str]:
        """Yield place and reason of each refused entry, up to `MOST_SHOWN`."""
        yield from _first(f"{entry.where}: {entry.reason}" for entry in self.refused)

    def remarks(self) -> Iterator[str]:
        """Yield place and omitted part of each noted entry, up to `MOST_SHOWN`."""
        yield from _first(f"{where}: {note}" for where, note in self.noted)


def gather(entries: Iterable[Entry], *, limit: int | None = None) -> Batch:
    """Turn *entries* into at most *limit* lines. Refuse tasks with duplicate names and tasks that are too long."""
    lines: list[bytes] = []
    refused: list[RowRefused] = []
    noted: list[tuple[str, str]] = []
    known: dict[str, str] = {}
    for entry in entries:
        match entry:
            case RowRefused():
                refused.append(entry)
            case Imported(where, task, notes):
                try:
                    line = _line(task, known)
                except InvalidEntry as error:
                    refused.append(RowRefused(where, str(error)))
                    continue
                known |= dict.fromkeys(names_of(task, where), where)
                noted += [(where, note) for note in notes]
                lines.append(line)
        if len(lines) == limit:
            break
    return Batch(tuple(lines), tuple(refused), tuple(noted))


def _line(task: Mapping[str, Any], known: Mapping[str, str]) -> bytes:
    for name in names_of(task):
        if name in known:
            raise InvalidEntry(f"{name} is already the name of {known[name]}")
    try:
        line = json.dumps(task, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:  # \ud800 is half a character
        raise InvalidEntry(str(error)) from error
    if len(line) > MAX_LINE_BYTES:
        raise InvalidEntry(f"a task of {len(line)} bytes; the maximum is {MAX_LINE_BYTES}")
    return line


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _first(messages: Iterable[str]) -> Iterator[str]:
    more = 0
    for position, message in enumerate(messages):
        if position < MOST_SHOWN:
            yield message
        else:
            more += 1
    if more:
        yield f"… and {more} more"


STDOUT = 1
"""File descriptor of standard output."""


def check_target(path: Path, *, force: bool, remedy: str = "remove it first, or write to another file") -> None:
    """Check *path* as a target before the import does its work. *remedy* is the advice for an existing file.

    Raises:
        ConfigError: The folder does not exist, *path* is not a regular file, or it exists and *force* is false.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not path.resolve().parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}") from None
        return
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path}: not a regular file")
    if not force:
        raise ConfigError(f"{path} exists: {remedy}")


def write_lines(path: Path, lines: Iterable[bytes], *, force: bool = False, end: bytes = b"\n") -> None:
    """Write *lines* to *path* atomically, with *end* after each. Readers never see a part of them.

    An existing file keeps its mode. The function follows a link.

    Raises:
        ConfigError: As `check_target`, also if the file appeared since the check, or the write fails.
    """
    check_target(path, force=force)
    target = path.resolve()
    # The name must not end in .jsonl, or a gateway that starts now would read it as a split.
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    try:
        try:
            _write(draft, lines, end)
            if force:
                _replace(target, draft)
            else:
                os.link(draft, target)  # unlike a rename, a link never replaces a file that appeared meanwhile
        finally:
            draft.unlink(missing_ok=True)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists: remove it first, or write to another file") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def print_lines(lines: Iterable[bytes], *, end: bytes = b"\n") -> None:
    """Write *lines* to standard output, with *end* after each.

    Raises:
        BrokenPipeError: The reader has closed the pipe.
        ConfigError: The write fails.
    """
    # Bypass Python's buffer, because Python would retry a failed write at exit and fail again.
    left = memoryview(b"".join(line + end for line in lines))
    try:
        while left:
            left = left[os.write(STDOUT, left) :]
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"standard output: {error.strerror}") from error


def _write(path: Path, lines: Iterable[bytes], end: bytes) -> None:
    with path.open("xb") as file:
        for line in lines:
            file.write(line + end)
        file.flush()
        os.fsync(file.fileno())


def _replace(target: Path, draft: Path) -> None:
    if target.exists():
        draft.chmod(stat.S_IMODE(target.stat().st_mode))
    draft.replace(target)

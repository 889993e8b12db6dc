"""All that an import found: the lines to write, and what to tell of the rest.

Writes a split's file whole or not at all, and over an existing one only when told to; or to standard output.
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
"""Entries that are told one by one; the others are counted."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What became of the entries, in their order."""

    lines: tuple[bytes, ...]
    """A task each, as compact JSON without a line end: what a split's file consists of."""
    refused: tuple[RowRefused, ...]
    noted: tuple[tuple[str, str], ...]
    """Where, and what of a task's entry was left out."""

    @property
    def entries(self) -> int:
        """How many entries were looked at; those after a limit are not."""
        return len(self.lines) + len(self.refused)

    def summary(self) -> str:
        """Count what was read, and what became of it."""
        skipped = f", {len(self.refused)} skipped" if self.refused else ""
        return f"{_count(self.entries, 'entry', 'entries')} read, {_count(len(self.lines), 'task', 'tasks')}{skipped}"

    def complaints(self) -> Iterator[str]:
        """Say of each refused entry where it is and what is wrong, of many the first ones."""
        yield from _first(f"{entry.where}: {entry.reason}" for entry in self.refused)

    def remarks(self) -> Iterator[str]:
        """Say of each task what of its entry was left out, of many the first ones."""
        yield from _first(f"{where}: {note}" for where, note in self.noted)


def gather(entries: Iterable[Entry], *, limit: int | None = None) -> Batch:
    """Make lines of *entries*, up to *limit* of them; names that stand twice, and what is too long, are refused."""
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
            raise InvalidEntry(f"{name} is the name of {known[name]} already")
    try:
        line = json.dumps(task, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:  # \ud800 is half a character
        raise InvalidEntry(str(error)) from error
    if len(line) > MAX_LINE_BYTES:
        raise InvalidEntry(f"a task of {len(line)} bytes; {MAX_LINE_BYTES} are the most")
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
"""The descriptor."""


def check_target(path: Path, *, force: bool, remedy: str = "remove it first, or write to another file") -> None:
    """Find out before the work whether *path* can be written; *remedy* is what to do where it exists.

    Raises:
        ConfigError: its folder is not there; it is no regular file; it is there, and *force* is not given.
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


def write_lines(path: Path, lines: Iterable[bytes], *, force: bool = False) -> None:
    """Write *lines*, a line end after each, to *path*: nobody ever sees a part of them there.

    An existing file keeps its mode; a link is followed.

    Raises:
        ConfigError: as `check_target`, also where the file has come into being since; or the disk refuses.
    """
    check_target(path, force=force)
    target = path.resolve()
    # Not a name that ends in .jsonl: a gateway that starts just then would take it for a split.
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    try:
        try:
            _write(draft, lines)
            if force:
                _replace(target, draft)
            else:
                os.link(draft, target)  # unlike a rename, it never replaces what came there meanwhile
        finally:
            draft.unlink(missing_ok=True)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists: remove it first, or write to another file") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def print_lines(lines: Iterable[bytes]) -> None:
    """Write *lines*, a line end after each, to standard output.

    Raises:
        BrokenPipeError: its reader wants no more.
        ConfigError: it cannot be written.
    """
    # Past Python's buffer: what cannot be written would be tried again, and fail again, as the process ends.
    left = memoryview(b"".join(line + b"\n" for line in lines))
    try:
        while left:
            left = left[os.write(STDOUT, left) :]
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"standard output: {error.strerror}") from error


def _write(path: Path, lines: Iterable[bytes]) -> None:
    with path.open("xb") as file:
        for line in lines:
            file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _replace(target: Path, draft: Path) -> None:
    if target.exists():
        draft.chmod(stat.S_IMODE(target.stat().st_mode))
    draft.replace(target)

"""What becomes of one entry of a benchmark's file: a task, or a reason why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias


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
class Refused:
    """An entry that became none."""

    where: str
    reason: str


Entry: TypeAlias = Imported | Refused

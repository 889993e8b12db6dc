"""Defines the reference to a found task, with its labels for messages."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.core.session import GroupMembership
from gateway.tasks.curricula.model import Curriculum

LABEL_MAX: Final = 200
"""Maximum number of characters of a task's label."""


@dataclass(frozen=True, slots=True)
class CurriculumIndex:
    """An index of a curriculum's split. The index None means the next draw."""

    scope: Curriculum
    index: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRef:
    """One task and its place."""

    spec: Mapping[str, Any]
    split: str = ""
    """The task's split. Empty: the gateway does not know the task's place."""
    index: int | None = None
    is_images: bool = False
    """True for a task of the image itself. Split and index are then the image's own."""
    handle: CurriculumIndex | None = None
    """The curriculum's index from which a task is still to be drawn, or None."""
    ticket: GroupMembership | None = None
    """The group membership of a drawn task. The caller releases it if no session opens with the task."""
    policy: str = ""
    """The tag of the current policy of the curriculum's trainer."""

    @property
    def place(self) -> str:
        """The task's label by place: ``split/index``, or the id of a task without a split."""
        return f"{self.split}/{self.index}" if self.split else str(self.spec.get("id", ""))[:LABEL_MAX]


def seed_of(name: str) -> int:
    """Return a seed for *name* in [0, 2**31). All processes derive the same seed, so a group's members share it."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:4], "big") >> 1

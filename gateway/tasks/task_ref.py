"""A task that was found, and its names for people."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.core.session import GroupMembership
from gateway.tasks.curricula.model import Curriculum

LABEL_MAX: Final = 200
"""Characters of a task's name for people."""


@dataclass(frozen=True, slots=True)
class CurriculumIndex:
    """An index of a curriculum's split; None: whatever is drawn next."""

    scope: Curriculum
    index: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRef:
    """One task, and where it stands."""

    spec: Mapping[str, Any]
    split: str = ""
    """Empty: nobody knows where, as only the image has it."""
    index: int | None = None
    is_images: bool = False
    """The image has it by itself: split and index are its own words, and nothing of it is the gateway's."""
    handle: CurriculumIndex | None = None
    """It stands for a task that is to be drawn."""
    ticket: GroupMembership | None = None
    """Of a task that was drawn: to be given back if nothing is opened with it."""
    policy: str = ""
    """The tag of the policy that a curriculum's trainer plays now."""

    @property
    def id(self) -> str | None:
        """The id that it bears, if any."""
        id = self.spec.get("id")
        return id if isinstance(id, str) else None

    @property
    def place(self) -> str:
        """Its name for people: ``split/index``."""
        return f"{self.split}/{self.index}" if self.split else str(self.spec.get("id", ""))[:LABEL_MAX]

    @property
    def label(self) -> str:
        """Its name for people who know it by its id: that, else ``split/index``."""
        return self.place if self.id is None else self.id[:LABEL_MAX]


def seed_of(name: str) -> int:
    """A seed for *name*, in [0, 2**31): the same in every process, so that all members of a group agree."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:4], "big") >> 1

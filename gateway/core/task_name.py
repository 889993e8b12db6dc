"""The name of a task: its id, and a digest of what agent and judge see of it.

A position in a split is only a way to ask for a task. With the digest, a changed line is another task, and a task that
a trainer sends with another task's id is not that task.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

DIGEST_DIGITS: Final = 32
"""Hexadecimal digits of a digest."""
SHOWN_DIGITS: Final = 16
"""Digits of the digest that name a task without an id."""
_KEY: Final = re.compile(rf"(?:sha256:|(.*) )([0-9a-f]{{{DIGEST_DIGITS}}})", re.DOTALL)


class TaskName(NamedTuple):
    """A task's name."""

    id: str = ""
    """The task's id. For an own task of a third-party image it is ``split/index``. Empty: the task has no id."""
    digest: str = ""
    """`DIGEST_DIGITS` hexadecimal digits. Empty: not known, as for a task that only its worker knows."""

    @classmethod
    def of(cls, key: str) -> TaskName:
        """Return the name with this `key`."""
        found = _KEY.fullmatch(key)
        return cls(key) if found is None else cls(found[1] or "", found[2])

    @classmethod
    def of_label(cls, label: str, digest: str) -> TaskName:
        """Return the name with this `label` and digest."""
        name = cls("", digest)
        return name if name.label == label else cls(label, digest)

    @property
    def key(self) -> str:
        """The name as one text, under which records are kept. Empty: there is no task."""
        if not self.digest:
            return self.id
        return f"{self.id} {self.digest}" if self.id else f"sha256:{self.digest}"

    @property
    def label(self) -> str:
        """The text that people see: the id, or the beginning of the digest."""
        return self.id or (f"sha256:{self.digest[:SHOWN_DIGITS]}" if self.digest else "")

"""Defines the reference to a found task, and its name and seed."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from envserver.generic.task import TaskError, long_form

from gateway.core.errors import TaskInvalid
from gateway.core.session import GroupMembership
from gateway.core.task_name import DIGEST_DIGITS, TaskName
from gateway.tasks.curricula.model import Curriculum

LABEL_MAX: Final = 200
"""Maximum number of characters of an id in a task's name."""
SEED_BITS: Final = 31
_UNSEEN: Final = frozenset(("id", "env_type", "split", "aliases", "tags", "difficulty", "rate_limit")) | frozenset(
    ("reference", "reward_floor", "reward_full", "seeds")
)
"""Keys that neither the agent nor the judge sees, or that name the task."""
_LONG: Final = frozenset(("instruction", "config", "evaluation"))
"""Keys of the long form. A task with one of them is not in the short form."""


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
    def is_listed(self) -> bool:
        """True for a task that trainers name, and False for one that a trainer sends whole."""
        return bool(self.split) or self.is_images or self.spec.keys() == {"id"}

    @property
    def place(self) -> str:
        """``split/index``; empty if the gateway does not know the task's place."""
        if not self.split:
            return ""
        return self.split if self.index is None else f"{self.split}/{self.index}"

    @property
    def name(self) -> TaskName:
        """The task's name.

        An image's own task is named by its place, because the gateway knows only how many of them there are. Of a task
        that only its worker knows, the id is the whole name.
        """
        id = self.spec.get("id")
        if self.is_images or not self.spec:
            return TaskName(self.place or str(id or "")[:LABEL_MAX])
        return name_of(self.spec)


def name_of(spec: Mapping[str, Any]) -> TaskName:
    """Return the name of a task of the gateway, or of one that a trainer sent whole."""
    id = spec.get("id")
    return TaskName(id[:LABEL_MAX] if isinstance(id, str) else "", "" if spec.keys() == {"id"} else digest_of(spec))


def digest_of(task: Mapping[str, Any]) -> str:
    """Return the digest of what agent and judge see of *task*; see `gateway.core.task_name`.

    The short form and the long form of a task have one digest, and so do a task and its entry in a columnar data set,
    which adds nulls.

    Raises:
        TaskInvalid: The task is nested too deeply.
    """
    whole = task
    if not task.keys() & _LONG:
        with contextlib.suppress(TaskError):  # a task of an image may have any form
            whole = long_form(task)
    seen: Any = {key: value for key, value in whole.items() if key not in _UNSEEN}
    try:
        text = _written(seen)
        if ":null" in text or ":{}" in text:
            text = _written(json.loads(text, object_pairs_hook=_present))  # faster than `without_nulls`
    except RecursionError:
        raise TaskInvalid([("", "the task is nested too deeply")]) from None
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_DIGITS]


def _present(members: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in members if value is not None and value != {}}


def _written(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def without_nulls(value: Any) -> Any:
    """Return a JSON value without null members and empty objects, which columnar data sets add."""
    if isinstance(value, Mapping):
        members = ((key, without_nulls(one)) for key, one in value.items())
        return {key: one for key, one in members if one is not None and one != {}}
    return [without_nulls(one) for one in value] if isinstance(value, list | tuple) else value


def seed_of(name: str) -> int:
    """Return a seed for *name* in [0, 2**31). All processes derive the same seed, so a group's members share it."""
    first = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:4]
    return int.from_bytes(first, "big") >> (32 - SEED_BITS)

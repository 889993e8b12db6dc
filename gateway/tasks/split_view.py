"""One split as it is now: the tasks of its file, and those that came at run time after them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.core.environment import SplitType
from gateway.core.ports.tasks import StoredTask
from gateway.tasks.documents import names_of

ORDER = {kind.value: position for position, kind in enumerate(SplitType)}


@dataclass(frozen=True, slots=True)
class Added:
    """A task that came at run time, with what it is looked up by."""

    stored: StoredTask
    names: Sequence[str]
    tags: Sequence[str]


@dataclass(slots=True)
class SplitView:
    """One split as it is now."""

    tasks: Sequence[bytes | None]
    """By index, as compact JSON; None where one was removed."""
    names: Mapping[str, int]
    tags: Mapping[str, Sequence[int]]
    """Indices in ascending order."""
    added: Mapping[int, Added] = field(default_factory=dict)
    has_holes: bool = False


def indexed(tasks: Sequence[bytes]) -> SplitView:
    """The split of a file's *tasks*, compact JSON each."""
    names: dict[str, int] = {}
    tags: dict[str, list[int]] = {}
    for index, raw in enumerate(tasks):
        task = json.loads(raw)
        names.update(dict.fromkeys(names_of(task), index))
        for tag in _tags(task):
            tags.setdefault(tag, []).append(index)
    return SplitView(tasks, names, tags)


def read(task: StoredTask) -> Added:
    """Read a task of the store for what it is looked up by."""
    parsed = json.loads(task.body)
    return Added(task, names_of(parsed), _tags(parsed))


def _tags(task: Mapping[str, Any]) -> list[str]:
    tags = task.get("tags")
    return list(dict.fromkeys(tag for tag in tags if isinstance(tag, str))) if isinstance(tags, list) else []


def merged(file: SplitView, added: Sequence[Added]) -> SplitView:
    """The tasks of *file* (which may have none), with *added*, of which there is at least one, after them."""
    first = len(file.tasks)
    placed = {first + one.stored.place: one for one in sorted(added, key=lambda one: one.stored.place)}
    tasks: list[bytes | None] = [*file.tasks, *[None] * (max(placed) + 1 - first)]
    names: dict[str, int] = {}
    tags = {tag: list(indices) for tag, indices in file.tags.items()}
    for index, one in placed.items():
        tasks[index] = one.stored.body
        for name in one.names:
            names.setdefault(name, index)
        for tag in one.tags:
            tags.setdefault(tag, []).append(index)
    for index, one in placed.items():
        names[one.stored.id] = index  # an id comes before another task's alias
    return SplitView(tasks, names | dict(file.names), tags, placed, has_holes=None in tasks)


def rank(split: str) -> tuple[int, str]:
    """What splits are sorted by: train, validation, test, then others by name."""
    return ORDER.get(split, len(ORDER)), split

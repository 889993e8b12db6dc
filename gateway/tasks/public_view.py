"""Builds the public view of tasks: listings show it to trainers, and a create with it plays the full task.

The view has no answer, hidden test, reference solution or reward argument, so a trainer can log a listing. It has a
fixed set of fields, so a split fits a columnar data set.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.core.environment import Environment, TaskView
from gateway.core.errors import InvalidRequest
from gateway.core.ids import EnvironmentName
from gateway.tasks.documents import compact
from gateway.tasks.registry import TaskRegistry
from gateway.tasks.task_ref import without_nulls

ALWAYS: Final[Mapping[str, object]] = {"id": None, "instruction": "", "tags": (), "difficulty": None}
"""Fields that each task has in a listing, with the values that stand for a missing field."""
PUBLIC: Final = (*ALWAYS, "env_type", "name", "description", "split")
"""Fields that a listing shows in every environment. ``[tasks] public`` adds others."""


def public_view(task: Mapping[str, Any], environment: Environment, place: str) -> dict[str, Any]:
    """Return the public fields of *task*. A task without an id gets its *place* as its id."""
    view = {**ALWAYS, "id": place} | _projected(task, (*PUBLIC, *environment.public_fields))
    return {key: ALWAYS.get(key) if value is None else value for key, value in view.items()}


def is_public_view(spec: Mapping[str, Any], environment: Environment) -> bool:
    """Return True if *spec* has an id and no other fields than the public view of a task has."""
    if not isinstance(spec.get("id"), str) or not isinstance(spec.get("split"), str | None):
        return False
    try:
        given: dict[str, Any] = without_nulls(spec)
        return _projected(given, (*PUBLIC, *environment.public_fields)) == given
    except RecursionError:
        return False


def check_unchanged(spec: Mapping[str, Any], view: Mapping[str, Any]) -> None:
    """Check that each field of *spec*, which a trainer sent, has the value of the listing's *view*.

    Raises:
        InvalidRequest: A field differs. Otherwise the trainer would play another task than it sent.
    """
    listed = without_nulls(view)
    for key, value in without_nulls(spec).items():
        if value != listed.get(key):
            raise InvalidRequest(
                f"task_spec.{key}: differs from the listed task {view['id']!r}: send the listed task unchanged, or a "
                "complete task with its evaluation and another id"
            )


class ListedTasks:
    """The registry's tasks as trainers see them in listings."""

    def __init__(self, registry: TaskRegistry) -> None:
        self._registry = registry
        self._views: dict[tuple[EnvironmentName, str], tuple[object, Sequence[bytes | None]]] = {}
        """Environment and split → the tasks and public fields that the views were made from, and the views."""

    def raw(self, environment: Environment, split: str, index: int) -> bytes:
        """Return one task as compact JSON. Raises ``UnknownSplit``, ``UnknownTask``."""
        raw = self._registry.raw(environment.name, split, index)
        if environment.task_view is TaskView.FULL:
            return raw
        count = self._registry.count(environment.name, split)
        return _viewed(raw, environment, f"{split}/{index % count}")

    async def range(self, environment: Environment, split: str, start: int | None, stop: int | None) -> Sequence[bytes]:
        """Return the tasks of the Python slice ``[start:stop]``, without removed ones. Raises ``UnknownSplit``."""
        if environment.task_view is TaskView.FULL:
            return self._registry.range(environment.name, split, start, stop)
        tasks = self._registry.all(environment.name, split)  # the same object for as long as nothing has changed
        source = (tasks, environment.public_fields)
        known = self._views.get((environment.name, split))
        if known is None or known[0] != source:
            # A thread makes the views, because a split may have a hundred thousand tasks.
            known = source, await asyncio.to_thread(_views_of, tasks, environment, split)
            self._views[environment.name, split] = known
        return [view for view in known[1][start:stop] if view is not None]


def _views_of(tasks: Sequence[bytes | None], environment: Environment, split: str) -> list[bytes | None]:
    return [None if raw is None else _viewed(raw, environment, f"{split}/{index}") for index, raw in enumerate(tasks)]


def _viewed(raw: bytes, environment: Environment, place: str) -> bytes:
    return compact(public_view(json.loads(raw), environment, place))


def _projected(task: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return the part of *task* at *paths*, each the keys joined by dots."""
    found: dict[str, Any] = {}
    for path in paths:
        key, _, rest = path.partition(".")
        if key not in task:
            continue
        if not rest:
            found[key] = task[key]
        elif isinstance(task[key], Mapping):
            found[key] = found.get(key, {}) | _projected(task[key], (rest,))
    return found

"""Tasks found by values in them, such as ``config.task_name``: a split is read once for each set of places."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.ids import EnvironmentName
from gateway.tasks.registry import TaskRegistry

_Values = tuple[str, ...]


class TaskFields:
    """Indices of tasks by their values."""

    def __init__(self) -> None:
        self._known: dict[tuple[EnvironmentName, str, tuple[str, ...]], tuple[object, dict[_Values, list[int]]]] = {}
        """By environment, split and places: the split as it was read, and where each combination of values stands."""

    async def find(
        self, registry: TaskRegistry, environment: EnvironmentName, split: str, wanted: Mapping[str, Any]
    ) -> Sequence[int]:
        """The indices in *split* of the tasks that have the values *wanted*, which are named by their places."""
        places = tuple(sorted(wanted))
        tasks = registry.all(environment, split)  # the same object for as long as nothing has changed
        known = self._known.get((environment, split, places))
        if known is None or known[0] is not tasks:
            # In a thread: a split may have a hundred thousand tasks.
            known = tasks, await asyncio.to_thread(_indexed, tasks, places)
            self._known[environment, split, places] = known
        return known[1].get(tuple(_written(wanted[place]) for place in places), ())


def value_at(task: Mapping[str, Any], place: str) -> Any:
    """The value at *place*, keys with dots between them; None where there is none."""
    found: Any = task
    for key in place.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(key)
    return found


def _indexed(tasks: Sequence[bytes | None], places: Sequence[str]) -> dict[_Values, list[int]]:
    found: defaultdict[_Values, list[int]] = defaultdict(list)
    for index, raw in enumerate(tasks):
        if raw is not None:
            task = json.loads(raw)
            found[tuple(_written(value_at(task, place)) for place in places)].append(index)
    return dict(found)


def _written(value: Any) -> str:
    return json.dumps(value, sort_keys=True)

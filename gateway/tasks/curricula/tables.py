"""Reads the tables of tasks from which curricula draw, and selects each component's part of a table.

`TaskTables` reads a split's keys, tags and difficulties once for each state of the split. It queries workers only for
the number of their own tasks, so these tasks have neither tags nor difficulties here.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.catalog.catalog import Catalog
from gateway.core.curriculum import TaskRecord
from gateway.core.environment import Environment
from gateway.core.errors import InvalidRequest, UnknownSplit
from gateway.core.ids import EnvironmentName
from gateway.core.ports.tasks import TaskQueries
from gateway.tasks.curricula.model import Component, Curriculum
from gateway.tasks.registry import TaskRegistry
from gateway.tasks.task_ref import name_of

AT_ONCE: Final = 500
"""Number of tasks to read before the event loop serves other requests."""
COUNT_S: Final = 60.0
"""Seconds for which the number of an image's own tasks stays valid."""

Records = Mapping[EnvironmentName, Mapping[str, TaskRecord]]
"""Environment → `TaskRecord.task` → record. A task that was never tried has no record."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task of a split, with the keys by which a curriculum can choose it."""

    index: int
    """The task's index in its split, as trainers use it."""
    task: str
    """The task's key, as in `TaskRecord.task`."""
    tags: Sequence[str] = ()
    difficulty: float | None = None


Rows = tuple[TaskRow, ...]
"""The tasks of a split in the order of their indices, without removed tasks."""
Tables = Mapping[tuple[EnvironmentName, str], Rows]
"""Environment and split → tasks."""


@dataclass(frozen=True, slots=True)
class Part:
    """A component with its tasks: all tasks of its split, or the tasks with one of its tags."""

    component: Component
    rows: Rows


def has_any(row: TaskRow, tags: Sequence[str]) -> bool:
    """Return True if the task has one of *tags*, or if *tags* is empty."""
    return not tags or any(tag in tags for tag in row.tags)


def parts_of(curriculum: Curriculum, tables: Tables) -> tuple[Part, ...]:
    """Return each component with its tasks, in the order of the components.

    Raises:
        InvalidRequest: A component has no task. The message names the component.
    """
    parts = []
    for position, component in enumerate(curriculum.components):
        rows = tables.get((component.environment, component.split), ())
        if component.tags:
            rows = tuple(row for row in rows if has_any(row, component.tags))
        if not rows:
            tagged = f" tagged {' or '.join(component.tags)}" if component.tags else ""
            raise InvalidRequest(
                f"curriculum {curriculum.name}: components[{position}]: "
                f"{component.environment} has no task{tagged} in split {component.split!r}"
            )
        parts.append(Part(component, rows))
    return tuple(parts)


def count_rows(parts: Sequence[Part]) -> int:
    """Count the distinct tasks of *parts* in all stages. Parts of the same split may share tasks."""
    places = [(part.component.environment, part.component.split) for part in parts]
    if len(set(places)) == len(places):
        return sum(len(part.rows) for part in parts)
    return len({(*place, row.index) for place, part in zip(places, parts, strict=True) for row in part.rows})


def read_table(environment: Environment, split: str, registry: TaskRegistry) -> Rows | None:
    """Read a split's tasks from the registry without a pause. Return None if only the workers may know the split."""
    try:
        tasks = registry.all(environment.name, split)
    except UnknownSplit:
        return None if _asks(environment) else ()
    return tuple(_row(index, json.loads(body)) for index, body in enumerate(tasks) if body is not None)


class TaskTables:
    """Caches the tables of the registry's splits and of images' own splits."""

    def __init__(self, registry: TaskRegistry, *, catalog: Catalog, queries: TaskQueries) -> None:
        self._registry = registry
        self._catalog = catalog
        self._queries = queries
        self._tables: dict[tuple[EnvironmentName, str], tuple[object, Rows]] = {}
        self._building = asyncio.Lock()

    async def of(self, environment: EnvironmentName, split: str) -> Rows:
        """Return the tasks of a split, or an empty table if there is no such split.

        Raises:
            GatewayError: The gateway cannot query the environment's workers.
        """
        try:
            tasks = self._registry.all(environment, split)
        except UnknownSplit:
            return await self._of_image(environment, split)
        known = self._tables.get((environment, split))
        if known is not None and known[0] is tasks:
            return known[1]
        async with self._building:  # one table at a time, because each takes much of the event loop's time
            known = self._tables.get((environment, split))
            if known is not None and known[0] is tasks:  # another request has built the table meanwhile
                return known[1]
            rows = await _rows(tasks)
            self._tables[environment, split] = tasks, rows
            return rows

    async def _of_image(self, name: EnvironmentName, split: str) -> Rows:
        environment = self._catalog.offered.get(name)
        if environment is None or not _asks(environment):
            return ()
        known = self._tables.get((name, split))
        if known is not None and isinstance(known[0], float) and time.monotonic() - known[0] < COUNT_S:
            return known[1]
        try:
            count = await self._queries.count(environment, split)
        except UnknownSplit:
            return ()
        rows = tuple(TaskRow(index, f"{split}/{index}") for index in range(count))
        self._tables[name, split] = time.monotonic(), rows
        return rows


def _asks(environment: Environment) -> bool:
    """Return True if the gateway queries workers for tasks that the registry does not have."""
    return environment.tasks is None


async def _rows(tasks: Sequence[bytes | None]) -> Rows:
    rows: list[TaskRow] = []
    for index, body in enumerate(tasks):
        if body is not None:
            rows.append(_row(index, json.loads(body)))
        if index % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)
    return tuple(rows)


def _row(index: int, task: dict[str, Any]) -> TaskRow:
    tags, difficulty = task.get("tags"), task.get("difficulty")
    is_number = isinstance(difficulty, int | float) and not isinstance(difficulty, bool) and math.isfinite(difficulty)
    return TaskRow(
        index=index,
        task=name_of(task).key,
        tags=tuple(tag for tag in tags if isinstance(tag, str)) if isinstance(tags, list) else (),
        difficulty=float(difficulty) if is_number and difficulty is not None else None,
    )

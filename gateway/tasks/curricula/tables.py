"""What draws are made from: the tasks of splits, and the parts of them that a curriculum's components stand for.

The tasks of a split are read once for each state of it, with their keys, tags and difficulties. Of tasks that only
workers have, nothing but their number is asked: they have neither tags nor difficulties here.
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

AT_ONCE: Final = 2_000
"""Tasks that are read in one go; between two goes other requests are served."""
COUNT_S: Final = 60.0
"""How long an image's own word for the number of its tasks holds."""

Records = Mapping[EnvironmentName, Mapping[str, TaskRecord]]
"""By environment and by `TaskRecord.task`; what is missing was never tried."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task of a split, with what it can be chosen by."""

    index: int
    """In its split, as trainers ask for it."""
    task: str
    """As in `TaskRecord.task`."""
    tags: Sequence[str] = ()
    difficulty: float | None = None


Rows = tuple[TaskRow, ...]
"""The tasks of a split, by index; an index whose task was removed is not in it."""
Tables = Mapping[tuple[EnvironmentName, str], Rows]
"""By environment and split."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a component stands for: of its split, the tasks that have one of its tags."""

    component: Component
    rows: Rows


def has_any(row: TaskRow, tags: Sequence[str]) -> bool:
    """Whether the task has one of *tags*; where there are none, every task has."""
    return not tags or any(tag in tags for tag in row.tags)


def parts_of(curriculum: Curriculum, tables: Tables) -> tuple[Part, ...]:
    """The tasks of each component, in the order of the components.

    Raises:
        InvalidRequest: a component has none; the message names it.
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
    """Count the tasks of *parts*, whatever the stage; one that several have, by its tags, counts once."""
    places = [(part.component.environment, part.component.split) for part in parts]
    if len(set(places)) == len(places):
        return sum(len(part.rows) for part in parts)
    return len({(*place, row.index) for place, part in zip(places, parts, strict=True) for row in part.rows})


def read_table(environment: Environment, split: str, registry: TaskRegistry) -> Rows | None:
    """Read a split's tasks from the registry, in one go; None: only the environment's workers know them."""
    try:
        tasks = registry.all(environment.name, split)
    except UnknownSplit:
        return None if _asks(environment) else ()
    return tuple(_row(split, index, json.loads(body)) for index, body in enumerate(tasks) if body is not None)


class TaskTables:
    """Tables of the registry's splits."""

    def __init__(self, registry: TaskRegistry, *, catalog: Catalog, queries: TaskQueries) -> None:
        self._registry = registry
        self._catalog = catalog
        self._queries = queries
        self._tables: dict[tuple[EnvironmentName, str], tuple[object, Rows]] = {}
        self._building = asyncio.Lock()

    async def of(self, environment: EnvironmentName, split: str) -> Rows:
        """Return the tasks of a split; none where there is no such split.

        Raises:
            GatewayError: its workers can't be asked.
        """
        try:
            tasks = self._registry.all(environment, split)
        except UnknownSplit:
            return await self._of_image(environment, split)
        known = self._tables.get((environment, split))
        if known is not None and known[0] is tasks:
            return known[1]
        async with self._building:  # one at a time: each has a good deal of the loop's time
            known = self._tables.get((environment, split))
            if known is not None and known[0] is tasks:  # somebody else has built it meanwhile
                return known[1]
            rows = await _rows(split, tasks)
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
    """Whether its image is asked for tasks that the registry does not have."""
    return environment.tasks is None


async def _rows(split: str, tasks: Sequence[bytes | None]) -> Rows:
    rows: list[TaskRow] = []
    for index, body in enumerate(tasks):
        if body is not None:
            rows.append(_row(split, index, json.loads(body)))
        if index % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)
    return tuple(rows)


def _row(split: str, index: int, task: dict[str, Any]) -> TaskRow:
    id, tags, difficulty = task.get("id"), task.get("tags"), task.get("difficulty")
    is_number = isinstance(difficulty, int | float) and not isinstance(difficulty, bool) and math.isfinite(difficulty)
    return TaskRow(
        index=index,
        task=id if isinstance(id, str) and id else f"{split}/{index}",
        tags=tuple(tag for tag in tags if isinstance(tag, str)) if isinstance(tags, list) else (),
        difficulty=float(difficulty) if is_number and difficulty is not None else None,
    )

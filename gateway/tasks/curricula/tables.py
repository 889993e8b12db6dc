"""What draws are made from: tables of tasks, and the parts of them that a curriculum's components stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.core.curriculum import TaskRecord
from gateway.core.errors import InvalidRequest
from gateway.core.ids import EnvironmentName
from gateway.tasks.curricula.model import Component, Curriculum

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

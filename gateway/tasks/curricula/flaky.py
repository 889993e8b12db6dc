"""Keeps the tasks that audits found flaky: the same actions on them do not always give the same result.

Curricula do not draw them. The store has one value for each environment, which all replicas read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from gateway.core.errors import InvalidRequest, StoreUnavailable
from gateway.core.ids import EnvironmentName
from gateway.core.ports.curricula import MAX_STATE_BYTES, CurriculumStore

CONFIDENCE: Final = 0.95
"""Confidence of the intervals of rates."""
WRITES: Final = 16
"""Maximum number of attempts to change a value while other replicas change it too."""


@dataclass(frozen=True, slots=True)
class FlakyTask:
    """A task with the numbers of its replays and of its differing replays."""

    replays: int
    differing: int
    marked_at: float
    """Unix time in seconds."""

    @property
    def rate(self) -> float:
        """The share of replays that differed."""
        return self.differing / self.replays


def interval(differing: int, replays: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's score interval of the rate *differing* / *replays*: it holds for few replays and rare events."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rate, scale = differing / replays, 1 + z * z / replays
    centre = (rate + z * z / (2 * replays)) / scale
    half = z * math.sqrt(rate * (1 - rate) / replays + z * z / (4 * replays * replays)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


class FlakyTasks:
    """Reads and changes the marks in the store."""

    def __init__(self, store: CurriculumStore) -> None:
        self._store = store

    async def of(self, environment: EnvironmentName) -> Mapping[str, FlakyTask]:
        """Return the marked tasks of *environment* by their record keys. Raises ``StoreUnavailable``."""
        return (await self._read(environment))[1]

    async def mark(self, environment: EnvironmentName, task: str, found: FlakyTask | None) -> bool:
        """Mark a task, or with None remove its mark. Return True if the task was marked before.

        Raises:
            InvalidRequest: The environment has too many marked tasks.
            StoreUnavailable: The store does not answer.
        """
        for _ in range(WRITES):
            version, marks = await self._read(environment)
            was_marked = marks.pop(task, None) is not None
            if found is not None:
                marks[task] = found
            elif not was_marked:
                return False
            rows = {name: [one.replays, one.differing, one.marked_at] for name, one in marks.items()}
            body = json.dumps(rows, separators=(",", ":")).encode()
            if len(body) > MAX_STATE_BYTES:
                raise InvalidRequest(
                    f"{len(marks)} marked tasks of {environment!r} take more than {MAX_STATE_BYTES} bytes: repair or "
                    "remove tasks, and remove their marks"
                )
            if await self._store.set_state(_name(environment), version, body):
                return was_marked
        raise StoreUnavailable(f"the marks of {environment!r} change faster than they can be written")

    async def _read(self, environment: EnvironmentName) -> tuple[int, dict[str, FlakyTask]]:
        version, body = await self._store.state(_name(environment))
        rows = json.loads(body) if body else {}
        return version, {task: FlakyTask(*row) for task, row in rows.items()}


def _name(environment: EnvironmentName) -> str:
    return f"flaky:{environment}"  # no curriculum has a colon in its name

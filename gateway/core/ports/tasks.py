"""The interfaces to tasks that are in no file: of the store, for tasks that come at run time, and of the workers.

The store does not read what it keeps of a task; `tasks.registry` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.core.environment import Environment, Split, TaskSpec
from gateway.core.errors import EnvironmentUnavailable
from gateway.core.ids import EnvironmentName
from gateway.core.worker import WorkerTasks

MAX_TASKS = 10_000
"""Tasks of one environment."""
MAX_TASK_BYTES = 2**20
"""One task, as compact JSON."""
MAX_TOTAL_BYTES = 64 * 2**20
"""All tasks together: what each replica holds in memory besides the files'."""
MAX_SPLITS = 100
"""Splits of one environment that ever had a task: each has a count that is kept for ever."""
MAX_AT_ONCE = 2_000
"""Tasks in one `TaskStore.put`: some ten milliseconds of the store's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTask:
    """One task as the store keeps it."""

    environment: EnvironmentName
    id: str
    """Unique in its environment; neither it nor a split's name has a space."""
    split: str
    body: bytes
    """Compact JSON."""
    signed_by: str = ""
    """The key that signed it; empty: nobody."""
    place: int = -1
    """Its position among the tasks that its split was ever given; the store's to say."""


@dataclass(frozen=True, slots=True)
class TaskChanges:
    """What happened to the tasks since a version."""

    version: str
    """Where these changes lead to."""
    is_whole: bool
    """These are all tasks there are: whatever was known before is to be forgotten."""
    is_last: bool
    """There is nothing after them; otherwise ask again from ``version`` on."""
    tasks: Sequence[StoredTask]
    removed: Sequence[tuple[EnvironmentName, str]]
    """Environment and id."""


class TaskStore(Protocol):
    """Tasks that come at run time, and how often tasks were begun. Each method is one atomic step.

    Every method raises ``StoreUnavailable`` when the store does not answer.
    """

    async def put(self, tasks: Sequence[StoredTask], *, replace: bool) -> Sequence[StoredTask]:
        """Keep *tasks*, all or none of them, and return them with their places.

        One that replaces another of its environment and id keeps that one's place, if its split is the same; every
        other gets the next place of its split, and no place is ever given to two.

        Raises:
            TaskExists: the environment has one of that id, and *replace* is not given.
            InvalidRequest: one of the limits above is exceeded; it is named.
        """

    async def remove(self, environment: EnvironmentName, id: str) -> bool:
        """Forget a task; False if there is none."""

    async def version(self) -> str:
        """Name the state that the tasks are in; another one after each change. Empty: there never was a task."""

    async def since(self, version: str) -> TaskChanges:
        """What changed since *version*, at most some MiB of it. An unknown version, as the empty one: everything."""

    async def take(self, key: str, *, starts: int, per_s: float) -> float:
        """Take one of the *starts* that *key* has in any *per_s* seconds.

        Returns 0.0 if it was taken, else the seconds until the next one can be, and nothing was taken.
        """

    async def aclose(self) -> None:
        """Let go of connections."""


class BeingReplaced(EnvironmentUnavailable):
    """The workers that could answer are being replaced by workers of another revision."""


class TaskQueries(Protocol):
    """Queries workers for the tasks that they have: `gateway.sessions.worker_queries.WorkerQueries`."""

    async def registered(self, environment: Environment) -> WorkerTasks:
        """Return the tasks that they know by id. Raises ``BeingReplaced`` too."""

    async def splits(self, environment: Environment) -> list[Split]:
        """Return the splits that they have."""

    async def count(self, environment: Environment, split: str) -> int:
        """Return how many tasks a split has. Raises ``UnknownSplit``."""

    async def tasks(self, environment: Environment, split: str, start: int, stop: int) -> list[TaskSpec]:
        """Return the tasks of a split from *start* up to, not including, *stop*. Raises ``UnknownSplit``."""

"""The interfaces to tasks that are not in files: the task store for run-time tasks, and queries to workers.

The store keeps tasks as opaque data, which `tasks.registry` reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.core.environment import Environment, Split, TaskSpec
from gateway.core.errors import EnvironmentUnavailable, NotAllowed
from gateway.core.ids import EnvironmentName
from gateway.core.worker import WorkerTasks

MAX_TASKS = 10_000
"""Maximum number of tasks of one environment."""
MAX_TASK_BYTES = 2**20
"""Maximum size of one task, as compact JSON."""
MAX_TOTAL_BYTES = 64 * 2**20
"""Maximum size of all tasks, which each replica holds in memory in addition to the tasks of files."""
MAX_SPLITS = 100
"""Maximum number of splits of one environment that ever had a task: each split's count is kept permanently."""
MAX_AT_ONCE = 2_000
"""Maximum number of tasks in one `TaskStore.put`, which takes the store about ten milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTask:
    """One task in the store."""

    environment: EnvironmentName
    id: str
    """Unique in its environment; neither ids nor split names contain a space."""
    split: str
    body: bytes
    """Compact JSON."""
    signed_by: str = ""
    """The key that signed the task; empty: unsigned."""
    place: int = -1
    """Position among all tasks that its split ever got; the store assigns it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleStamp:
    """What the store remembers of an accepted bundle, so that no older bundle of the same key comes after it."""

    key: str
    """The id of the key that signed the bundle."""
    made_at: str
    """The time of signing. The order of these texts is the order of the times."""
    digest: str
    """Hash of the signed content."""
    environment: str = ""
    """The environment that the signature names; empty: none, so the bundle's tasks may be of any environment."""
    split: str = ""
    """The split that the signature names; empty: none."""

    def is_barred_by(self, other: BundleStamp) -> bool:
        """Return True if *other*, an accepted bundle of the same key, may hold newer versions of the same tasks.

        Bundles for two environments, or for two splits, share no task. A bundle that names none may share tasks with
        each bundle of its key. Two bundles of one time have no order, so one bars the other.
        """
        places = ((self.environment, other.environment), (self.split, other.split))
        if any(own and its and own != its for own, its in places):
            return False
        return other.made_at > self.made_at or (other.made_at == self.made_at and other.digest != self.digest)


class BundleRefused(NotAllowed):
    """The signature of a bundle is valid, but not for this upload: not now, not here, or not any more."""


@dataclass(frozen=True, slots=True)
class TaskChanges:
    """Changes of the tasks since a version."""

    version: str
    """The version that these changes lead to."""
    is_whole: bool
    """True if these are all tasks, so that earlier tasks must be discarded."""
    is_last: bool
    """True if no changes follow; otherwise the caller continues from ``version``."""
    tasks: Sequence[StoredTask]
    removed: Sequence[tuple[EnvironmentName, str]]
    """Environment and id of each removed task."""


class TaskStore(Protocol):
    """Run-time tasks, and the rate limits of task starts. Each method is one atomic step.

    Every method raises ``StoreUnavailable`` if the store does not answer.
    """

    async def put(
        self, tasks: Sequence[StoredTask], *, replace: bool, bundle: BundleStamp | None = None
    ) -> Sequence[StoredTask]:
        """Store *tasks*, all or none of them, and return them with their places.

        A task that replaces a task of the same environment, id and split keeps its place. Every other task gets the
        next place of its split. A place is never assigned twice.

        With *bundle*, the signed bundle that the tasks come from, the store remembers its stamp in the same step.

        Raises:
            BundleRefused: An accepted bundle bars this one (`BundleStamp.is_barred_by`), or *bundle* names a split and
                a task of that id is in another split.
            TaskExists: The environment has a task of that id, and *replace* is False.
            InvalidRequest: A limit above is exceeded; the message names it.
        """

    async def remove(self, environment: EnvironmentName, id: str) -> bool:
        """Delete a task; return False if there is no such task."""

    async def version(self) -> str:
        """Return the version of the tasks, which is new after each change; empty if there never was a task."""

    async def since(self, version: str) -> TaskChanges:
        """Return the changes since *version*, at most some MiB. An unknown or empty version returns everything."""

    async def take(self, key: str, *, starts: int, per_s: float) -> float:
        """Take one of the *starts* that *key* has in any *per_s* seconds.

        Returns:
            0.0 if it was taken; otherwise the seconds until the next start is free, and nothing was taken.
        """

    async def aclose(self) -> None:
        """Close the connections."""


class BeingReplaced(EnvironmentUnavailable):
    """The workers that could answer are being replaced by workers of another revision."""


class TaskQueries(Protocol):
    """Queries to workers for their own tasks: `gateway.sessions.worker_queries.WorkerQueries`."""

    async def registered(self, environment: Environment) -> WorkerTasks:
        """Return the workers' tasks by id. May also raise ``BeingReplaced``."""

    async def splits(self, environment: Environment) -> list[Split]:
        """Return the workers' splits."""

    async def count(self, environment: Environment, split: str) -> int:
        """Return the number of tasks in a split. Raises ``UnknownSplit``."""

    async def tasks(self, environment: Environment, split: str, start: int, stop: int) -> list[TaskSpec]:
        """Return the tasks of a split from *start* up to, but not including, *stop*. Raises ``UnknownSplit``."""

"""The backend: what starts and stops workers.

One contract suite runs on every implementation (``tests/contract``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from gateway.core.environment import Environment
from gateway.core.ids import WorkerId
from gateway.core.leader_lease import LeaderLease
from gateway.core.worker import BackendWorker, Death, Worker


class Backend(Protocol):
    """What starts and stops workers. Blocking clients live behind this seam, in threads."""

    async def start(self, worker: Worker, environment: Environment, lease: LeaderLease | None = None) -> str:
        """Start *worker* and return its address; it need not be ready yet.

        Leaves nothing behind when it fails or is cancelled.

        Args:
            lease: Of the leader that asks; checked right before each request to the engine that makes or starts
                something.

        Raises:
            NotLeading: the lease ended.
            StartFailed: the engine refused, or the worker died at once.
            BackendError: the engine does not answer; the environment may be as good as ever.
        """

    async def stop(self, id: WorkerId) -> None:
        """Stop and remove a worker and all that belongs to it; unknown ids are no error.

        Raises:
            BackendError: the engine does not answer; the worker may still be there.
        """

    async def logs(self, id: WorkerId, *, lines: int = 20) -> str:
        """The last *lines* of a worker's output; empty if there is none."""

    async def found(self) -> list[BackendWorker]:
        """List the workers of this gateway's instance that the engine knows of, running or dead."""

    async def pause(self, id: WorkerId, lease: LeaderLease | None = None) -> None:
        """Freeze an idle worker: it keeps its memory and gets no CPU.

        Args:
            lease: Of the leader that asks; checked right before the request to the engine.

        Raises:
            NotLeading: the lease ended.
            BackendError: there is no such worker, or it can't be frozen.
        """

    async def resume(self, id: WorkerId) -> None:
        """Let a paused worker go on; one that runs is no error. Raises ``BackendError``."""

    async def prepare(self, environment: Environment) -> str:
        """Bring about what every start of *environment* needs, its image above all, and name it.

        Returns the image's id (``sha256:…``), which is another one when the image was built or pulled anew; empty where
        there is no image.

        Raises:
            StartFailed: there is no such image, and it can't be had.
            BackendError: the engine does not answer.
        """

    def deaths(self) -> AsyncIterator[Death]:
        """Follow workers that die, whoever ended them. May lose some: `found` is the truth."""

    def engines(self) -> int:
        """Return how many engines start workers side by side now, each its own number at once; one by default."""
        return 1

    def leaving(self) -> frozenset[WorkerId]:
        """Workers that are to get no more sessions, as their machine drains; from what is known by now, without asking.

        What runs in them goes on. Ids that nobody knows any more may be among them. None by default: the only machine
        is the gateway's own, and the gateway drains with it.
        """
        return frozenset()

    async def check(self) -> None:
        """Raise ``BackendError`` with what to do when workers can't be started here.

        Also where an environment asks for more CPUs, memory or GPUs than there are.
        """

    async def aclose(self) -> None:
        """Let go of clients and threads; workers that cannot outlive the gateway are stopped."""

"""The interface of backends, which start and stop workers.

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
    """Starts and stops workers. Implementations run blocking clients in threads."""

    async def start(self, worker: Worker, environment: Environment, lease: LeaderLease | None = None) -> str:
        """Start *worker* and return its address; the worker need not be ready yet.

        If the start fails or is cancelled, nothing of it remains.

        Args:
            worker: The worker to start.
            environment: The worker's environment.
            lease: The requesting leader's lease. It is checked immediately before each request to the engine that
                creates or starts something.

        Raises:
            NotLeading: The lease ended.
            StartFailed: The engine refused, or the worker died immediately.
            BackendError: The engine does not answer, which says nothing about the environment.
        """

    async def stop(self, id: WorkerId) -> None:
        """Stop and remove a worker with everything that belongs to it; an unknown id is not an error.

        Raises:
            BackendError: The engine does not answer, and the worker may still exist.
        """

    async def logs(self, id: WorkerId, *, lines: int = 20) -> str:
        """Return the last *lines* of a worker's output; return "" if there is no output."""

    async def found(self) -> list[BackendWorker]:
        """List the workers of this gateway's instance that the engine knows, running or dead."""

    async def pause(self, id: WorkerId, lease: LeaderLease | None = None) -> None:
        """Freeze an idle worker, which keeps its memory and gets no CPU.

        Args:
            id: The worker to freeze.
            lease: The requesting leader's lease, checked immediately before the request to the engine.

        Raises:
            NotLeading: The lease ended.
            BackendError: There is no such worker, or it can't be frozen.
        """

    async def resume(self, id: WorkerId) -> None:
        """Resume a paused worker; a running worker is not an error. Raises ``BackendError``."""

    async def prepare(self, environment: Environment) -> str:
        """Provide what every start of *environment* needs, above all its image, and return the image's id.

        Returns:
            The image's id (``sha256:…``), which changes when the image is built or pulled again; empty if there is no
                image.

        Raises:
            StartFailed: There is no such image, and it can't be obtained.
            BackendError: The engine does not answer.
        """

    def deaths(self) -> AsyncIterator[Death]:
        """Follow the deaths of workers, whatever caused them. Some may be missed: `found` is authoritative."""

    def engines(self) -> int:
        """Return how many engines start workers independently now, each with its own concurrency; one by default."""
        return 1

    def leaving(self) -> frozenset[WorkerId]:
        """Return the workers that must get no more sessions because their machine drains.

        This reads only known state and queries no machine. Sessions in these workers continue. The set may contain ids
        that no longer exist. It is empty by default: the only machine is the gateway's own, which drains together with
        the gateway.
        """
        return frozenset()

    async def check(self) -> None:
        """Raise ``BackendError``, with a remedy, if workers can't be started here.

        This includes environments that request more CPUs, memory or GPUs than there are.
        """

    async def aclose(self) -> None:
        """Close clients and threads; stop workers that cannot outlive the gateway."""

"""Servers that third parties run (``[server] url``), beside the backend that starts all other workers.

The gateway neither starts nor stops such a server. A worker of such an environment is a note that the server is in use.
The store has these notes. A gateway that is restarted, or another replica, has no notes of its own and reads the
store's: otherwise its audit would treat the worker as lost, and end sessions that still run on that server.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Protocol

from gateway.backends.broadcast import DeathBroadcast
from gateway.core.addresses import Kind, parse_address
from gateway.core.environment import Environment
from gateway.core.errors import BackendError, StartFailed
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.leader_lease import LeaderLease
from gateway.core.ports.backend import Backend
from gateway.core.worker import BackendWorker, Death, EnvironmentLoad, Worker

logger = logging.getLogger(__name__)


class StoredLoads(Protocol):
    """The part of ``Store`` that knows the workers of all processes."""

    async def load(self) -> Mapping[EnvironmentName, EnvironmentLoad]:
        """Return what each environment has. Raises ``StoreUnavailable``."""


class RoutedBackend:
    """Notes which third-party servers are in use, and passes everything about other workers to another backend."""

    def __init__(
        self, default: Backend, environments: Collection[Environment], *, store: StoredLoads | None = None
    ) -> None:
        """Start nothing yet.

        Args:
            default: Starts the workers of environments without a URL; closed with this backend.
            environments: Say whether *default* is needed: without an environment of its own it may have no engine.
            store: Has the workers that other processes noted; None if there are no other processes.
        """
        self._default = default
        self._store = store
        self._needs_default = any(not environment.server.url for environment in environments)
        self._noted: dict[WorkerId, Worker] = {}
        self._silent = DeathBroadcast()
        """Announces no death: nothing reports the death of a third-party server."""
        self._closed = False

    async def start(self, worker: Worker, environment: Environment, lease: LeaderLease | None = None) -> str:
        """Start the worker, or note the server, whose URL is then the address; see ``Backend.start``.

        The server's upstream finds out whether the server answers.
        """
        url = environment.server.url
        if not url:
            return await self._default.start(worker, environment, lease)
        if self._closed:
            raise StartFailed("the backend is closed")
        try:
            parse_address(url)
        except ValueError as error:
            raise StartFailed(f"environment {environment.name}: {error}") from error
        self._noted[worker.id] = Worker(
            id=worker.id, environment=worker.environment, digest=worker.digest, slots=worker.slots, address=url
        )
        return url

    async def stop(self, id: WorkerId) -> None:
        """Stop the worker, or forget the note; see ``Backend.stop``."""
        if self._noted.pop(id, None) is None:
            await self._default.stop(id)

    async def logs(self, id: WorkerId, *, lines: int = 20) -> str:
        """See ``Backend.logs``; a third-party server's log is its owner's."""
        return "" if id in self._noted else await self._default.logs(id, lines=lines)

    async def found(self) -> list[BackendWorker]:
        """List the default backend's workers, and the servers that are noted here or in the store.

        A noted server counts as running: its upstream notices if it is not. The default backend is queried also if no
        environment needs it, for workers that a gateway with other environments left; then it need not answer.
        """
        stored = await stored_workers(self._store) if self._store is not None else []
        known = {worker.id: worker for worker in stored if is_static(worker.address)} | self._noted
        static = [as_running(worker) for worker in known.values()]
        try:
            return [*static, *await self._default.found()]
        except BackendError as error:
            if self._needs_default:
                raise
            logger.debug("backend_not_asked error=%s", error)
            return static

    async def pause(self, id: WorkerId, lease: LeaderLease | None = None) -> None:
        """See ``Backend.pause``; a third-party server is not frozen."""
        if id not in self._noted:
            await self._default.pause(id, lease)

    async def resume(self, id: WorkerId) -> None:
        """See ``Backend.resume``."""
        if id not in self._noted:
            await self._default.resume(id)

    async def prepare(self, environment: Environment) -> str:
        """See ``Backend.prepare``; a third-party server has no image."""
        return "" if environment.server.url else await self._default.prepare(environment)

    def deaths(self) -> AsyncIterator[Death]:
        """Follow the default backend's deaths, if an environment needs it."""
        return self._default.deaths() if self._needs_default else self._silent.follow()

    def engines(self) -> int:
        """See ``Backend.engines``."""
        return self._default.engines()

    def leaving(self) -> frozenset[WorkerId]:
        """See ``Backend.leaving``."""
        return self._default.leaving()

    async def check(self) -> None:
        """Check the default backend, if an environment needs it."""
        if self._needs_default:
            await self._default.check()

    async def aclose(self) -> None:
        """Close the default backend; third-party servers go on."""
        self._closed = True
        self._silent.close()
        await self._default.aclose()


def as_running(worker: Worker) -> BackendWorker:
    """Describe *worker*, which the store or this process has a note of, as one that runs."""
    return BackendWorker(
        id=worker.id, environment=worker.environment, digest=worker.digest, address=worker.address, running=True
    )


async def stored_workers(store: StoredLoads) -> list[Worker]:
    """Return the workers in *store*, of all environments and states. Raises ``StoreUnavailable``."""
    return [entry.worker for load in (await store.load()).values() for entry in load.workers]


def is_static(address: str) -> bool:
    """Return True if *address* is that of a third-party server."""
    try:
        return parse_address(address).kind is Kind.URL
    except ValueError:
        return False  # empty while a worker starts

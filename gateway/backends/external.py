"""Route environments with a third-party server (``[server] url``) past the backend that starts all other workers.

The gateway neither starts nor stops such a server. A worker of such an environment is a note that the server is in use.
The store keeps these notes. A restarted gateway, or another replica, has no notes in memory and reads the store's.
Without them its audit would treat the worker as lost, and end sessions that still run on that server.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Protocol

from gateway.core.addresses import Kind, parse_address
from gateway.core.broadcast import Broadcast
from gateway.core.environment import Environment
from gateway.core.errors import BackendError, StartFailed
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.leader_lease import LeaderLease
from gateway.core.ports.backend import Backend
from gateway.core.worker import BackendWorker, Death, EnvironmentLoad, Worker

logger = logging.getLogger(__name__)


class StoredLoads(Protocol):
    """The part of ``Store`` that returns the workers of all replicas."""

    async def load(self) -> Mapping[EnvironmentName, EnvironmentLoad]:
        """Return the workers and load of each environment. Raises ``StoreUnavailable``."""


class RoutedBackend:
    """Notes which third-party servers are in use, and forwards calls about other workers to the default backend."""

    def __init__(
        self, default: Backend, environments: Collection[Environment], *, store: StoredLoads | None = None
    ) -> None:
        """Create the backend without starting anything.

        Args:
            default: The backend of environments without a URL. Closing this backend closes it too.
            environments: All environments. If each has a URL, *default* is not needed and may have no engine.
            store: The store with the workers that other replicas noted; None without other replicas.
        """
        self._default = default
        self._store = store
        self._needs_default = any(not environment.server.url for environment in environments)
        self._noted: dict[WorkerId, Worker] = {}
        self._silent: Broadcast[Death] = Broadcast()
        """A broadcast without deaths: nothing reports the death of a third-party server."""
        self._closed = False

    async def start(self, worker: Worker, environment: Environment, lease: LeaderLease | None = None) -> str:
        """Start the worker, or note that the server is in use and return its URL; see ``Backend.start``.

        This method does not connect to the server: its upstream checks whether it answers.
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
        """Stop the worker, or remove the server's note; see ``Backend.stop``."""
        if self._noted.pop(id, None) is None:
            await self._default.stop(id)

    async def logs(self, id: WorkerId, *, lines: int = 20) -> str:
        """Return the worker's log, or an empty string for a third-party server; see ``Backend.logs``."""
        return "" if id in self._noted else await self._default.logs(id, lines=lines)

    async def found(self) -> list[BackendWorker]:
        """Return the default backend's workers, and the servers noted in this process or in the store.

        A noted server counts as running: its upstream notices if it is down. The default backend is queried even if
        no environment needs it, to find workers that a gateway with other environments left. Its failure is then
        ignored.
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
        """Pause the worker; do nothing for a third-party server. See ``Backend.pause``."""
        if id not in self._noted:
            await self._default.pause(id, lease)

    async def resume(self, id: WorkerId) -> None:
        """Resume the worker; do nothing for a third-party server. See ``Backend.resume``."""
        if id not in self._noted:
            await self._default.resume(id)

    async def prepare(self, environment: Environment) -> str:
        """Return the image's id, or an empty string for a third-party server; see ``Backend.prepare``."""
        return "" if environment.server.url else await self._default.prepare(environment)

    def deaths(self) -> AsyncIterator[Death]:
        """Yield the default backend's deaths; yield none if no environment needs that backend."""
        return self._default.deaths() if self._needs_default else self._silent.follow()

    def engines(self) -> int:
        """Return the number of the default backend's engines; see ``Backend.engines``."""
        return self._default.engines()

    def leaving(self) -> frozenset[WorkerId]:
        """Return the default backend's workers on draining machines; see ``Backend.leaving``."""
        return self._default.leaving()

    async def check(self) -> None:
        """Check the default backend, if an environment needs it."""
        if self._needs_default:
            await self._default.check()

    async def aclose(self) -> None:
        """Close the default backend; third-party servers keep running."""
        self._closed = True
        self._silent.close()
        await self._default.aclose()


def as_running(worker: Worker) -> BackendWorker:
    """Return *worker*, a note in the store or in this process, as a running worker."""
    return BackendWorker(
        id=worker.id, environment=worker.environment, digest=worker.digest, address=worker.address, running=True
    )


async def stored_workers(store: StoredLoads) -> list[Worker]:
    """Return the workers of all environments and states in *store*. Raises ``StoreUnavailable``."""
    return [entry.worker for load in (await store.load()).values() for entry in load.workers]


def is_static(address: str) -> bool:
    """Return True if *address* is that of a third-party server."""
    try:
        return parse_address(address).kind is Kind.URL
    except ValueError:
        return False  # a starting worker's address is empty

"""Servers that somebody else runs (``[server] url``): nothing is started and nothing stopped.

A worker of such an environment is a note that the server is used. The store has it; a gateway that is started again,
or another replica, has none of its own, and asks the store: else its audit would take the worker for lost, and end
sessions that go on over there.

Two backends as one: servers that somebody else runs, and the one that starts all other workers.
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
        ...


class ExternalBackend:
    """Notes which servers are used."""

    def __init__(self, store: StoredLoads | None = None) -> None:
        """*store* has the workers that other processes noted; None: there are no other processes."""
        self._store = store
        self._noted: dict[WorkerId, Worker] = {}
        self._deaths = DeathBroadcast()
        self._closed = False

    def has(self, id: WorkerId) -> bool:
        """Whether worker *id* was noted here."""
        return id in self._noted

    async def start(self, worker: Worker, environment: Environment, lease: LeaderLease | None = None) -> str:
        """Note the server; its URL is the address. Whether it answers is its upstream's to say."""
        if self._closed:
            raise StartFailed("the backend is closed")
        url = environment.server.url
        try:
            parse_address(url)
        except ValueError as error:
            raise StartFailed(f"environment {environment.name}: {error}") from error
        self._noted[worker.id] = Worker(
            id=worker.id, environment=worker.environment, digest=worker.digest, slots=worker.slots, address=url
        )
        return url

    async def stop(self, id: WorkerId) -> None:
        """Forget it."""
        self._noted.pop(id, None)

    async def logs(self, id: WorkerId, *, lines: int = 20) -> str:
        """Its log is its owner's."""
        return ""

    async def found(self) -> list[BackendWorker]:
        """List those that were noted here or are known to the store.

        All count as running: whether a server that somebody else runs is there is seen by using it.
        """
        stored = await stored_workers(self._store) if self._store is not None else []
        known = {worker.id: worker for worker in stored if is_static(worker.address)}
        return [
            BackendWorker(
                id=worker.id,
                environment=worker.environment,
                digest=worker.digest,
                address=worker.address,
                running=True,
            )
            for worker in (known | self._noted).values()
        ]

    async def pause(self, id: WorkerId, lease: LeaderLease | None = None) -> None:
        """It is not ours to freeze: nothing happens."""

    async def resume(self, id: WorkerId) -> None:
        """It was never paused."""

    async def prepare(self, environment: Environment) -> str:
        """There is nothing to prepare, and no image."""
        return ""

    def deaths(self) -> AsyncIterator[Death]:
        """Nobody tells of any."""
        return self._deaths.follow()

    def engines(self) -> int:
        """One."""
        return 1

    def leaving(self) -> frozenset[WorkerId]:
        """None: their machines are nobody's business here."""
        return frozenset()

    async def check(self) -> None:
        """There is nothing that could be missing here."""

    async def aclose(self) -> None:
        """Let go; the servers go on."""
        self._closed = True
        self._deaths.close()


async def stored_workers(store: StoredLoads) -> list[Worker]:
    """The workers that *store* has, of whatever environment and state. Raises ``StoreUnavailable``."""
    return [entry.worker for load in (await store.load()).values() for entry in load.workers]


def is_static(address: str) -> bool:
    """Whether *address* is that of a server that somebody else runs."""
    try:
        return parse_address(address).kind is Kind.URL
    except ValueError:
        return False  # empty while a worker starts


class RoutedBackend:
    """Sends each environment, and each worker, to the backend that is its."""

    def __init__(self, default: Backend, static: ExternalBackend, environments: Collection[Environment]) -> None:
        """*environments* says whether *default* is needed: a gateway with none of its own has no engine to ask."""
        self._default = default
        self._static = static
        self._needs_default = any(not environment.server.url for environment in environments)

    async def start(self, worker: Worker, environment: Environment, lease: LeaderLease | None = None) -> str:
        """See ``Backend.start``."""
        if environment.server.url:
            return await self._static.start(worker, environment, lease)
        return await self._default.start(worker, environment, lease)

    async def stop(self, id: WorkerId) -> None:
        """See ``Backend.stop``; a worker that another process noted is unknown to both, which is no error."""
        if self._static.has(id):
            await self._static.stop(id)
        else:
            await self._default.stop(id)

    async def logs(self, id: WorkerId, *, lines: int = 20) -> str:
        """See ``Backend.logs``."""
        backend: Backend = self._static if self._static.has(id) else self._default
        return await backend.logs(id, lines=lines)

    async def found(self) -> list[BackendWorker]:
        """List the workers of both.

        Where no environment needs it, the default backend is asked still, for what a gateway with other environments
        left there; but it need not answer.
        """
        static = await self._static.found()
        try:
            return [*static, *await self._default.found()]
        except BackendError as error:
            if self._needs_default:
                raise
            logger.debug("backend_not_asked error=%s", error)
            return static

    async def pause(self, id: WorkerId, lease: LeaderLease | None = None) -> None:
        """See ``Backend.pause``."""
        if not self._static.has(id):
            await self._default.pause(id, lease)

    async def resume(self, id: WorkerId) -> None:
        """See ``Backend.resume``."""
        if not self._static.has(id):
            await self._default.resume(id)

    async def prepare(self, environment: Environment) -> str:
        """See ``Backend.prepare``."""
        backend: Backend = self._static if environment.server.url else self._default
        return await backend.prepare(environment)

    def deaths(self) -> AsyncIterator[Death]:
        """Follow the default backend's, as nobody tells of a static server's."""
        return self._default.deaths() if self._needs_default else self._static.deaths()

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
        """Close both."""
        try:
            await self._static.aclose()
        finally:
            await self._default.aclose()

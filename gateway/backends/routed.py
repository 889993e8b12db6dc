"""Two backends as one: servers that somebody else runs, and the one that starts all other workers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection

from gateway.backends.external import StaticBackend
from gateway.core.environment import Environment
from gateway.core.errors import BackendError
from gateway.core.ids import WorkerId
from gateway.core.leader_lease import LeaderLease
from gateway.core.ports.backend import Backend
from gateway.core.worker import Death, Found, Worker

logger = logging.getLogger(__name__)


class RoutedBackend:
    """Sends each environment, and each worker, to the backend that is its."""

    def __init__(self, default: Backend, static: StaticBackend, environments: Collection[Environment]) -> None:
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

    async def found(self) -> list[Found]:
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
        await self._default.pause(id, lease)  # a server that somebody else runs is never paused (`environment_files`)

    async def resume(self, id: WorkerId) -> None:
        """See ``Backend.resume``."""
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

"""Queries suspect workers until they answer again, and replaces silent ones. Part of the control loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Final

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment, UpstreamKind
from gateway.core.errors import StoreUnavailable
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.ports.store import WorkerStore
from gateway.core.ports.upstream import WorkerUpstream
from gateway.core.worker import EnvironmentLoad, Worker, WorkerState
from gateway.pool.background import BackgroundTasks
from gateway.sessions.liveness import answers

logger = logging.getLogger(__name__)

REPLACED_S: Final = 15.0
"""Seconds after which a suspect worker without sessions is replaced."""


class SuspectWorkers:
    """Queries suspect workers for `gateway.pool.loop.ControlLoop`. A worker that answers takes sessions again."""

    def __init__(
        self,
        *,
        store: WorkerStore,
        upstreams: Mapping[UpstreamKind, WorkerUpstream],
        catalog: Catalog,
        tasks: BackgroundTasks,
    ) -> None:
        self._store = store
        self._upstreams = upstreams
        self._catalog = catalog
        self._tasks = tasks
        self._since: dict[WorkerId, float] = {}
        self._asking: set[WorkerId] = set()

    async def turn(self, loads: Mapping[EnvironmentName, EnvironmentLoad], fence: int) -> None:
        """Query each suspect worker in the background. Drain workers without sessions that were silent for too long.

        Raises:
            NotLeading, StoreUnavailable: The turn is incomplete, and the next turn continues.
        """
        now = time.monotonic()
        suspects = {
            entry.worker.id: entry
            for load in loads.values()
            for entry in load.workers
            if entry.worker.state is WorkerState.SUSPECT
        }
        self._since = {id: self._since.get(id, now) for id in suspects}
        for id, entry in suspects.items():
            environment = self._catalog.known.get(entry.worker.environment)
            if environment is None:
                continue  # its environment left the catalog, so the worker is being stopped
            # An external server is not replaced, because there is no other server.
            is_over = now - self._since[id] > REPLACED_S and entry.used == 0 and not environment.server.url
            if is_over and await self._store.drain_worker(id, only_if_idle=True, fence=fence):
                logger.warning("worker_given_up environment=%s worker=%s", environment.name, id)
                self._tasks.wake()
            elif id not in self._asking:
                self._asking.add(id)
                self._tasks.spawn(self._ask(entry.worker, environment))

    async def _ask(self, worker: Worker, environment: Environment) -> None:
        try:
            if await answers(worker, environment, self._upstreams[environment.wire]):
                await self._store.wake_worker(worker.id)
                logger.info("worker_answers environment=%s worker=%s", environment.name, worker.id)
        except StoreUnavailable as error:
            logger.warning("store_unavailable during=wake error=%s", error)  # the next turn queries the worker again
        finally:
            self._asking.discard(worker.id)

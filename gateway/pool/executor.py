"""Carries out plans: starts, stops, pauses, wakes and drains workers. Only the replica that leads does."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Container, Mapping
from typing import Final

from gateway.catalog.catalog import Catalog
from gateway.catalog.reload import CatalogReload
from gateway.core.environment import Environment
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.ports.backend import Backend
from gateway.core.ports.store import WorkerStore
from gateway.core.scaling import Plan
from gateway.core.worker import EnvironmentLoad, Worker, WorkerState
from gateway.pool.background import BackgroundTasks
from gateway.pool.pausing import Pausing
from gateway.pool.recovery import static_worker
from gateway.pool.starts import WorkerStarts
from gateway.pool.stops import WorkerStops

logger = logging.getLogger(__name__)

COMES_S: Final = 3.0
"""How long a container may still come to be that a leader asked the engine for before it died: an engine that is busy
lets requests wait."""


class PlanExecutor:
    """Changes workers as planned; what takes longer than a turn goes on behind."""

    def __init__(
        self,
        *,
        store: WorkerStore,
        backend: Backend,
        catalog: Catalog,
        starts: WorkerStarts,
        stops: WorkerStops,
        pausing: Pausing,
        reload: CatalogReload,
        tasks: BackgroundTasks,
    ) -> None:
        """*reload* says whether an environment's present image is known: until then outdated workers stay."""
        self._store = store
        self._backend = backend
        self._catalog = catalog
        self.starts = starts
        self.stops = stops
        self._pausing = pausing
        self._reload = reload
        self._tasks = tasks

    async def apply(
        self, environment: Environment, load: EnvironmentLoad, wanted: Plan, own: Container[WorkerId], fence: int
    ) -> None:
        """Do what is *wanted* of one environment.

        Args:
            own: The workers that this replica was starting before *load* was read.
            fence: Of this replica's lead.

        Raises:
            NotLeading, StoreUnavailable: the next turn of the leader goes on.
        """
        name = environment.name
        for id in wanted.drain if self._reload.is_settled(name) else ():
            logger.info("worker_outdated environment=%s worker=%s", name, id)
            await self._store.drain_worker(id, fence=fence)
            self._tasks.wake()
        for id in wanted.retire:
            if await self._store.drain_worker(id, only_if_idle=True, fence=fence):
                self._tasks.wake()
        for id in wanted.pause:
            await self._pausing.pause_soon(id, name, fence=fence)
        for id in wanted.wake:
            self._pausing.wake_soon(id, name)
        for id in wanted.stop:
            self._stop_soon(id, name, "idle")
        await self._end_abandoned(load, name, own, fence)
        is_tried = not wanted.start and self.starts.wants_trial(name, load)
        if (wanted.start or is_tried) and not self.starts.is_put_off(name) and self._reload.may_start(name):
            for _ in range(wanted.start or 1):
                await self._begin_start(environment)

    async def drain_leaving(self, loads: Mapping[EnvironmentName, EnvironmentLoad], fence: int) -> None:
        """Give workers whose machine drains no more sessions; others take their place at the next turn.

        Raises:
            NotLeading, StoreUnavailable: the next turn of the leader goes on.
        """
        leaving = self._backend.leaving()
        for name, load in loads.items() if leaving else ():
            for entry in load.workers:
                id = entry.worker.id
                if id in leaving and entry.worker.state not in (WorkerState.STARTING, WorkerState.DRAINING):
                    logger.info("worker_leaving environment=%s worker=%s", name, id)
                    await self._store.drain_worker(id, fence=fence)
                    self._tasks.wake()

    def drop_strangers(self, loads: Mapping[EnvironmentName, EnvironmentLoad]) -> None:
        """Stop the workers of environments that the catalog does not have any more."""
        for name, load in loads.items():
            if self._catalog.known.get(name) is None:
                for entry in load.workers:
                    self._stop_soon(entry.worker.id, name, "no longer on offer")

    async def _end_abandoned(
        self, load: EnvironmentLoad, name: EnvironmentName, own: Container[WorkerId], fence: int
    ) -> None:
        """End what a leader began that is gone: nobody waits for its readiness."""
        for entry in load.workers:
            id = entry.worker.id
            if entry.worker.state is WorkerState.STARTING and id not in own and id not in self.stops:
                since = await self._store.worker(id)
                if since is not None and since.state is not WorkerState.STARTING:
                    continue  # who led before lives, and has made it ready since the look: it may serve sessions
                # The store first, which refuses one that does not lead any more: it may be the new leader's. It keeps
                # the worker's place until that is gone: its container may be there already, or still come.
                if await self._store.drain_worker(id, only_if_idle=True, fence=fence):
                    self.stops.stop_soon(id, name, "start abandoned", again_after_s=COMES_S)

    async def _begin_start(self, environment: Environment) -> None:
        worker = Worker(
            id=WorkerId(secrets.token_hex(8)),
            environment=environment.name,
            digest=environment.digest(),
            slots=environment.pool.slots,
            max_uses=environment.pool.max_uses,
        )
        if environment.server.url:
            worker = static_worker(environment)
        await self.starts.begin(worker)
        self._tasks.spawn(self.starts.run(worker, environment))

    def _stop_soon(self, id: WorkerId, name: EnvironmentName, reason: str) -> None:
        if id in self.starts:
            self.starts.give_up(id)
        else:
            self.stops.stop_soon(id, name, reason)

"""Carries out plans in the leader: starts, stops, pauses, wakes and drains workers."""

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
"""Seconds in which a busy engine may still create a container that a leader requested before the leader's death."""


class PlanExecutor:
    """Changes workers as planned. Work that takes longer than a turn continues in the background."""

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
        """*reload*: reports whether an environment's current image is known. Until then its outdated workers stay."""
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
        """Carry out the plan *wanted* for one environment.

        Args:
            own: The workers that this replica was starting before *load* was read.
            fence: The fence of this replica's lead.

        Raises:
            NotLeading, StoreUnavailable: The plan is incomplete, and the leader's next turn continues.
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
        """Drain workers whose machine drains. The next turn starts workers in their place.

        Raises:
            NotLeading, StoreUnavailable: The work is incomplete, and the leader's next turn continues.
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
        """Stop the workers of environments that left the catalog."""
        for name, load in loads.items():
            if self._catalog.known.get(name) is None:
                for entry in load.workers:
                    self._stop_soon(entry.worker.id, name, "no longer available")

    async def _end_abandoned(
        self, load: EnvironmentLoad, name: EnvironmentName, own: Container[WorkerId], fence: int
    ) -> None:
        """Stop workers whose start a previous leader abandoned: no replica waits for their readiness."""
        for entry in load.workers:
            id = entry.worker.id
            if entry.worker.state is WorkerState.STARTING and id not in own and id not in self.stops:
                since = await self._store.worker(id)
                if since is not None and since.state is not WorkerState.STARTING:
                    continue  # the previous leader is alive and has just made the worker ready: it may serve sessions
                # The store first: it refuses a former leader, whose load may list the new leader's workers. The drained
                # worker keeps its place in the pool until it is gone: its container may exist, or still be created.
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

"""Runs the control loop, the only code that starts or stops a worker.

It runs in every replica and acts in the leader. It never answers a trainer: the store grants slots to waiting openings
when a worker becomes ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Container
from typing import Final

import anyio

from gateway.core.errors import GatewayError, NotLeading, StoreUnavailable
from gateway.core.ids import EnvironmentName
from gateway.core.ports.backend import Backend
from gateway.core.ports.store import Store
from gateway.core.scaling import rest_s
from gateway.core.session import CapacityWanted
from gateway.core.worker import Death
from gateway.pool.background import BackgroundTasks
from gateway.pool.executor import PlanExecutor
from gateway.pool.expiry import Expiry
from gateway.pool.leadership import Leadership
from gateway.pool.planner import Planner
from gateway.pool.suspects import SuspectWorkers

logger = logging.getLogger(__name__)

TICK_S: Final = 0.5
"""Maximum seconds between two turns. Waiting openings wake the loop earlier."""
END_S: Final = 30.0
"""Maximum seconds that the shutdown waits for running tasks. Undoing a start includes stopping its worker."""


class ControlLoop:
    """Adapts each environment's workers to its policy and to waiting and expected openings."""

    def __init__(
        self,
        *,
        store: Store,
        backend: Backend,
        leadership: Leadership,
        planner: Planner,
        executor: PlanExecutor,
        expiry: Expiry,
        suspects: SuspectWorkers,
        tasks: BackgroundTasks,
    ) -> None:
        self._store = store
        self._backend = backend
        self._leadership = leadership
        self._planner = planner
        self._executor = executor
        self._starts = executor.starts
        self._stops = executor.stops
        self._expiry = expiry
        self._suspects = suspects
        self._tasks = tasks

    async def run(self) -> None:
        """Decide and act until cancelled; then end all tasks and give up the lead."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._turn_for_ever)
                group.start_soon(self._follow_notices)
                group.start_soon(self._follow_deaths)
        finally:
            with anyio.CancelScope(shield=True):
                await self.aclose()
                await self._leadership.resign()

    async def aclose(self) -> None:
        """End all background tasks and undo unfinished starts. Also for a pool whose `run` was never called."""
        self._starts.end()
        await self._tasks.aclose(END_S)

    async def tick(self) -> bool:
        """Run one turn: expire sessions, start and stop workers. Return False if another replica leads."""
        if not await self._leadership.renew() or not self._leadership.fence:
            self._planner.rest()
            return bool(self._leadership.fence)
        await self._expiry.turn()
        own = self._starts.ids()  # before the load: a start that ends in between is still STARTING in `loads`
        loads = await self._store.load()
        self._planner.look(loads)
        fence = self._leadership.fence
        await self._executor.drain_leaving(loads, fence)
        await self._suspects.turn(loads, fence)
        self._stops.grow()
        for environment, load, wanted in self._planner.plans(loads):
            await self._executor.apply(environment, load, wanted, own, fence)
        self._executor.drop_strangers(loads)
        return True

    async def stop_all(self, *, spare: Container[EnvironmentName] = ()) -> None:
        """Stop all workers except those of the environments *spare*, whose workers can outlive this gateway."""
        for name, load in (await self._store.load()).items():
            for entry in load.workers if name not in spare else ():
                await self._stops.stop_now(entry.worker.id, name)

    async def _turn_for_ever(self) -> None:
        while True:
            self._tasks.begin_turn()
            try:
                await self.tick()
            except StoreUnavailable as error:
                logger.warning("store_unavailable during=tick error=%s", error)
                self._leadership.store_lost()
            except NotLeading:
                logger.warning("lead_lost replica=%s", self._leadership.replica)
            except Exception:  # protects all environments: without this loop no worker starts and no session expires
                logger.exception("tick_failed")
            await asyncio.sleep(rest_s(self._planner.workers))
            await self._tasks.woken(TICK_S)

    async def _follow_notices(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailable):
                async for notice in self._store.notices():
                    if isinstance(notice, CapacityWanted):
                        self._tasks.wake()
            await asyncio.sleep(TICK_S)

    async def _follow_deaths(self) -> None:
        while True:
            try:
                async for death in self._backend.deaths():
                    self._tasks.spawn(self._on_death(death))
            except GatewayError as error:
                logger.warning("deaths_not_followed error=%s", error)
            await asyncio.sleep(TICK_S)

    async def _on_death(self, death: Death) -> None:
        if death.id in self._starts:
            self._starts.died(death)
            return
        try:
            await self._stops.lost(death.id, death.reason, death.detail)
        except GatewayError as error:
            logger.warning("worker_loss_not_handled worker=%s error=%s", death.id, error)  # the next audit handles it

"""Pauses idle workers and wakes them when openings need them. Part of the control loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from gateway.core.errors import BackendError, GatewayError, StoreUnavailable
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.leader_lease import LeaderLease
from gateway.core.ports.backend import Backend
from gateway.core.ports.store import WorkerStore
from gateway.pool.background import BackgroundTasks

logger = logging.getLogger(__name__)

AGAIN_S: Final = 0.5
"""Seconds between two tries to wake a worker that the backend did not resume."""


class Pausing:
    """Pauses and wakes workers in the background for `gateway.pool.loop.ControlLoop`."""

    def __init__(self, *, store: WorkerStore, backend: Backend, lease: LeaderLease, tasks: BackgroundTasks) -> None:
        self._store = store
        self._backend = backend
        self._lease = lease
        self._tasks = tasks
        self._changing: set[WorkerId] = set()
        """Workers with a pause or wake under way. A worker is woken only after its pause is complete."""

    async def pause_soon(self, id: WorkerId, name: EnvironmentName, *, fence: int) -> None:
        """Pause a worker in the background if it is still idle. Raises ``NotLeading``, ``StoreUnavailable``."""
        if id not in self._changing and await self._store.pause_worker(id, fence=fence):
            self._changing.add(id)
            self._tasks.spawn(self._pause(id, name))

    def wake_soon(self, id: WorkerId, name: EnvironmentName) -> None:
        """Wake a paused worker in the background, unless its pause or wake is under way."""
        if id not in self._changing:
            self._changing.add(id)
            self._tasks.spawn(self._wake(id, name))

    async def _pause(self, id: WorkerId, name: EnvironmentName) -> None:
        try:
            await self._backend.pause(id, self._lease)
            logger.info("worker_paused environment=%s worker=%s", name, id)
        except GatewayError as error:
            logger.warning("worker_not_paused environment=%s worker=%s error=%s", name, id, error)
            # The backend may have paused it despite the error. If it can't be resumed now, it stays PAUSED in the store
            # until an opening needs it.
            with contextlib.suppress(GatewayError):
                await self._backend.resume(id)
                await self._store.wake_worker(id)
        finally:
            self._changing.discard(id)
            self._tasks.wake()  # an opening may need it by now

    async def _wake(self, id: WorkerId, name: EnvironmentName) -> None:
        try:
            await self._backend.resume(id)
            await self._store.wake_worker(id)
            logger.info("worker_woken environment=%s worker=%s", name, id)
        except BackendError as error:
            # The next turn retries while the worker is needed. An engine event or the audit reports a dead worker.
            logger.warning("worker_not_woken environment=%s worker=%s error=%s", name, id, error)
            await asyncio.sleep(AGAIN_S)
        except StoreUnavailable as error:
            logger.warning("store_unavailable during=wake error=%s", error)  # the next turn wakes it again
        finally:
            self._changing.discard(id)

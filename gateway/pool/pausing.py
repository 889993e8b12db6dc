"""Pauses idle workers and wakes them when they are wanted; part of the control loop."""

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
"""Before a worker is woken again that the backend did not resume."""


class Pausing:
    """Workers that are being paused or woken, for `gateway.pool.loop.ControlLoop`."""

    def __init__(self, *, store: WorkerStore, backend: Backend, lease: LeaderLease, tasks: BackgroundTasks) -> None:
        self._store = store
        self._backend = backend
        self._lease = lease
        self._tasks = tasks
        self._changing: set[WorkerId] = set()
        """One that is wanted is woken when it is paused, not in the middle."""

    async def pause_soon(self, id: WorkerId, name: EnvironmentName, *, fence: int) -> None:
        """Pause a worker that is idle still, behind the caller. Raises ``NotLeading``, ``StoreUnavailable``."""
        if id not in self._changing and await self._store.pause_worker(id, fence=fence):
            self._changing.add(id)
            self._tasks.spawn(self._pause(id, name))

    def wake_soon(self, id: WorkerId, name: EnvironmentName) -> None:
        """Wake a paused worker behind the caller, unless that is under way."""
        if id not in self._changing:
            self._changing.add(id)
            self._tasks.spawn(self._wake(id, name))

    async def _pause(self, id: WorkerId, name: EnvironmentName) -> None:
        try:
            await self._backend.pause(id, self._lease)
            logger.info("worker_paused environment=%s worker=%s", name, id)
        except GatewayError as error:
            logger.warning("worker_not_paused environment=%s worker=%s error=%s", name, id, error)
            # It may be paused all the same. One that can't be resumed now stays paused to the store until it is wanted.
            with contextlib.suppress(GatewayError):
                await self._backend.resume(id)
                await self._store.wake_worker(id)
        finally:
            self._changing.discard(id)
            self._tasks.wake()  # it may be wanted by now

    async def _wake(self, id: WorkerId, name: EnvironmentName) -> None:
        try:
            await self._backend.resume(id)
            await self._store.wake_worker(id)
            logger.info("worker_woken environment=%s worker=%s", name, id)
        except BackendError as error:
            # Tried again while it is wanted; that it is dead would be told, or found by the audit.
            logger.warning("worker_not_woken environment=%s worker=%s error=%s", name, id, error)
            await asyncio.sleep(AGAIN_S)
        except StoreUnavailable as error:
            logger.warning("store_unavailable during=wake error=%s", error)  # it is woken again at the next turn
        finally:
            self._changing.discard(id)

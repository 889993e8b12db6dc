"""Stops workers for the control loop, and handles lost workers with their sessions.

After a worker's death the store is updated first: a call that fails with the worker reads the reason there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from gateway.catalog.catalog import Catalog
from gateway.core.errors import GatewayError, UnknownEnvironment
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.ports.backend import Backend
from gateway.core.ports.store import WorkerStore
from gateway.core.ports.transport import Transport
from gateway.core.session import CloseReason, Session
from gateway.core.worker import WorkerState
from gateway.metrics import Metrics
from gateway.pool.background import BackgroundTasks
from gateway.pool.starts import LOG_LINES
from gateway.sessions.closing import SessionCloser

logger = logging.getLogger(__name__)

AT_ONCE: Final = 16
"""Maximum concurrent stops per engine. Each makes several engine requests: more stops would only fill its queue."""


class WorkerStops:
    """Stops workers and handles dead workers for `gateway.pool.loop.ControlLoop`."""

    def __init__(
        self,
        *,
        store: WorkerStore,
        backend: Backend,
        transport: Transport,
        catalog: Catalog,
        metrics: Metrics,
        closer: SessionCloser,
        tasks: BackgroundTasks,
    ) -> None:
        self._store = store
        self._backend = backend
        self._transport = transport
        self._catalog = catalog
        self._metrics = metrics
        self._closer = closer
        self._tasks = tasks
        self._stopping: set[WorkerId] = set()
        self._losing: set[WorkerId] = set()
        """Workers whose loss is being handled. An engine event and an audit may report the same loss."""
        self._at_engine = asyncio.Semaphore(AT_ONCE)
        self._engines = 1

    def __contains__(self, id: object) -> bool:
        """Return True if worker *id* is being stopped."""
        return id in self._stopping

    def ids(self) -> frozenset[WorkerId]:
        """Return the workers that are being stopped."""
        return frozenset(self._stopping)

    def grow(self) -> None:
        """Allow more concurrent stops for each new engine. The limit stays when an engine leaves."""
        for _ in range(self._engines, self._backend.engines()):
            self._engines += 1
            for _ in range(AT_ONCE):
                self._at_engine.release()

    def stop_soon(self, id: WorkerId, name: EnvironmentName, reason: str, *, again_after_s: float = 0.0) -> None:
        """Stop a worker in the background, unless its stop is already under way.

        Args:
            reason: The reason for the log.
            again_after_s: Seconds until a second stop, because the engine may still create the worker's container, and
                no event excludes that. The worker keeps its place in the pool until then. 0 stops it once.
        """
        if id not in self._stopping:
            self._stopping.add(id)
            self._tasks.spawn(self._stop(id, name, reason, again_after_s))

    async def stop_now(self, id: WorkerId, name: EnvironmentName) -> None:
        """Stop a worker at the gateway's shutdown and ignore backend errors. Raises ``StoreUnavailable``."""
        logger.info("worker_stopped environment=%s worker=%s reason=shutdown", name, id)
        with contextlib.suppress(GatewayError):
            await self._backend.stop(id)
        await self._forget(id, CloseReason.SHUTDOWN)

    async def _stop(self, id: WorkerId, name: EnvironmentName, reason: str, again_after_s: float) -> None:
        try:
            async with self._at_engine:
                await self._backend.stop(id)
            if again_after_s:
                await asyncio.sleep(again_after_s)
                async with self._at_engine:
                    await self._backend.stop(id)
            await self._forget(id, CloseReason.WORKER_LOST)
            logger.info("worker_stopped environment=%s worker=%s reason=%s", name, id, reason)
            self._tasks.wake()  # an environment may need its place in the pool
        except GatewayError as error:
            logger.warning("worker_not_stopped environment=%s worker=%s error=%s", name, id, error)
        finally:
            self._stopping.discard(id)

    async def lost(self, id: WorkerId, reason: CloseReason = CloseReason.WORKER_LOST, detail: str = "") -> None:
        """Handle a lost worker: end its sessions with *reason*, cancel its calls, and remove its container.

        The replica that starts a worker handles its death during the start, as a failed start.

        Raises:
            StoreUnavailable, BackendError: The handling is incomplete, and the next audit continues.
        """
        if id in self._losing or id in self._stopping:
            return
        self._losing.add(id)
        try:
            await self._lose(id, reason, detail)
        finally:
            self._losing.discard(id)

    async def _lose(self, id: WorkerId, reason: CloseReason, detail: str) -> None:
        worker = await self._store.worker(id)
        if worker is None:
            self._transport.forget(id)  # another replica handled it; this cancels this replica's calls to the worker
            return
        if worker.state is WorkerState.STARTING:
            return  # the replica that starts it stops it and counts the failure, or after its death the new leader does
        tail = ""
        sessions = await self._forget(id, reason)
        if sessions is None:
            return  # another replica has just removed it: that replica logs the loss and removes the container
        if worker.state is WorkerState.DRAINING and not sessions:
            async with self._at_engine:
                # Nothing is lost: the leader is about to stop this worker, or is stopping it.
                await self._backend.stop(id)
            return
        with contextlib.suppress(GatewayError):
            async with self._at_engine:
                tail = (await self._backend.logs(id, lines=LOG_LINES)).strip()
        self._metrics.worker_lost(worker.environment, reason.value)
        for session in sessions:
            with contextlib.suppress(UnknownEnvironment):  # it was removed while the session ran
                self._closer.count_lost(session, self._catalog.named(session.environment))
        logger.error(
            "worker_lost environment=%s worker=%s reason=%s detail=%s sessions=%s log=%r",
            worker.environment,
            id,
            reason.value,
            detail,
            len(sessions),
            tail,
        )
        async with self._at_engine:
            await self._backend.stop(id)
        self._tasks.wake()  # an environment may need its place in the pool

    async def _forget(self, id: WorkerId, reason: CloseReason) -> list[Session] | None:
        sessions = await self._store.remove_worker(id, reason)
        self._transport.forget(id)
        return sessions

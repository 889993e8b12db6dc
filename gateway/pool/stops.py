"""How workers end: stopped by the control loop, or lost, with what they held.

Of one that died the store hears first: a call that breaks off asks it why, and must find the reason there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from gateway.core.errors import GatewayError
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.outcomes import outcome_of
from gateway.core.ports.backend import Backend
from gateway.core.ports.store import WorkerStore
from gateway.core.ports.transport import Transport
from gateway.core.session import CloseReason, Session
from gateway.core.worker import WorkerState
from gateway.metrics import Metrics
from gateway.pool.background import BackgroundTasks
from gateway.pool.starts import LOG_LINES

logger = logging.getLogger(__name__)

AT_ONCE: Final = 16
"""Stops of one engine. Each is several calls of it: where hundreds end at once more would only fill its queue."""


class WorkerStops:
    """Stops workers, and sees to those that died, for `gateway.pool.loop.ControlLoop`."""

    def __init__(
        self,
        *,
        store: WorkerStore,
        backend: Backend,
        transport: Transport,
        metrics: Metrics,
        tasks: BackgroundTasks,
    ) -> None:
        self._store = store
        self._backend = backend
        self._transport = transport
        self._metrics = metrics
        self._tasks = tasks
        self._stopping: set[WorkerId] = set()
        self._losing: set[WorkerId] = set()
        """Workers whose loss is being handled: the engine tells of one, and an audit finds it out too."""
        self._at_engine = asyncio.Semaphore(AT_ONCE)
        self._engines = 1

    def __contains__(self, id: object) -> bool:
        """Whether a worker is being stopped."""
        return id in self._stopping

    def ids(self) -> frozenset[WorkerId]:
        """Those that are being stopped."""
        return frozenset(self._stopping)

    def grow(self) -> None:
        """Let as many be stopped at once as there are engines for; those of one that went may queue."""
        for _ in range(self._engines, self._backend.engines()):
            self._engines += 1
            for _ in range(AT_ONCE):
                self._at_engine.release()

    def stop_soon(self, id: WorkerId, name: EnvironmentName, reason: str, *, again_after_s: float = 0.0) -> None:
        """Stop a worker behind the caller, unless that is under way.

        Args:
            reason: For the log.
            again_after_s: Seconds after which it is stopped once more, as its container may come only now: no event
                says that none will. The worker keeps its place until then. 0: it is stopped once.
        """
        if id not in self._stopping:
            self._stopping.add(id)
            self._tasks.spawn(self._stop(id, name, reason, again_after_s))

    async def stop_now(self, id: WorkerId, name: EnvironmentName) -> None:
        """Stop a worker as the gateway ends, whatever the backend says. Raises ``StoreUnavailable``."""
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
            self._tasks.wake()  # its place may be wanted
        except GatewayError as error:
            logger.warning("worker_not_stopped environment=%s worker=%s error=%s", name, id, error)
        finally:
            self._stopping.discard(id)

    async def lost(self, id: WorkerId, reason: CloseReason = CloseReason.WORKER_LOST, detail: str = "") -> None:
        """A worker is gone: end its sessions for *reason*, break its calls off, remove what is left of it.

        One that still starts is left to who starts it: its death is a failed start.

        Raises:
            StoreUnavailable, BackendError: the next audit goes on.
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
            self._transport.forget(id)  # another replica was faster; the calls of this one are broken off here
            return
        if worker.state is WorkerState.STARTING:
            return  # who starts it stops it and counts the failure; if that replica is gone, the new leader stops it
        tail = ""
        sessions = await self._forget(id, reason)
        if sessions is None:
            return  # another replica was faster by a moment: it says so, and removes what is left
        if worker.state is WorkerState.DRAINING and not sessions:
            async with self._at_engine:
                # Nothing is lost: the replica that leads is about to stop it, or just does.
                await self._backend.stop(id)
            return
        with contextlib.suppress(GatewayError):
            async with self._at_engine:
                tail = (await self._backend.logs(id, lines=LOG_LINES)).strip()
        self._metrics.worker_lost(worker.environment, reason.value)
        for session in sessions:
            outcome = outcome_of(reason, None)
            self._metrics.session_closed(session.environment, (session.reason or reason).value, outcome, None)
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
        self._tasks.wake()  # its place may be wanted

    async def _forget(self, id: WorkerId, reason: CloseReason) -> list[Session] | None:
        sessions = await self._store.remove_worker(id, reason)
        self._transport.forget(id)
        return sessions

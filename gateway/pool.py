"""The control loop: the only code that starts or stops a worker.

It runs in every replica and acts in the one that leads. It never answers a trainer: an opening that waits for a slot is
served by the store when a worker becomes ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Container, Coroutine, Mapping
from typing import Any

import anyio

from gateway.catalog import Catalog
from gateway.closing import Closer
from gateway.core.errors import GatewayError, StartFailed, StoreUnavailable
from gateway.core.model import (
    CapacityWanted,
    CloseReason,
    Environment,
    EnvironmentLoad,
    EnvironmentName,
    Note,
    Session,
    Wire,
    Worker,
    WorkerId,
    WorkerState,
)
from gateway.core.plan import backoff_s, plan
from gateway.core.ports import Backend, Store, Transport, Upstream
from gateway.observe.metrics import Metrics

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""How often the loop looks by itself; openings that wait wake it at once."""
LEAD_S = 3.0
"""A leader that died is replaced after this long."""
STARTS_AT_ONCE = 8
"""More than 8 starts under way only add latency: an engine manages 5 to 7 a second."""
EXPIRED_AT_ONCE = 500
"""Sessions that one turn of the loop ends."""
ASK_S = 3.0
"""How long a worker has to say which of its sessions are busy; it answers from memory."""
LOG_LINES = 20


class Pool:
    """Keeps each environment's workers as its policy and the waiting openings want them."""

    def __init__(
        self,
        *,
        store: Store,
        backend: Backend,
        upstreams: Mapping[Wire, Upstream],
        transport: Transport,
        catalog: Catalog,
        closer: Closer,
        metrics: Metrics,
        replica: str,
    ) -> None:
        self._store = store
        self._backend = backend
        self._upstreams = upstreams
        self._transport = transport
        self._catalog = catalog
        self._closer = closer
        self._metrics = metrics
        self._replica = replica
        # The state of this loop: what it has begun, by worker; and failures in a row, by environment.
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: dict[WorkerId, asyncio.Event] = {}
        self._stopping: set[WorkerId] = set()
        self._asking: set[WorkerId] = set()
        self._failures: defaultdict[EnvironmentName, int] = defaultdict(int)
        self._failed_at: defaultdict[EnvironmentName, float] = defaultdict(float)
        self._not_before: defaultdict[EnvironmentName, float] = defaultdict(float)
        self._starts = asyncio.Semaphore(STARTS_AT_ONCE)
        self._woken = asyncio.Event()
        self._is_ending = False

    # -- the loop -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Decide and act until cancelled; what was begun is ended first."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._turn_for_ever)
                group.start_soon(self._follow_notices)
                group.start_soon(self._follow_deaths)
        finally:
            self._is_ending = True
            for task in list(self._tasks):
                task.cancel()
            if self._tasks:
                with anyio.CancelScope(shield=True):
                    await asyncio.wait(self._tasks, timeout=30)

    async def tick(self) -> bool:
        """One turn: expire sessions, start and stop workers. Returns False if another replica leads."""
        if not await self._store.lead(self._replica, ttl_s=LEAD_S):
            return False
        await self._expire()
        loads = await self._store.load()
        self._metrics.loaded(loads)
        for environment in self._catalog:
            await self._apply(environment, loads.get(environment.name, EnvironmentLoad()))
        await self._drop_strangers(loads)
        return True

    async def stop_all(self, *, spare: Container[EnvironmentName] = ()) -> None:
        """Stop every worker that would not outlive this gateway: all but those of the environments *spare*."""
        for name, load in (await self._store.load()).items():
            for entry in load.workers if name not in spare else ():
                logger.info("worker_stopped environment=%s worker=%s reason=shutdown", name, entry.worker.id)
                with contextlib.suppress(GatewayError):
                    await self._backend.stop(entry.worker.id)
                await self._forget(entry.worker.id, CloseReason.SHUTDOWN)

    async def _turn_for_ever(self) -> None:
        while True:
            try:
                await self.tick()
            except StoreUnavailable as error:
                logger.warning("store_unavailable during=tick error=%s", error)
            except Exception:  # protects every environment: without this loop nothing starts or expires
                logger.exception("tick_failed")
            self._woken.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._woken.wait()

    async def _follow_notices(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailable):
                async for notice in self._store.notices():
                    if isinstance(notice, CapacityWanted):
                        self._woken.set()
            await asyncio.sleep(TICK_S)

    async def _follow_deaths(self) -> None:
        while True:
            try:
                async for worker in self._backend.deaths():
                    self._spawn(self._on_death(worker))
            except GatewayError as error:
                logger.warning("deaths_not_followed error=%s", error)
            await asyncio.sleep(TICK_S)

    # -- sessions -------------------------------------------------------------------------------------------------

    async def _expire(self) -> None:
        late: defaultdict[WorkerId, list[Session]] = defaultdict(list)
        for session in await self._store.late(EXPIRED_AT_ONCE):
            late[session.worker].append(session)
        for id, sessions in late.items():
            if id not in self._asking:
                # Each worker by itself: one that does not answer holds up neither the others nor this loop.
                self._asking.add(id)
                self._spawn(self._expire_in(id, sessions))
        for session in await self._store.due(EXPIRED_AT_ONCE):
            self._spawn(self._finish(session))

    async def _expire_in(self, id: WorkerId, late: list[Session]) -> None:
        """End a worker's late sessions, but for those that it says are not."""
        try:
            await self._ask(id, late)
            for session in await self._store.expire([session.id for session in late]):
                self._spawn(self._finish(session))
        except StoreUnavailable as error:
            logger.warning("store_unavailable during=expiry error=%s", error)  # late still, at the next turn
        finally:
            self._asking.discard(id)

    async def _ask(self, id: WorkerId, late: list[Session]) -> None:
        """Renew late sessions whose worker says that a call runs, or ended less than their idle time ago.

        The call of a trainer that hung up, or of a replica that died, is known to its worker only.
        """
        environment = self._catalog.get(late[0].environment)
        record = await self._store.worker(id)
        if environment is None or record is None:
            return
        try:
            async with asyncio.timeout(ASK_S):
                known = await self._upstreams[environment.wire].sessions(record, environment)
        except (GatewayError, TimeoutError) as error:
            logger.warning("worker_not_asked worker=%s error=%s", id, error)
            return
        ids = {session.id for session in late}
        await self._store.touch([Note(one.id, 0.0 if one.busy else one.idle_s) for one in known or () if one.id in ids])

    async def _finish(self, session: Session) -> None:
        environment = self._catalog.get(session.environment)
        with contextlib.suppress(StoreUnavailable):  # due again after a while
            if environment is None:  # no longer on offer: its worker is being dropped, and its sessions with it
                await self._store.release(session.id, session.lease)
            else:
                await self._closer.finish(session, environment)

    # -- workers --------------------------------------------------------------------------------------------------

    async def _apply(self, environment: Environment, load: EnvironmentLoad) -> None:
        wanted = plan(environment.pool, load, digest=environment.digest())
        for id in wanted.drain:
            await self._store.drain_worker(id)
        for id in wanted.retire:
            await self._store.drain_worker(id, only_if_idle=True)
            self._woken.set()
        for id in wanted.stop:
            self._stop_soon(id, environment.name, "idle")
        for entry in load.workers:
            if entry.worker.state is WorkerState.STARTING and entry.worker.id not in self._starting:
                # Begun by a leader that is gone: nobody waits for its readiness.
                self._stop_soon(entry.worker.id, environment.name, "start abandoned")
        if wanted.start and time.monotonic() >= self._not_before[environment.name]:
            for _ in range(wanted.start):
                await self._begin_start(environment)

    async def _drop_strangers(self, loads: Mapping[EnvironmentName, EnvironmentLoad]) -> None:
        for name, load in loads.items():
            if self._catalog.get(name) is None:
                for entry in load.workers:
                    self._stop_soon(entry.worker.id, name, "no longer on offer")

    async def _begin_start(self, environment: Environment) -> None:
        worker = Worker(
            id=WorkerId(secrets.token_hex(8)),
            environment=environment.name,
            digest=environment.digest(),
            slots=environment.pool.slots,
            max_uses=environment.pool.max_uses,
        )
        self._starting[worker.id] = asyncio.Event()
        try:
            await self._store.add_worker(worker)
        except BaseException:
            del self._starting[worker.id]
            raise
        self._spawn(self._start(worker, environment))

    async def _start(self, worker: Worker, environment: Environment) -> None:
        began_at = time.monotonic()
        try:
            async with self._starts:  # of the engine only: workers that never get ready must not hold up others
                address = await self._backend.start(worker, environment)
            slots = await self._until_ready(worker, environment, address)
            if not await self._store.worker_ready(worker.id, address, slots=slots):
                raise StartFailed("the worker was removed while it started")
            if self._starting[worker.id].is_set():
                raise StartFailed("it died just as it became ready")
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await self._undo_start(worker, environment, error, began_at)
            if not isinstance(error, Exception):
                raise
        else:
            start_s = time.monotonic() - began_at
            self._failures[environment.name] = 0
            self._metrics.worker_started(environment.name, "ready", start_s)
            logger.info("worker_ready environment=%s worker=%s start_s=%.3f", environment.name, worker.id, start_s)
        finally:
            self._starting.pop(worker.id, None)

    async def _until_ready(self, worker: Worker, environment: Environment, address: str) -> int:
        """Wait for readiness, the end of the environment's start time, or the worker's death, whichever is first.

        Returns the capacity that the worker told, or 0.
        """
        started = Worker(
            id=worker.id, environment=worker.environment, digest=worker.digest, slots=worker.slots, address=address
        )
        ready = asyncio.ensure_future(self._upstreams[environment.wire].ready(started, environment))
        died = asyncio.ensure_future(self._starting[worker.id].wait())
        try:
            limit_s = environment.timeouts.start_s
            done, _ = await asyncio.wait((ready, died), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if ready in done:
                return ready.result()
            if died in done:
                raise StartFailed("it died before it was ready")
            raise StartFailed(f"it was not ready within {limit_s:g} s")
        finally:
            for task in (ready, died):
                task.cancel()
            await asyncio.gather(ready, died, return_exceptions=True)

    async def _undo_start(
        self, worker: Worker, environment: Environment, error: BaseException, began_at: float
    ) -> None:
        name = environment.name
        tail = ""
        with contextlib.suppress(GatewayError):
            tail = (await self._backend.logs(worker.id, lines=LOG_LINES)).strip()
        self._transport.forget(worker.id)
        with contextlib.suppress(GatewayError):
            await self._backend.stop(worker.id)
        with contextlib.suppress(StoreUnavailable):
            await self._store.remove_worker(worker.id, CloseReason.WORKER_LOST)
        if self._is_ending or not isinstance(error, Exception):
            return
        if not isinstance(error, GatewayError):
            logger.error("worker_start_broken worker=%s", worker.id, exc_info=error)
        if began_at >= self._failed_at[name]:  # those that began before the last failure failed together with it
            self._failures[name] += 1
        self._failed_at[name] = time.monotonic()
        self._not_before[name] = self._failed_at[name] + backoff_s(self._failures[name])
        self._metrics.worker_started(name, "failed", 0.0)
        logger.error(
            "worker_start_failed environment=%s worker=%s failures=%s error=%s log=%r",
            name,
            worker.id,
            self._failures[name],
            error,
            tail,
        )
        await self._tell_waiting(name, f"environment {name!r} does not start: {error}" + (f"\n{tail}" if tail else ""))

    async def _tell_waiting(self, name: EnvironmentName, message: str) -> None:
        """Let openings fail that nothing can serve: no worker is ready, and none starts."""
        with contextlib.suppress(StoreUnavailable):
            load = (await self._store.load()).get(name, EnvironmentLoad())
            alive = (WorkerState.READY, WorkerState.STARTING)
            if not any(entry.worker.state in alive for entry in load.workers):
                await self._store.fail_waiting(name, message)

    def _stop_soon(self, id: WorkerId, name: EnvironmentName, reason: str) -> None:
        if id not in self._stopping and id not in self._starting:
            self._stopping.add(id)
            self._spawn(self._stop(id, name, reason))

    async def _stop(self, id: WorkerId, name: EnvironmentName, reason: str) -> None:
        try:
            await self._backend.stop(id)
            await self._forget(id, CloseReason.WORKER_LOST)
            logger.info("worker_stopped environment=%s worker=%s reason=%s", name, id, reason)
        except GatewayError as error:
            logger.warning("worker_not_stopped environment=%s worker=%s error=%s", name, id, error)
        finally:
            self._stopping.discard(id)

    async def _on_death(self, id: WorkerId) -> None:
        if id in self._stopping:
            return
        if id in self._starting:
            self._starting[id].set()
            return
        try:
            await self.lost(id)
        except GatewayError as error:
            logger.warning("worker_loss_not_handled worker=%s error=%s", id, error)  # the next audit finds it

    async def lost(self, id: WorkerId) -> None:
        """A worker is gone: end its sessions, break its calls off, remove what is left of it."""
        worker = await self._store.worker(id)
        if worker is None:
            return
        tail = ""
        sessions = await self._forget(id, CloseReason.WORKER_LOST)
        with contextlib.suppress(GatewayError):
            tail = (await self._backend.logs(id, lines=LOG_LINES)).strip()
        self._metrics.worker_lost(worker.environment)
        for session in sessions:
            self._metrics.session_closed(session.environment, CloseReason.WORKER_LOST.value, None)
        logger.error(
            "worker_lost environment=%s worker=%s sessions=%s log=%r", worker.environment, id, len(sessions), tail
        )
        await self._backend.stop(id)
        self._woken.set()

    async def _forget(self, id: WorkerId, reason: CloseReason) -> list[Session]:
        # The store first: a call that breaks off asks it why, and must find the reason there.
        sessions = await self._store.remove_worker(id, reason)
        self._transport.forget(id)
        return sessions

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("pool_task_failed error=%r", error)

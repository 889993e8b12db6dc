"""The control loop: the only code that starts or stops a worker.

It runs in every replica and acts in the one that leads. It never answers a trainer: an opening that waits for a slot is
served by the store when a worker becomes ready. What is to be done is decided in ``core/plan``; its parts are `starts`,
`worker_ends`, `pausing`, `silence`, `expiry` and `rebuilding`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Container, Coroutine, Iterable, Mapping
from typing import Any, Final

import anyio

from gateway.catalog import Catalog
from gateway.closing import Closer
from gateway.core.capacity import Expected, Wish, shared
from gateway.core.errors import BackendError, GatewayError, NotLeading, StoreUnavailable
from gateway.core.leader_lease import LEASE_S, LeaderLease
from gateway.core.model import (
    CapacityWanted,
    CloseReason,
    Death,
    Environment,
    EnvironmentLoad,
    EnvironmentName,
    Session,
    Wire,
    Worker,
    WorkerId,
    WorkerState,
)
from gateway.core.plan import Demand, Plan, plan, rest_s
from gateway.core.ports import Backend, Store, Transport, Upstream
from gateway.expiry import Expiry
from gateway.observe.metrics import Metrics
from gateway.pausing import Pausing
from gateway.rebuilding import Rebuilding, static_worker
from gateway.silence import Suspects
from gateway.starts import Starts
from gateway.worker_ends import WorkerEnds

logger = logging.getLogger(__name__)

TICK_S: Final = 0.5
"""How often the loop looks by itself; openings that wait wake it at once."""
COMES_S: Final = 3.0
"""How long a container may still come to be that a leader asked the engine for before it died: an engine that is busy
lets requests wait."""
WHOLE_S: Final = 30.0
"""The longest that a start waits for another replica to rebuild the store."""
END_S: Final = 30.0
"""The longest that the end waits for what is under way; to undo a start takes that of its worker."""


class Pool:
    """Keeps each environment's workers as its policy, the waiting openings and those to come want them."""

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
        remembered: Callable[[], Iterable[Session]] = tuple,
        is_settled: Callable[[EnvironmentName], bool] = lambda name: True,
        may_start: Callable[[EnvironmentName], bool] = lambda name: True,
        leads: Callable[[], None] = lambda: None,
        expected: Callable[[], Mapping[EnvironmentName, Expected]] = dict,
        max_workers: int = 0,
    ) -> None:
        """
        Args:
            remembered: The sessions that this replica serves.
            is_settled: Whether it is known what an environment is now; workers of another make stay until then.
            may_start: Whether it is known so far as it is asked for: a worker begun before might be of another make.
            leads: Called when this replica begins to lead: what it knows of images may be older than its forerunner's.
            expected: Openings that are foreseen, by environment.
            max_workers: Of all environments at once; 0: as many as each may have by itself.
        """
        self._expected = expected
        self._max_workers = max_workers
        self._store = store
        self._backend = backend
        self._catalog = catalog
        self._metrics = metrics
        self._replica = replica
        self._is_settled = is_settled
        self._may_start = may_start
        self._leads = leads
        self._lease = LeaderLease()
        self._starts = Starts(
            store=store,
            backend=backend,
            upstreams=upstreams,
            transport=transport,
            metrics=metrics,
            lease=self._lease,
            started=self._on_started,
        )
        self._ends = WorkerEnds(
            store=store,
            backend=backend,
            transport=transport,
            metrics=metrics,
            spawn=self._spawn,
            ended=lambda: self._woken.set(),
        )
        self._expiry = Expiry(
            store=store,
            upstreams=upstreams,
            catalog=catalog,
            closer=closer,
            spawn=self._spawn,
            more=lambda: self._woken.set(),
        )
        self._pausing = Pausing(
            store=store,
            backend=backend,
            spawn=self._spawn,
            paused=lambda: self._woken.set(),
        )
        self._suspects = Suspects(
            store=store,
            upstreams=upstreams,
            catalog=catalog,
            spawn=self._spawn,
            changed=lambda: self._woken.set(),
        )
        self._rebuilding = Rebuilding(
            store=store,
            backend=backend,
            upstreams=upstreams,
            catalog=catalog,
            closer=closer,
            remembered=remembered,
        )
        # The state of this loop: what it has begun, by worker, and what it expects, by environment.
        self._tasks: set[asyncio.Task[None]] = set()
        self._rebuild: asyncio.Task[None] | None = None
        self._demands: dict[EnvironmentName, Demand] = {}
        self._looked_at: float | None = None
        self._woken = asyncio.Event()
        self._workers = 0
        """Of all environments, at the last look."""

    @property
    def is_leading(self) -> bool:
        """Whether this replica runs the control loop, as far as it knows."""
        return bool(self._lease.fence)

    # -- the loop -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Decide and act until cancelled; what was begun is ended first."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._turn_for_ever)
                group.start_soon(self._follow_notices)
                group.start_soon(self._follow_deaths)
        finally:
            with anyio.CancelScope(shield=True):
                await self.aclose()
                if self._lease.fence:
                    with contextlib.suppress(StoreUnavailable):
                        await self._store.resign(self._replica)

    async def aclose(self) -> None:
        """End what was begun: starts are undone. For a pool that was not run to its end, too."""
        self._starts.end()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=END_S)

    async def made_whole(self) -> None:
        """Return when the store is whole, having rebuilt it if this replica leads; before the first audit.

        Raises:
            StoreUnavailable: another replica leads, and did not rebuild it in time.
        """
        deadline = time.monotonic() + WHOLE_S
        try:
            while not await self._is_whole():
                if time.monotonic() > deadline:
                    raise StoreUnavailable("the store is being rebuilt")
                if self._rebuild is not None:
                    await asyncio.wait({self._rebuild}, timeout=TICK_S)
                else:
                    await asyncio.sleep(TICK_S)
        except BaseException:  # a cancellation too: a pool that is not run ends nothing
            if self._rebuild is not None:
                self._rebuild.cancel()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait({self._rebuild}, timeout=END_S)
            raise

    async def tick(self) -> bool:
        """One turn: expire sessions, start and stop workers. Returns False if another replica leads."""
        if not await self._is_whole() or not self._lease.fence:
            self._looked_at = None
            return bool(self._lease.fence)
        await self._expiry.turn()
        own = self._starts.ids()  # before the look: one that ends in the meantime still starts in `loads`
        loads = await self._store.load()
        self._metrics.loaded(loads)
        self._look(loads)
        await self._drain_leaving(loads)
        await self._suspects.turn(loads, self._lease.fence)
        self._ends.grow()
        for environment, load, wanted in self._planned(loads):
            await self._apply(environment, load, wanted, own)
        await self._drop_strangers(loads)
        return True

    async def stop_all(self, *, spare: Container[EnvironmentName] = ()) -> None:
        """Stop every worker that would not outlive this gateway: all but those of the environments *spare*."""
        for name, load in (await self._store.load()).items():
            for entry in load.workers if name not in spare else ():
                await self._ends.stop_now(entry.worker.id, name)

    async def _turn_for_ever(self) -> None:
        while True:
            self._woken.clear()  # before the look: what happens during it may not have been seen
            try:
                await self.tick()
            except StoreUnavailable as error:
                logger.warning("store_unavailable during=tick error=%s", error)
                self._rebuilding.begin_anew()
            except NotLeading:
                logger.warning("lead_lost replica=%s", self._replica)
            except Exception:  # protects every environment: without this loop nothing starts or expires
                logger.exception("tick_failed")
            await asyncio.sleep(rest_s(self._workers))
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
                async for death in self._backend.deaths():
                    self._spawn(self._on_death(death))
            except GatewayError as error:
                logger.warning("deaths_not_followed error=%s", error)
            await asyncio.sleep(TICK_S)

    # -- the store ------------------------------------------------------------------------------------------------

    async def _is_whole(self) -> bool:
        """Take or keep the lead, and see to it that the store is whole."""
        before, asked_at = self._lease.lead, time.monotonic()
        lead = await self._store.lead(self._replica, ttl_s=LEASE_S)
        self._lease.renew(lead, asked_at=asked_at)
        self._metrics.leads(bool(lead.fence), is_whole=lead.is_whole)
        if lead.fence and lead.fence != before.fence:
            logger.info("lead_taken replica=%s fence=%s", self._replica, lead.fence)
            self._leads()
        if lead.is_whole:
            self._rebuilding.begin_anew()
            return True
        await self._rebuilding.hand_in()
        if lead.fence and (self._rebuild is None or self._rebuild.done()):
            self._rebuild = self._spawn(self._rebuilt(lead.fence))
        return False

    async def _rebuilt(self, fence: int) -> None:
        try:
            await self._rebuilding.lead(fence, spare=self._starts.ids() | self._ends.ids())
        except (StoreUnavailable, NotLeading, BackendError) as error:
            logger.warning("store_not_rebuilt error=%s", error)  # the next turn tries again
            await asyncio.sleep(TICK_S)
        else:
            self._woken.set()

    # -- what is expected -----------------------------------------------------------------------------------------

    def _look(self, loads: Mapping[EnvironmentName, EnvironmentLoad]) -> None:
        now = time.monotonic()
        since_s = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        self._workers = sum(len(load.workers) for load in loads.values())
        for name, load in loads.items():
            demand = self._demands.get(name, Demand()).looked(load, since_s)
            self._demands[name] = demand
            environment = self._catalog.get(name)
            warm = environment.pool.warm if environment is not None else 0
            self._metrics.sized(name, arrival_rate=demand.rate, start_s=demand.start_s, warm=max(warm, demand.ahead))

    def _on_started(self, environment: Environment, start_s: float) -> None:
        self._demands[environment.name] = self._demands.get(environment.name, Demand()).started(start_s)

    # -- workers --------------------------------------------------------------------------------------------------

    async def _drain_leaving(self, loads: Mapping[EnvironmentName, EnvironmentLoad]) -> None:
        """Give workers whose machine drains no more sessions; others take their place at the next turn."""
        leaving = self._backend.leaving()
        for name, load in loads.items() if leaving else ():
            for entry in load.workers:
                id = entry.worker.id
                if id in leaving and entry.worker.state not in (WorkerState.STARTING, WorkerState.DRAINING):
                    logger.info("worker_leaving environment=%s worker=%s", name, id)
                    await self._store.drain_worker(id, fence=self._lease.fence)
                    self._woken.set()

    def _planned(
        self, loads: Mapping[EnvironmentName, EnvironmentLoad]
    ) -> list[tuple[Environment, EnvironmentLoad, Plan]]:
        """What is to be done for each environment, within what all of them may have together."""
        expected = self._expected()
        wishes: dict[EnvironmentName, Wish] = {}
        environments = list(self._catalog.all())
        for environment in environments:
            name = environment.name
            load, demand = loads.get(name, EnvironmentLoad()), self._demands.get(name, Demand())
            wanted = plan(
                environment.pool,
                load,
                digest=environment.digest(),
                demand=demand,
                expected=expected.get(name, Expected()).slots(demand.start_s),
                is_trial=self._starts.is_trial(name),
            )
            wishes[name] = Wish(plan=wanted, policy=environment.pool, load=load)
        plans = shared(wishes, most=self._max_workers)
        return [(one, wishes[one.name].load, plans[one.name]) for one in environments]

    async def _apply(
        self, environment: Environment, load: EnvironmentLoad, wanted: Plan, own: Container[WorkerId]
    ) -> None:
        name, fence = environment.name, self._lease.fence
        for id in wanted.drain if self._is_settled(name) else ():
            logger.info("worker_outdated environment=%s worker=%s", name, id)
            await self._store.drain_worker(id, fence=fence)
            self._woken.set()
        for id in wanted.retire:
            if await self._store.drain_worker(id, only_if_idle=True, fence=fence):
                self._woken.set()
        for id in wanted.pause:
            await self._pausing.pause_soon(id, name, fence=fence)
        for id in wanted.wake:
            self._pausing.wake_soon(id, name)
        for id in wanted.stop:
            self._stop_soon(id, name, "idle")
        await self._end_abandoned(load, name, own, fence)
        is_tried = not wanted.start and self._starts.wants_trial(name, load)
        if (wanted.start or is_tried) and not self._starts.is_put_off(name) and self._may_start(name):
            for _ in range(wanted.start or 1):
                await self._begin_start(environment)

    async def _end_abandoned(
        self, load: EnvironmentLoad, name: EnvironmentName, own: Container[WorkerId], fence: int
    ) -> None:
        """End what a leader began that is gone: nobody waits for its readiness."""
        for entry in load.workers:
            id = entry.worker.id
            if entry.worker.state is WorkerState.STARTING and id not in own and id not in self._ends:
                since = await self._store.worker(id)
                if since is not None and since.state is not WorkerState.STARTING:
                    continue  # who led before lives, and has made it ready since the look: it may serve sessions
                # The store first, which refuses one that does not lead any more: it may be the new leader's. It keeps
                # the worker's place until that is gone: its container may be there already, or still come.
                if await self._store.drain_worker(id, only_if_idle=True, fence=fence):
                    self._ends.stop_soon(id, name, "start abandoned", again_after_s=COMES_S)

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
        if environment.server.url:
            worker = static_worker(environment)
        await self._starts.begin(worker)
        self._spawn(self._starts.run(worker, environment))

    def _stop_soon(self, id: WorkerId, name: EnvironmentName, reason: str) -> None:
        if id in self._starts:
            self._starts.give_up(id)
        else:
            self._ends.stop_soon(id, name, reason)

    async def _on_death(self, death: Death) -> None:
        if death.id in self._starts:
            self._starts.died(death)
            return
        try:
            await self.lost(death.id, death.reason, death.detail)
        except GatewayError as error:
            logger.warning("worker_loss_not_handled worker=%s error=%s", death.id, error)  # the next audit finds it

    async def lost(self, id: WorkerId, reason: CloseReason = CloseReason.WORKER_LOST, detail: str = "") -> None:
        """See `WorkerEnds.lost`: for the audit."""
        await self._ends.lost(id, reason, detail)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("pool_task_failed error=%r", error)

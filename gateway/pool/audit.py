"""Compares the backend's workers with the store's; adopts what matches and removes what does not.

Runs once before the control loop begins, so that a restarted gateway finds its sessions where they were, and then
every `EVERY_S` seconds in the replica that leads, for what an engine's event told nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace

from gateway.catalog.catalog import Catalog
from gateway.core.environment import UpstreamKind
from gateway.core.errors import BackendError, GatewayError, StoreUnavailable
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.leader_lease import LEASE_S
from gateway.core.ports.backend import Backend
from gateway.core.ports.store import Store
from gateway.core.ports.upstream import WorkerUpstream
from gateway.core.worker import BackendWorker, Worker, WorkerState
from gateway.metrics import Metrics
from gateway.pool.stops import WorkerStops

logger = logging.getLogger(__name__)

EVERY_S = 15.0
ANSWER_S = 5.0
"""A worker that serves sessions answers within milliseconds; one that does not within this is given up at start."""
UNDOING_S = 3.0
"""How long what only the backend knows may take to go by itself before it is an orphan: a start that failed, or a
worker that died, is being removed then, here or by another replica, after the store forgot it; and so is a replica's
probe of its engine. To stop a worker takes its grace of 2 s."""
PATIENCE_S = 10.0
"""The same in an audit that nobody waits for: an engine may be busy. With `EVERY_S` less than half a minute."""
LOOK_EVERY_S = 0.25
"""Between two looks at the backend meanwhile."""


@dataclass(frozen=True, slots=True)
class AuditFindings:
    """What an audit is to do."""

    orphans: tuple[WorkerId, ...]
    """Known to the backend only, dead or not: remove, if it does not go by itself."""
    lost: tuple[WorkerId, ...]
    """Known to the store only, or dead: end their sessions."""
    adopted: tuple[WorkerId, ...]
    """Known to both, and running."""


def compare(
    before: Mapping[WorkerId, Worker], found: list[BackendWorker], after: Mapping[WorkerId, Worker]
) -> AuditFindings:
    """Decide from two looks at the store with one at the backend between them.

    A worker that came or went during the audit is in one of the looks only, and is left alone: only what was ready in
    the first look can be lost, and only what is in neither is an orphan.
    """
    running = {entry.id for entry in found if entry.running}
    settled = {id for id, worker in before.items() if worker.state is not WorkerState.STARTING}
    lost = settled - running
    return AuditFindings(
        orphans=tuple(entry.id for entry in found if entry.id not in before and entry.id not in after),
        lost=tuple(sorted(lost)),
        adopted=tuple(sorted(settled & running)),
    )


class Audit:
    """Compares and mends."""

    def __init__(
        self,
        *,
        store: Store,
        backend: Backend,
        upstreams: Mapping[UpstreamKind, WorkerUpstream],
        catalog: Catalog,
        stops: WorkerStops,
        metrics: Metrics,
        replica: str,
    ) -> None:
        """*stops* end a worker that is gone, as the control loop does."""
        self._store = store
        self._backend = backend
        self._upstreams = upstreams
        self._catalog = catalog
        self._stops = stops
        self._metrics = metrics
        self._replica = replica
        self._left: Mapping[WorkerId, EnvironmentName] = {}

    async def begin(self) -> AuditFindings:
        """Compare and mend before the gateway serves; adopted workers must answer. The store must be whole.

        Orphans are left to `run`: nobody who waits for the gateway waits for what another one did not clear away.

        Raises:
            StoreUnavailable, BackendError: something may be left to be done.
        """
        findings, self._left = await self._mended(ask=True)
        return findings

    async def once(self, *, undoing_s: float | None = None) -> AuditFindings:
        """Compare and mend. The store must be whole.

        Returns what there was to do; of the orphans those that are still there after *undoing_s* (`UNDOING_S`) seconds.

        Raises:
            StoreUnavailable, BackendError: something may be left to be done.
        """
        findings, orphans = await self._mended(ask=False)
        return replace(findings, orphans=await self._remove(orphans, UNDOING_S if undoing_s is None else undoing_s))

    async def run(self) -> None:
        """Remove what `begin` left; then repeat while this replica leads, until cancelled."""
        await self._guarded(self._remove(self._left, UNDOING_S))
        while True:
            await asyncio.sleep(EVERY_S)
            await self._guarded(self._if_leading())

    async def _guarded(self, work: Awaitable[object]) -> None:
        try:
            await work
        except (StoreUnavailable, BackendError) as error:
            logger.warning("audit_put_off error=%s", error)
        except Exception:  # protects the next audit
            logger.exception("audit_failed")

    async def _if_leading(self) -> None:
        lead = await self._store.lead(self._replica, ttl_s=LEASE_S)
        if lead.fence and lead.is_whole:
            await self.once(undoing_s=PATIENCE_S)

    async def _mended(self, *, ask: bool) -> tuple[AuditFindings, dict[WorkerId, EnvironmentName]]:
        """All of it but for the orphans, which are returned with their environments."""
        before = await self._workers()
        found = await self._backend.found()
        findings = compare(before, found, await self._workers())
        await self._expect_whole()
        if ask:
            # All at once: each may take as long as it likes up to ANSWER_S, and the gateway does not serve yet.
            answers = await asyncio.gather(*(self._answers(before[id]) for id in findings.adopted))
            silent = [id for id, answered in zip(findings.adopted, answers, strict=True) if not answered]
            findings = replace(
                findings,
                lost=(*findings.lost, *silent),
                adopted=tuple(id for id in findings.adopted if id not in silent),
            )
        for id in findings.lost:
            try:
                await self._stops.lost(id)
            except BackendError as error:  # its sessions are ended; what is left of it is the next audit's
                logger.warning("worker_not_stopped worker=%s error=%s", id, error)
        for id in findings.adopted if ask else ():
            logger.info("worker_adopted environment=%s worker=%s", before[id].environment, id)
        return findings, {entry.id: entry.environment for entry in found if entry.id in findings.orphans}

    async def _remove(self, orphans: Mapping[WorkerId, EnvironmentName], undoing_s: float) -> tuple[WorkerId, ...]:
        """Remove those of *orphans* that nobody else does; returns which."""
        left = await self._still_there(tuple(orphans), undoing_s)
        for id in left:
            with contextlib.suppress(GatewayError):
                await self._backend.stop(id)
                self._metrics.worker_orphaned(orphans[id])
                logger.info("worker_removed environment=%s worker=%s reason=orphan", orphans[id], id)
        return left

    async def _still_there(self, ids: tuple[WorkerId, ...], within_s: float) -> tuple[WorkerId, ...]:
        """Those of *ids* that nobody is removing: they are there after *within_s* seconds, and the store has none."""
        deadline = time.monotonic() + within_s
        while ids and (left_s := deadline - time.monotonic()) > 0:
            await asyncio.sleep(min(LOOK_EVERY_S, left_s))
            there = {entry.id for entry in await self._backend.found()}
            ids = tuple(id for id in ids if id in there)
        if ids:
            known = await self._workers()
            await self._expect_whole()
            ids = tuple(id for id in ids if id not in known)
        return ids

    async def _expect_whole(self) -> None:
        """
        Raises:
            StoreUnavailable: it lost its data, maybe since the last look: what it lacks is no orphan.
        """
        if not (await self._store.lead(self._replica, ttl_s=LEASE_S)).is_whole:
            raise StoreUnavailable("the store is being rebuilt")

    async def _workers(self) -> dict[WorkerId, Worker]:
        loads = await self._store.load()
        return {entry.worker.id: entry.worker for load in loads.values() for entry in load.workers}

    async def _answers(self, worker: Worker) -> bool:
        environment = self._catalog.known.get(worker.environment)
        if environment is None:
            return False
        if worker.state is WorkerState.PAUSED:
            return True  # it is asked when it is woken
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._upstreams[environment.wire].alive(worker, environment)
        except (GatewayError, TimeoutError) as error:
            logger.warning("worker_silent worker=%s error=%s", worker.id, error)
            return False
        return True

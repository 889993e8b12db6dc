"""Compares the backend's workers with the store's, adopts matching workers and removes the rest.

It runs once before the control loop starts, so that a restarted gateway keeps its sessions. Then it runs every
`EVERY_S` seconds in the leader, to find changes of which no engine event arrived.
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
"""Seconds that a worker has to answer when the gateway starts. A healthy worker answers within milliseconds."""
UNDOING_S = 3.0
"""Seconds after which a worker that only the backend knows is an orphan. Until then a replica may be removing it: a
failed start or a dead worker, which the store has already forgotten, or a probe of its engine. Stopping a worker
takes its grace period of 2 s."""
PATIENCE_S = 10.0
"""`UNDOING_S` for an audit in the background, when the engine may be busy. With `EVERY_S` it stays below 30 s."""
LOOK_EVERY_S = 0.25
"""Seconds between two queries to the backend during that time."""


@dataclass(frozen=True, slots=True)
class AuditFindings:
    """The differences between backend and store, which the audit repairs."""

    orphans: tuple[WorkerId, ...]
    """Workers that only the backend knows, dead or alive. The audit removes them if they do not disappear."""
    lost: tuple[WorkerId, ...]
    """Workers that only the store knows, or that are dead. The audit ends their sessions."""
    adopted: tuple[WorkerId, ...]
    """Running workers that the backend and the store know."""


def compare(
    before: Mapping[WorkerId, Worker], found: list[BackendWorker], after: Mapping[WorkerId, Worker]
) -> AuditFindings:
    """Decide from two reads of the store, *before* and *after* the backend's list *found*.

    A worker that came or went during the audit is left alone. Only a worker that was past its start in *before* can be
    lost. Only a worker that is in neither read is an orphan.
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
    """Compares the backend's workers with the store's and repairs the differences."""

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
        """*stops*: ends lost workers, as for the control loop."""
        self._store = store
        self._backend = backend
        self._upstreams = upstreams
        self._catalog = catalog
        self._stops = stops
        self._metrics = metrics
        self._replica = replica
        self._left: Mapping[WorkerId, EnvironmentName] = {}

    async def begin(self) -> AuditFindings:
        """Run the audit before the gateway serves. The store must be complete, and adopted workers must answer.

        `run` removes the orphans later, so that they do not delay the gateway's start.

        Raises:
            StoreUnavailable, BackendError: The audit is incomplete.
        """
        findings, self._left = await self._mended(ask=True)
        return findings

    async def once(self, *, undoing_s: float | None = None) -> AuditFindings:
        """Run one audit. The store must be complete.

        Returns:
            The findings. Their orphans still exist after *undoing_s* seconds, by default `UNDOING_S`.

        Raises:
            StoreUnavailable, BackendError: The audit is incomplete.
        """
        findings, orphans = await self._mended(ask=False)
        return replace(findings, orphans=await self._remove(orphans, UNDOING_S if undoing_s is None else undoing_s))

    async def run(self) -> None:
        """Remove the orphans that `begin` left; then audit regularly while this replica leads, until cancelled."""
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
        """Run an audit without removing orphans. *ask*: adopted workers must answer, or they count as lost.

        Return the findings, and the orphans with their environments.
        """
        before = await self._workers()
        found = await self._backend.found()
        findings = compare(before, found, await self._workers())
        await self._expect_whole()
        if ask:
            # Concurrently: each query may take up to ANSWER_S, and the gateway does not serve yet.
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
            except BackendError as error:  # its sessions have ended; the next audit removes its container
                logger.warning("worker_not_stopped worker=%s error=%s", id, error)
        for id in findings.adopted if ask else ():
            logger.info("worker_adopted environment=%s worker=%s", before[id].environment, id)
        return findings, {entry.id: entry.environment for entry in found if entry.id in findings.orphans}

    async def _remove(self, orphans: Mapping[WorkerId, EnvironmentName], undoing_s: float) -> tuple[WorkerId, ...]:
        """Remove the *orphans* that no replica is removing, and return their ids."""
        left = await self._still_there(tuple(orphans), undoing_s)
        for id in left:
            with contextlib.suppress(GatewayError):
                await self._backend.stop(id)
                self._metrics.worker_orphaned(orphans[id])
                logger.info("worker_removed environment=%s worker=%s reason=orphan", orphans[id], id)
        return left

    async def _still_there(self, ids: tuple[WorkerId, ...], within_s: float) -> tuple[WorkerId, ...]:
        """Return the *ids* that the backend still has after *within_s* seconds and that the store does not know."""
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
        """Check that the store is complete.

        Raises:
            StoreUnavailable: The store lost its data, so that workers missing in it are not orphans.
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
            return True  # a paused worker can't answer before it is resumed
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._upstreams[environment.wire].alive(worker, environment)
        except (GatewayError, TimeoutError) as error:
            logger.warning("worker_silent worker=%s error=%s", worker.id, error)
            return False
        return True

"""Compares the backend's workers with the store's; adopts what matches and removes what does not.

Runs once before the control loop begins, so that a restarted gateway finds its sessions where they were, and then
every `EVERY_S` seconds in the replica that leads, for what an engine's event told nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from gateway.catalog import Catalog
from gateway.core.errors import BackendError, GatewayError, StoreUnavailable
from gateway.core.model import Found, Wire, Worker, WorkerId, WorkerState
from gateway.core.ports import Backend, Store, Upstream
from gateway.observe.metrics import Metrics

logger = logging.getLogger(__name__)

EVERY_S = 30.0
ANSWER_S = 5.0
"""A worker that serves sessions answers within milliseconds; one that does not within this is given up at start."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What an audit is to do."""

    orphans: tuple[WorkerId, ...]
    """Known to the backend only, or dead: remove."""
    lost: tuple[WorkerId, ...]
    """Known to the store only, or dead: end their sessions."""
    adopted: tuple[WorkerId, ...]
    """Known to both, and running."""


def compare(before: Mapping[WorkerId, Worker], found: list[Found], after: Mapping[WorkerId, Worker]) -> Findings:
    """Decide from two looks at the store with one at the backend between them.

    A worker that came or went during the audit is in one of the looks only, and is left alone: only what was ready in
    the first look can be lost, and only what is in neither is an orphan.
    """
    running = {entry.id for entry in found if entry.running}
    settled = {id for id, worker in before.items() if worker.state is not WorkerState.STARTING}
    lost = settled - running
    return Findings(
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
        upstreams: Mapping[Wire, Upstream],
        catalog: Catalog,
        lost: Callable[[WorkerId], Awaitable[None]],
        metrics: Metrics,
        replica: str,
        lead_s: float,
    ) -> None:
        """*lost* ends a worker that is gone, as the control loop does."""
        self._store = store
        self._backend = backend
        self._upstreams = upstreams
        self._catalog = catalog
        self._lost = lost
        self._metrics = metrics
        self._replica = replica
        self._lead_s = lead_s

    async def once(self, *, ask: bool = False) -> Findings:
        """Compare and mend; with *ask*, adopted workers must answer too. The store must be whole."""
        before = await self._workers()
        found = await self._backend.found()
        findings = compare(before, found, await self._workers())
        if not (await self._store.lead(self._replica, ttl_s=self._lead_s)).is_whole:
            # It lost its data, maybe between the two looks: what it lacks is no orphan.
            raise StoreUnavailable("the store is being rebuilt")
        if ask:
            # All at once: each may take as long as it likes up to ANSWER_S, and the gateway does not serve yet.
            answers = await asyncio.gather(*(self._answers(before[id]) for id in findings.adopted))
            silent = [id for id, answered in zip(findings.adopted, answers, strict=True) if not answered]
            findings = Findings(
                orphans=findings.orphans,
                lost=(*findings.lost, *silent),
                adopted=tuple(id for id in findings.adopted if id not in silent),
            )
        for id in findings.lost:
            try:
                await self._lost(id)
            except BackendError as error:  # its sessions are ended; what is left of it is the next audit's
                logger.warning("worker_not_stopped worker=%s error=%s", id, error)
        kinds = {entry.id: entry.environment for entry in found}
        for id in findings.orphans:
            with contextlib.suppress(GatewayError):
                await self._backend.stop(id)
                self._metrics.worker_orphaned(kinds[id])
                logger.info("worker_removed environment=%s worker=%s reason=orphan", kinds[id], id)
        for id in findings.adopted if ask else ():
            logger.info("worker_adopted environment=%s worker=%s", before[id].environment, id)
        return findings

    async def run(self) -> None:
        """Repeat while this replica leads, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                lead = await self._store.lead(self._replica, ttl_s=self._lead_s)
                if lead.fence and lead.is_whole:
                    await self.once()
            except (StoreUnavailable, BackendError) as error:
                logger.warning("audit_put_off error=%s", error)
            except Exception:  # protects the next audit
                logger.exception("audit_failed")

    async def _workers(self) -> dict[WorkerId, Worker]:
        loads = await self._store.load()
        return {entry.worker.id: entry.worker for load in loads.values() for entry in load.workers}

    async def _answers(self, worker: Worker) -> bool:
        environment = self._catalog.get(worker.environment)
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

"""Rebuilds a store that lost its data, from the backend's workers, their lists of sessions, and the replicas' caches.

Part of the control loop. Until the rebuild ends, the store grants no slot, expires no session and reports no session as
unknown (see `gateway.core.ports.store.LeaderStore`). Calls in cached sessions continue. The leader has three sources:

* The backend's workers, by their labels.
* The session lists of workers of the gateway's own images, with their record of each session. These workers' sessions
  are known exactly, so they continue to take sessions.
* The sessions that each replica has cached, for workers without such a list. Such a worker may hold further sessions,
  so it takes no more, and stops when its last session has ended. An external server is the exception: it can't be
  replaced, and reports itself when it is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Final

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment, UpstreamKind
from gateway.core.errors import GatewayError
from gateway.core.ids import SessionId, WorkerId
from gateway.core.ports.backend import Backend
from gateway.core.ports.store import Store
from gateway.core.ports.upstream import WorkerUpstream
from gateway.core.session import CloseReason, SessionState
from gateway.core.worker import BackendWorker, Worker, WorkerSession, WorkerState
from gateway.sessions.cache import SessionCache
from gateway.sessions.closing import SessionCloser

logger = logging.getLogger(__name__)

ASK_S: Final = 5.0
"""Seconds that a worker has to list its sessions. A worker that does not answer is not adopted, and the audit removes
it. If an older state of the store knows the worker, it takes no more sessions."""
ASKED_AT_ONCE: Final = 32
GRACE_S: Final = 2.0
"""Seconds that other replicas have to restore their cached sessions, if workers do not list all sessions. Each replica
checks the store every 0.5 s."""
HANDED_IN: Final = 500
"""Maximum number of sessions in one request to the store."""


class StoreRecovery:
    """Restores workers and sessions in a store that lost them."""

    def __init__(
        self,
        *,
        store: Store,
        backend: Backend,
        upstreams: Mapping[UpstreamKind, WorkerUpstream],
        catalog: Catalog,
        closer: SessionCloser,
        cache: SessionCache,
    ) -> None:
        """*cache*: the sessions that this replica serves."""
        self._store = store
        self._backend = backend
        self._upstreams = upstreams
        self._catalog = catalog
        self._closer = closer
        self._cache = cache
        self._handed_in: set[str] = set()
        """Leases of the restored sessions."""

    def begin_anew(self) -> None:
        """Forget which sessions were restored: the store is complete, or did not answer once more."""
        self._handed_in.clear()

    async def hand_in(self) -> None:
        """Restore the sessions that this replica serves, as far as the store knows their workers again."""
        missing = [
            one for one in self._cache.sessions() if one.state is SessionState.OPEN and one.lease not in self._handed_in
        ]
        leases = {one.id: one.lease for one in missing}
        for start in range(0, len(missing), HANDED_IN):
            for id in await self._store.restore(missing[start : start + HANDED_IN]):
                self._handed_in.add(leases[id])

    async def lead(self, fence: int, *, spare: Container[object] = ()) -> None:
        """Rebuild the store and mark it complete. *spare*: workers that are just being started or stopped.

        Raises:
            NotLeading, StoreUnavailable, BackendError: The store is still incomplete. Call this again.
        """
        began_at = time.monotonic()
        found = [one for one in await self._backend.found() if one.running and one.id not in spare]
        found += self._static()
        free = asyncio.Semaphore(ASKED_AT_ONCE)

        async def taken_back(one: BackendWorker) -> tuple[int, bool]:
            async with free:
                return await self._take_back(one, fence)

        taking = [asyncio.ensure_future(taken_back(one)) for one in found]
        try:
            taken = await asyncio.gather(*taking)
        finally:
            for one in taking:
                one.cancel()
            await asyncio.gather(*taking, return_exceptions=True)
        if not all(is_exact for _, is_exact in taken):
            while time.monotonic() - began_at < GRACE_S:
                await self.hand_in()
                await asyncio.sleep(GRACE_S / 4)
        await self._store.rebuilt(fence=fence)
        logger.warning(
            "store_rebuilt workers=%s sessions=%s seconds=%.1f",
            len(found),
            sum(count for count, _ in taken),
            time.monotonic() - began_at,
        )

    def _static(self) -> list[BackendWorker]:
        """Return the external servers as workers. Their ids can be derived without the store."""
        return [
            BackendWorker(
                id=static_worker(environment).id,
                environment=environment.name,
                digest=environment.digest(),
                address=environment.server.url,
                running=True,
            )
            for environment in self._catalog
            if environment.server.url
        ]

    async def _take_back(self, found: BackendWorker, fence: int) -> tuple[int, bool]:
        """Register a running worker with its sessions. Return their number, and True if it can hold no others."""
        environment = self._catalog.known.get(found.environment)
        if environment is None:
            return 0, True  # its environment left the catalog: the audit removes the worker
        worker = Worker(
            id=found.id,
            environment=environment.name,
            digest=found.digest,
            slots=environment.pool.slots,
            max_uses=environment.pool.max_uses,
            address=found.address,
            state=WorkerState.READY,
        )
        try:
            listed = await self._listed(worker, environment)
        except (GatewayError, TimeoutError) as error:
            logger.warning("worker_not_taken_back environment=%s worker=%s error=%s", environment.name, found.id, error)
            # An older state of the store may list it with sessions and slots that it does not have any more.
            if not environment.server.url:
                await self._store.drain_worker(worker.id, fence=fence)
            return 0, False
        known = [one.session for one in listed or () if one.session is not None]
        is_exact = listed is not None and len(known) == len(listed)
        if not is_exact and not environment.server.url:
            worker = replace(worker, state=WorkerState.DRAINING)
        held = await self._store.adopt(worker, known, fence=fence)
        logger.info("worker_taken_back environment=%s worker=%s sessions=%s", environment.name, found.id, len(held))
        there = {one.id for one in listed or ()}
        if listed is not None and not there.issuperset(held):
            await self._end_strangers(worker, environment, [id for id in held if id not in there])
        return len(held), is_exact

    async def _listed(self, worker: Worker, environment: Environment) -> list[WorkerSession] | None:
        if environment.pool.pause_idle_s:
            await self._backend.resume(worker.id)  # it may be paused, which the store has forgotten
        if environment.wire is not UpstreamKind.OWN:
            return None  # the upstream of a standard server knows running calls at most, which is not a complete list
        async with asyncio.timeout(ASK_S):  # no Redis in here
            return await self._upstreams[environment.wire].sessions(worker, environment)

    async def _end_strangers(self, worker: Worker, environment: Environment, ids: Iterable[SessionId]) -> None:
        """End sessions that only an older state of the store lists, and that their worker does not hold any more."""
        found = []
        for id in ids:
            with contextlib.suppress(GatewayError):
                found.append(await self._store.find(id))
        # A second list, after `find`: an opening may have reached the worker and completed since the first list.
        still = [session for session in found if session.state is SessionState.OPEN]
        try:
            listed = await self._listed(worker, environment) if still else []
        except (GatewayError, TimeoutError):
            return  # these sessions expire later
        there = {one.id for one in listed or ()}
        for session in still:
            if session.id not in there:
                with contextlib.suppress(GatewayError):
                    ended = await self._store.begin_close(session.id, CloseReason.WORKER_LOST, lease=session.lease)
                    if ended is not None:
                        await self._closer.finish(ended, environment)


def static_worker(environment: Environment) -> Worker:
    """Return the worker that represents an external server, the same at every replica and after each data loss."""
    return Worker(
        id=WorkerId(f"static-{environment.digest()}"),
        environment=environment.name,
        digest=environment.digest(),
        slots=environment.pool.slots,
        max_uses=environment.pool.max_uses,
    )

"""Elects the leader: the one replica that runs the control loop and rebuilds a store that lost its data."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Final

import anyio

from gateway.core.errors import BackendError, NotLeading, StoreUnavailable
from gateway.core.leader_lease import LEASE_S, LeaderLease
from gateway.core.ports.store import LeaderStore
from gateway.metrics import Metrics
from gateway.pool.background import BackgroundTasks
from gateway.pool.recovery import StoreRecovery
from gateway.pool.starts import WorkerStarts
from gateway.pool.stops import WorkerStops

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.5
"""Seconds between two tries to rebuild the store, and between two checks whether another replica rebuilt it."""
COMPLETE_S: Final = 30.0
"""Maximum seconds that a starting gateway waits for a complete store."""
END_S: Final = 30.0
"""Maximum seconds that a cancelled start waits for the end of its own recovery."""


class Leadership:
    """Takes and keeps the lead, and ensures that the store is complete."""

    def __init__(
        self,
        *,
        store: LeaderStore,
        replica: str,
        lease: LeaderLease,
        recovery: StoreRecovery,
        starts: WorkerStarts,
        stops: WorkerStops,
        tasks: BackgroundTasks,
        metrics: Metrics,
    ) -> None:
        """*replica*: the unique name of this process."""
        self._store = store
        self.replica = replica
        self._lease = lease
        self._recovery = recovery
        self._starts = starts
        self._stops = stops
        self._tasks = tasks
        self._metrics = metrics
        self._rebuild: asyncio.Task[None] | None = None

    @property
    def fence(self) -> int:
        """The fence of this replica's lead; 0 while another replica leads, as far as this replica knows."""
        return self._lease.fence

    async def renew(self) -> bool:
        """Take or keep the lead. Return True if the store is complete, so that decisions can rely on it.

        If the store is incomplete, each replica puts the sessions that it serves back into it, and the leader starts to
        rebuild it.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        asked_at = time.monotonic()
        lead = await self._store.lead(self.replica, ttl_s=LEASE_S)
        is_new = self._lease.renew(lead, asked_at=asked_at)
        self._metrics.leads(bool(lead.fence), is_whole=lead.is_whole)
        if is_new:
            logger.info("lead_taken replica=%s fence=%s", self.replica, lead.fence)
        if lead.is_whole:
            self._recovery.begin_anew()
            return True
        await self._recovery.hand_in()
        if lead.fence and (self._rebuild is None or self._rebuild.done()):
            self._rebuild = self._tasks.spawn(self._rebuilt(lead.fence))
        return False

    async def until_complete(self) -> None:
        """Wait until the store is complete, and rebuild it if this replica leads. Call this before the first audit.

        Raises:
            StoreUnavailable: The store was not rebuilt within `COMPLETE_S`, or does not answer.
        """
        deadline = time.monotonic() + COMPLETE_S
        try:
            while not await self.renew():
                if time.monotonic() > deadline:
                    raise StoreUnavailable("the store is being rebuilt")
                if self._rebuild is not None:
                    await asyncio.wait({self._rebuild}, timeout=RETRY_S)
                else:
                    await asyncio.sleep(RETRY_S)
        except BaseException:  # includes a cancellation: without `ControlLoop.run`, nothing else ends the rebuild
            if self._rebuild is not None:
                self._rebuild.cancel()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait({self._rebuild}, timeout=END_S)
            raise

    def store_lost(self) -> None:
        """Note that the store did not answer: it may have lost the restored sessions."""
        self._recovery.begin_anew()

    async def resign(self) -> None:
        """Give up the lead, if this replica has it, so that another replica can lead immediately."""
        if self._lease.fence:
            with contextlib.suppress(StoreUnavailable):
                await self._store.resign(self.replica)

    async def _rebuilt(self, fence: int) -> None:
        try:
            await self._recovery.lead(fence, spare=self._starts.ids() | self._stops.ids())
        except (StoreUnavailable, NotLeading, BackendError) as error:
            logger.warning("store_not_rebuilt error=%s", error)  # the next turn tries again
            await asyncio.sleep(RETRY_S)
        else:
            self._tasks.wake()

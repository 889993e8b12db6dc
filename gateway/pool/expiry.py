"""Ends sessions whose time has passed; part of the control loop.

A late session's worker is asked first: a call of a trainer that hung up, or of a replica that died, is known to the
worker only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from gateway.catalog.catalog import Catalog
from gateway.core.environment import UpstreamKind
from gateway.core.errors import GatewayError, StoreUnavailable
from gateway.core.ids import WorkerId
from gateway.core.ports.store import Store
from gateway.core.ports.upstream import WorkerUpstream
from gateway.core.session import Activity, Session
from gateway.pool.background import BackgroundTasks
from gateway.sessions.closing import SessionCloser

logger = logging.getLogger(__name__)

AT_ONCE: Final = 1000
"""Sessions that one turn ends; where there were as many the next turn begins as soon as their workers were asked."""
ASK_S: Final = 3.0
"""How long a worker has to say which of its sessions are busy; it answers from memory."""


class Expiry:
    """Finds what is late, asks, and ends it."""

    def __init__(
        self,
        *,
        store: Store,
        upstreams: Mapping[UpstreamKind, WorkerUpstream],
        catalog: Catalog,
        closer: SessionCloser,
        tasks: BackgroundTasks,
    ) -> None:
        self._store = store
        self._upstreams = upstreams
        self._catalog = catalog
        self._closer = closer
        self._tasks = tasks
        self._asking: set[WorkerId] = set()

    async def turn(self) -> None:
        """Look once; the rest goes on behind."""
        late: defaultdict[WorkerId, list[Session]] = defaultdict(list)
        found = await self._store.late(AT_ONCE)
        for session in found:
            late[session.worker].append(session)
        for id, sessions in late.items():
            if id not in self._asking:
                # Each worker by itself: one that does not answer holds up neither the others nor this loop.
                self._asking.add(id)
                self._tasks.spawn(self._expire_in(id, sessions, is_all=len(found) < AT_ONCE))
        for session in await self._store.due(AT_ONCE):
            self._tasks.spawn(self._finish(session))

    async def _expire_in(self, id: WorkerId, late: list[Session], *, is_all: bool) -> None:
        """End a worker's late sessions, but for those that it says are not; *is_all*: there were no others."""
        try:
            await self._ask(id, late)
            for session in await self._store.expire([session.id for session in late]):
                self._tasks.spawn(self._finish(session))
        except StoreUnavailable as error:
            logger.warning("store_unavailable during=expiry error=%s", error)  # late still, at the next turn
        else:
            if not is_all:
                self._tasks.wake()
        finally:
            self._asking.discard(id)

    async def _ask(self, id: WorkerId, late: list[Session]) -> None:
        """Renew late sessions whose worker says that a call runs, or ended less than their idle time ago."""
        environment = self._catalog.known.get(late[0].environment)
        record = await self._store.worker(id)
        if environment is None or record is None:
            return
        try:
            async with asyncio.timeout(ASK_S):
                ids = {session.id for session in late}
                known = await self._upstreams[environment.wire].sessions(record, environment, ids)
        except (GatewayError, TimeoutError) as error:
            logger.warning("worker_not_asked worker=%s error=%s", id, error)
            return
        await self._store.touch(
            [Activity(one.id, 0.0 if one.busy else one.idle_s) for one in known or () if one.id in ids]
        )

    async def _finish(self, session: Session) -> None:
        environment = self._catalog.known.get(session.environment)
        with contextlib.suppress(StoreUnavailable):  # due again after a while
            if environment is None:  # no longer on offer: its worker is being dropped, and its sessions with it
                await self._store.release(session.id, session.lease)
            else:
                await self._closer.finish(session, environment)

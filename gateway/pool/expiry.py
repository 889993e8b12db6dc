"""Ends sessions whose deadline has passed. Part of the control loop.

It queries a late session's worker first: after a trainer's disconnect or a replica's death, only the worker knows of a
running call.
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
"""Maximum number of sessions per turn. If a turn reaches it, the next turn starts as soon as a worker has answered."""
ASK_S: Final = 3.0
"""Seconds that a worker has to list its busy sessions. It answers from memory."""


class Expiry:
    """Finds late sessions, queries their workers, and ends idle ones."""

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
        """Find late and due sessions once, and end them in the background. Raises ``StoreUnavailable``."""
        late: defaultdict[WorkerId, list[Session]] = defaultdict(list)
        found = await self._store.late(AT_ONCE)
        for session in found:
            late[session.worker].append(session)
        for id, sessions in late.items():
            if id not in self._asking:
                # One task per worker: a worker that does not answer delays neither the other workers nor this loop.
                self._asking.add(id)
                self._tasks.spawn(self._expire_in(id, sessions, is_all=len(found) < AT_ONCE))
        for session in await self._store.due(AT_ONCE):
            self._tasks.spawn(self._finish(session))

    async def _expire_in(self, id: WorkerId, late: list[Session], *, is_all: bool) -> None:
        """End a worker's late sessions unless it reports them as active. *is_all*: the turn found all late sessions."""
        try:
            await self._ask(id, late)
            for session in await self._store.expire([session.id for session in late]):
                self._tasks.spawn(self._finish(session))
        except StoreUnavailable as error:
            logger.warning("store_unavailable during=expiry error=%s", error)  # the next turn finds them again
        else:
            if not is_all:
                self._tasks.wake()
        finally:
            self._asking.discard(id)

    async def _ask(self, id: WorkerId, late: list[Session]) -> None:
        """Renew late sessions in which, as their worker reports, a call runs, or ended less than the idle time ago."""
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
        with contextlib.suppress(StoreUnavailable):  # the session becomes due again later
            if environment is None:  # it left the catalog: its workers are being stopped, with their sessions
                await self._store.release(session.id, session.lease)
            else:
                await self._closer.finish(session, environment)

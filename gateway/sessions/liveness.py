"""Workers that answer nothing although they run: paused, starved or stuck. They are *suspect* until they answer again.

Noticed where a session is opened in one, and asked from then on by the control loop. The server of our own images
answers beside whatever its environments do, and ends a session that it opens late by its lease: there the opening goes
to another worker. A server of somebody else's may answer nothing while it works, and may have begun to open: there the
opening goes on, and no others are begun.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment, Wire
from gateway.core.errors import GatewayError, StoreUnavailable, UpstreamGone, UpstreamTimeout
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.ports.store import Store
from gateway.core.ports.upstream import Upstream
from gateway.core.session import Session
from gateway.core.worker import EnvironmentLoad, Worker, WorkerState
from gateway.pool.background import LoopTasks

logger = logging.getLogger(__name__)

SUSPECT_S: Final = 3.0
"""How long a worker may take to open a session before it is asked whether it answers, and again after each answer."""
ANSWER_S: Final = 2.0
"""How long it has for that answer; it takes a millisecond."""
REPLACED_S: Final = 15.0
"""A suspect worker that holds no session is replaced after this long."""


class WorkerSilent(UpstreamTimeout):
    """A worker answers nothing. What it was asked may run once it goes on."""


class Watch:
    """A context in which a session is opened in its worker, which is asked for a sign of life where that takes long.

    Args:
        limit: Ended early where a worker of our own images answers nothing.
        suspected: Called once where a worker of somebody else's image answers nothing; the opening goes on.
    """

    def __init__(
        self,
        limit: asyncio.Timeout,
        session: Session,
        environment: Environment,
        upstream: Upstream,
        *,
        suspected: Callable[[], object],
    ) -> None:
        self.is_silent = False
        self._limit = limit
        self._suspected = suspected
        self._session = session
        self._environment = environment
        self._upstream = upstream
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> Watch:
        # A timer: a task would cost each opening.
        self._timer = asyncio.get_running_loop().call_later(SUSPECT_S, self._begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        session = self._session
        worker = Worker(id=session.worker, environment=session.environment, digest="", slots=1, address=session.address)
        if await answers(worker, self._environment, self._upstream):
            self._timer = asyncio.get_running_loop().call_later(SUSPECT_S, self._begin)
        elif self._environment.wire is not Wire.OWN:
            self._suspected()
        elif not self._limit.expired():
            self.is_silent = True
            self._limit.reschedule(asyncio.get_running_loop().time())


async def answers(worker: Worker, environment: Environment, upstream: Upstream) -> bool:
    """Whether *worker* answers anything within `ANSWER_S`."""
    try:
        async with asyncio.timeout(ANSWER_S):
            # Also of one that is busy: what is meant is whether it would take a session now.
            await upstream.alive(worker, environment, busy_counts=False)
    except (UpstreamGone, UpstreamTimeout, TimeoutError):
        return False
    except GatewayError:
        return True
    return True


class Suspects:
    """Asks suspect workers, for `gateway.pool.loop.Pool`: one that answers takes sessions again."""

    def __init__(
        self,
        *,
        store: Store,
        upstreams: Mapping[Wire, Upstream],
        catalog: Catalog,
        tasks: LoopTasks,
    ) -> None:
        self._store = store
        self._upstreams = upstreams
        self._catalog = catalog
        self._tasks = tasks
        self._since: dict[WorkerId, float] = {}
        self._asking: set[WorkerId] = set()

    async def turn(self, loads: Mapping[EnvironmentName, EnvironmentLoad], fence: int) -> None:
        """Ask each suspect worker, behind; drain those that hold nothing and were silent for long.

        Raises:
            NotLeading, StoreUnavailable: the next turn goes on.
        """
        now = time.monotonic()
        suspects = {
            entry.worker.id: entry
            for load in loads.values()
            for entry in load.workers
            if entry.worker.state is WorkerState.SUSPECT
        }
        self._since = {id: self._since.get(id, now) for id in suspects}
        for id, entry in suspects.items():
            environment = self._catalog.get(entry.worker.environment)
            if environment is None:
                continue  # it is being dropped
            # A server that somebody else runs is not replaced: there is no other one.
            is_over = now - self._since[id] > REPLACED_S and entry.used == 0 and not environment.server.url
            if is_over and await self._store.drain_worker(id, only_if_idle=True, fence=fence):
                logger.warning("worker_given_up environment=%s worker=%s", environment.name, id)
                self._tasks.wake()
            elif id not in self._asking:
                self._asking.add(id)
                self._tasks.spawn(self._ask(entry.worker, environment))

    async def _ask(self, worker: Worker, environment: Environment) -> None:
        try:
            if await answers(worker, environment, self._upstreams[environment.wire]):
                await self._store.wake_worker(worker.id)
                logger.info("worker_answers environment=%s worker=%s", environment.name, worker.id)
        except StoreUnavailable as error:
            logger.warning("store_unavailable during=wake error=%s", error)  # it is asked again at the next turn
        finally:
            self._asking.discard(worker.id)

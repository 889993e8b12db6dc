"""Starts of workers: each from asking the backend to readiness, or undone; and what their failures mean.

Part of the control loop. Openings that wait for a start that fails, and have nothing else to wait for, fail with it:
with the cause and the last lines of the log. An environment whose workers fail to start again and again has a
*breaker*: openings fail at once with the same, instead of each waiting for the next failure. It opens at `BREAKS`
failures in a row, for as long as the next start is put off; from `TRIALS_ALONE` on it stays open over that start too,
which is then a trial that is begun because somebody asked, and nobody waits for. A worker that becomes ready closes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import anyio

from gateway.core.environment import Environment, UpstreamKind
from gateway.core.errors import BackendError, GatewayError, NotLeading, StartFailed, StoreUnavailable, UpstreamError
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.leader_lease import LeaderLease
from gateway.core.ports.backend import Backend
from gateway.core.ports.store import WorkerStore
from gateway.core.ports.transport import Transport
from gateway.core.ports.upstream import WorkerUpstream
from gateway.core.retry import patiently
from gateway.core.scaling import Demands, backoff_s
from gateway.core.session import CloseReason
from gateway.core.worker import Death, EnvironmentLoad, Worker, WorkerState
from gateway.metrics import Metrics, start_outcome

logger = logging.getLogger(__name__)

STARTS_AT_ONCE: Final = 8
"""Of one engine; more than 8 starts under way only add latency: it manages 5 to 7 a second."""
BREAKS: Final = 2
"""Failures in a row from which on openings fail at once while the next start is put off; one may be a fluke."""
AWAY_PAUSE_S: Final = 1.0
"""Between two starts while the engine does not answer."""
TRIALS_ALONE: Final = 3
"""Failures in a row from which on openings do not wait for the outcome of the next start."""
LOG_LINES: Final = 20


@dataclass(slots=True)
class _Failures:
    """What went wrong with an environment's starts of late."""

    count: int = 0
    """In a row."""
    last_at: float = 0.0
    not_before: float = 0.0
    """When the next start may begin, by this process's clock."""
    arrivals: int | None = None
    """``EnvironmentLoad.arrivals`` when the last one was noted: more since then means that somebody asks."""


class WorkerStarts:
    """Starts workers, at most `STARTS_AT_ONCE` of them at each engine at one time."""

    def __init__(
        self,
        *,
        store: WorkerStore,
        backend: Backend,
        upstreams: Mapping[UpstreamKind, WorkerUpstream],
        transport: Transport,
        metrics: Metrics,
        lease: LeaderLease,
        demands: Demands,
    ) -> None:
        """*demands* remember how long starts take."""
        self._store = store
        self._backend = backend
        self._upstreams = upstreams
        self._transport = transport
        self._metrics = metrics
        self._lease = lease
        self._demands = demands
        self._under_way: dict[WorkerId, asyncio.Future[Death]] = {}
        self._failures: dict[EnvironmentName, _Failures] = {}
        self._at_engine = asyncio.Semaphore(STARTS_AT_ONCE)
        self._engines = 1
        self._is_ending = False

    def __contains__(self, id: object) -> bool:
        """Whether worker *id* is being started here."""
        return id in self._under_way

    def ids(self) -> frozenset[WorkerId]:
        """The workers that are being started here now."""
        return frozenset(self._under_way)

    def end(self) -> None:
        """Count no failures from now on: starts are being cancelled."""
        self._is_ending = True

    def died(self, death: Death) -> None:
        """Tell the start of a worker that it died."""
        dying = self._under_way[death.id]
        if not dying.done():
            dying.set_result(death)

    def give_up(self, id: WorkerId) -> None:
        """End the start of a worker that was drained meanwhile; that is no failure."""
        dying = self._under_way[id]
        if not dying.done():
            dying.set_exception(_GivenUp())
            dying.exception()  # looked at: the start may end before it looks

    # -- when -----------------------------------------------------------------------------------------------------

    def is_put_off(self, name: EnvironmentName) -> bool:
        """Whether the next start has to wait, as the last ones failed."""
        failures = self._failures.get(name)
        return failures is not None and time.monotonic() < failures.not_before

    def is_trial(self, name: EnvironmentName) -> bool:
        """Whether the last start failed, so that one at a time should be tried."""
        return name in self._failures

    def wants_trial(self, name: EnvironmentName, load: EnvironmentLoad) -> bool:
        """Whether a start should be tried although nobody waits: openings came, and were refused at once."""
        failures = self._failures.get(name)
        if failures is None or failures.count < TRIALS_ALONE or _is_alive(load):
            return False
        if failures.arrivals is None or load.arrivals < failures.arrivals:
            failures.arrivals = load.arrivals
        return load.arrivals > failures.arrivals

    # -- a start --------------------------------------------------------------------------------------------------

    async def begin(self, worker: Worker) -> None:
        """Note *worker* in the store, as one that starts; `run` does the rest.

        Raises:
            NotLeading, StoreUnavailable: it was not noted.
        """
        self._under_way[worker.id] = asyncio.get_running_loop().create_future()
        try:
            await self._store.add_worker(worker, fence=self._lease.fence)
        except BaseException:
            del self._under_way[worker.id]
            raise

    async def run(self, worker: Worker, environment: Environment) -> None:
        """Start *worker* and wait for its readiness; what fails is undone and counted."""
        began_at = time.monotonic()
        try:
            self._count_engines()
            async with self._at_engine:  # of the engine only: workers that never get ready must not hold up others
                address = await self._backend.start(worker, environment, self._lease)
            slots = await self._until_ready(replace(worker, address=address), environment)
            await self._tell_ready(worker.id, address, slots)
            if self._under_way[worker.id].done():
                raise _died(self._under_way[worker.id].result(), "just as it became ready")
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await self._undo(worker, environment, error, began_at)
            if not isinstance(error, Exception):
                raise
        else:
            start_s = time.monotonic() - began_at
            self._failures.pop(environment.name, None)
            self._metrics.worker_started(environment.name, "ready", start_s)
            self._demands.started(environment.name, start_s)
            logger.info("worker_ready environment=%s worker=%s start_s=%.3f", environment.name, worker.id, start_s)
        finally:
            self._under_way.pop(worker.id, None)

    def _count_engines(self) -> None:
        """Make room for the starts of engines that came; those of engines that went may queue at the others."""
        for _ in range(self._engines, self._backend.engines()):
            self._engines += 1
            for _ in range(STARTS_AT_ONCE):
                self._at_engine.release()

    async def _until_ready(self, worker: Worker, environment: Environment) -> int:
        """Wait for readiness, the end of the environment's start time, or the worker's death, whichever is first.

        Returns the capacity that the worker told, or 0.
        """
        ready = asyncio.ensure_future(self._upstreams[environment.wire].ready(worker, environment))
        died = self._under_way[worker.id]
        try:
            limit_s = environment.timeouts.start_s
            done, _ = await asyncio.wait((ready, died), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if ready in done:
                return ready.result()
            if died in done:
                raise _died(died.result(), "before it was ready")
            raise StartFailed(f"it was not ready within {limit_s:g} s", reason="timeout")
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)

    async def _tell_ready(self, id: WorkerId, address: str, slots: int) -> None:
        """Have the store hand out the slots of a worker, patiently: they may be handed out though nobody heard of it.

        Raises:
            BackendError: the store does not know it: it was removed, or lost with the store's data.
            StoreUnavailable: it does not answer for long.
        """
        if await patiently(partial(self._store.worker_ready, id, address, slots=slots)):
            return
        # Another leader that rebuilt the store may have found it running, and taken it back: it serves sessions by now.
        # One that found it starting has given it up, as an operator's restart has, and it has no address.
        known = await patiently(partial(self._store.worker, id))
        if known is not None and known.state is WorkerState.DRAINING and not known.address:
            raise _GivenUp
        if known is None or not known.address:
            raise BackendError("the worker was removed while it started")

    async def _undo(self, worker: Worker, environment: Environment, error: BaseException, began_at: float) -> None:
        name = environment.name
        tail = ""
        with contextlib.suppress(GatewayError):
            tail = (await self._backend.logs(worker.id, lines=LOG_LINES)).strip()
        self._transport.forget(worker.id)
        with contextlib.suppress(GatewayError):
            await self._backend.stop(worker.id)
        is_given_up = isinstance(error, _GivenUp | NotLeading)
        is_counted = isinstance(error, Exception) and not is_given_up and not self._is_ending
        # Counted before the place is free: the next start must find the pause, however soon it is decided on.
        broken_s = self._count(worker, environment, error, tail, began_at) if is_counted else 0.0
        with contextlib.suppress(StoreUnavailable):
            await self._store.remove_worker(worker.id, CloseReason.WORKER_LOST)
        if is_given_up:
            logger.info("worker_stopped environment=%s worker=%s reason=start given up", name, worker.id)
        if is_counted and _is_its_own(error):
            told = f"environment {name!r} does not start: {error}"
            told = told if not tail or tail in told else f"{told}\n{tail}"
            await self._tell(name, told, broken_s)

    def _count(
        self, worker: Worker, environment: Environment, error: BaseException, tail: str, began_at: float
    ) -> float:
        """Count and log a failed start; returns for how long openings are to fail at once (s), 0: not at all."""
        name = environment.name
        if not isinstance(error, GatewayError):
            logger.error("worker_start_broken worker=%s", worker.id, exc_info=error)
        failures = self._failures.setdefault(name, _Failures())
        is_its_own = _is_its_own(error)
        if is_its_own and began_at >= failures.last_at:  # those that began before the last one failed together with it
            failures.count += 1
        failures.last_at = time.monotonic()
        pause_s = backoff_s(failures.count) if is_its_own else AWAY_PAUSE_S
        failures.not_before = failures.last_at + pause_s
        failures.arrivals = None
        self._metrics.worker_started(name, start_outcome(error), 0.0)
        logger.error(
            "worker_start_failed environment=%s worker=%s failures=%s error=%s log=%r",
            name,
            worker.id,
            failures.count,
            error,
            tail,
        )
        if failures.count < BREAKS:
            return 0.0
        return pause_s + (environment.timeouts.start_s if failures.count >= TRIALS_ALONE else 0.0)

    async def _tell(self, name: EnvironmentName, message: str, broken_s: float) -> None:
        """Let openings fail that nothing can serve, as no worker is ready and none starts; for *broken_s* seconds."""
        with contextlib.suppress(StoreUnavailable, NotLeading):
            if _is_alive((await self._store.load()).get(name, EnvironmentLoad())):
                return
            fence = self._lease.fence
            if not fence:
                return  # another replica leads, and starts workers of its own: 0 would say that nobody has to
            await self._store.fail_waiting(name, message, for_s=broken_s, fence=fence)


class _GivenUp(Exception):
    """The worker was drained while it started: it is not wanted any more."""


def _is_its_own(error: BaseException) -> bool:
    """Whether a start failed by the environment's own fault; else the engine or the store is away, and comes back."""
    return isinstance(error, StartFailed | UpstreamError)


def _died(death: Death, when: str) -> StartFailed:
    if death.reason is CloseReason.OUT_OF_MEMORY:
        return StartFailed(f"it ran out of memory {when}", reason=death.reason.value)
    return StartFailed(f"it died {when}" + (f" ({death.detail})" if death.detail else ""))


def _is_alive(load: EnvironmentLoad) -> bool:
    alive = (WorkerState.READY, WorkerState.STARTING, WorkerState.PAUSED, WorkerState.SUSPECT)
    return any(entry.worker.state in alive for entry in load.workers)

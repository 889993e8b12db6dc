"""Starts workers: from the request to the backend until readiness, or the undoing of a failed start.

Part of the control loop. If an environment has no other worker, a failed start fails the openings that wait for it.
Their error has the cause and the last lines of the worker's log.

Each environment has a circuit breaker (*breaker*). While it is open, openings fail immediately with the same error,
instead of waiting for the next failure. It opens after `BREAKS` consecutive failures, until the next start may begin.
From `TRIALS_ALONE` failures on it also stays open during that start. The start is then a trial, which a refused opening
triggers and for which no opening waits. A ready worker closes the breaker.
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
"""Maximum concurrent starts per engine. An engine starts 5 to 7 workers per second, so more only add latency."""
BREAKS: Final = 2
"""Consecutive failures from which openings fail immediately until the next start. A single failure may be chance."""
AWAY_PAUSE_S: Final = 1.0
"""Seconds between two starts while the engine does not answer."""
TRIALS_ALONE: Final = 3
"""Consecutive failures from which openings do not wait for the result of the next start."""
LOG_LINES: Final = 20


@dataclass(slots=True)
class _Failures:
    """The recent failed starts of an environment."""

    count: int = 0
    """Number of consecutive failures."""
    last_at: float = 0.0
    not_before: float = 0.0
    """Monotonic time from which the next start may begin."""
    arrivals: int | None = None
    """``EnvironmentLoad.arrivals`` after the last failure. A higher value since then means new openings."""


class WorkerStarts:
    """Starts workers, at most `STARTS_AT_ONCE` concurrently per engine."""

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
        """*demands*: records how long starts take."""
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
        """Return True if this replica is starting worker *id*."""
        return id in self._under_way

    def ids(self) -> frozenset[WorkerId]:
        """Return the workers that this replica is starting."""
        return frozenset(self._under_way)

    def end(self) -> None:
        """Stop counting failures, because the shutdown cancels starts."""
        self._is_ending = True

    def died(self, death: Death) -> None:
        """Report a worker's death to its start."""
        dying = self._under_way[death.id]
        if not dying.done():
            dying.set_result(death)

    def give_up(self, id: WorkerId) -> None:
        """Cancel the start of a worker that was drained meanwhile, without counting a failure."""
        dying = self._under_way[id]
        if not dying.done():
            dying.set_exception(_GivenUp())
            dying.exception()  # marks it as retrieved: the start may end before it reads the exception

    # -- when -----------------------------------------------------------------------------------------------------

    def is_put_off(self, name: EnvironmentName) -> bool:
        """Return True while the backoff after failed starts delays the next start."""
        failures = self._failures.get(name)
        return failures is not None and time.monotonic() < failures.not_before

    def is_trial(self, name: EnvironmentName) -> bool:
        """Return True if the last start failed, so that starts should run one at a time."""
        return name in self._failures

    def wants_trial(self, name: EnvironmentName, load: EnvironmentLoad) -> bool:
        """Return True if a start should be tried for openings that came and were refused by the open breaker."""
        failures = self._failures.get(name)
        if failures is None or failures.count < TRIALS_ALONE or _is_alive(load):
            return False
        if failures.arrivals is None or load.arrivals < failures.arrivals:
            failures.arrivals = load.arrivals
        return load.arrivals > failures.arrivals

    # -- a start --------------------------------------------------------------------------------------------------

    async def begin(self, worker: Worker) -> None:
        """Register *worker* in the store as ``STARTING``. `run` then starts it.

        Raises:
            NotLeading, StoreUnavailable: The worker is not registered.
        """
        self._under_way[worker.id] = asyncio.get_running_loop().create_future()
        try:
            await self._store.add_worker(worker, fence=self._lease.fence)
        except BaseException:
            del self._under_way[worker.id]
            raise

    async def run(self, worker: Worker, environment: Environment) -> None:
        """Start *worker* and wait for its readiness. A failed start is undone and counted."""
        began_at = time.monotonic()
        try:
            self._count_engines()
            async with self._at_engine:  # not during the wait for readiness: slow workers must not block other starts
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
        """Allow more starts for each new engine. The limit stays when an engine leaves, so starts may queue."""
        for _ in range(self._engines, self._backend.engines()):
            self._engines += 1
            for _ in range(STARTS_AT_ONCE):
                self._at_engine.release()

    async def _until_ready(self, worker: Worker, environment: Environment) -> int:
        """Wait until the worker is ready and return the capacity that it reports, or 0.

        Raises:
            StartFailed: The worker died, or was not ready within the environment's start time.
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
        """Mark a worker ready in the store, with retries, so that the store grants its slots.

        Raises:
            BackendError: The store does not know the worker: it was removed, or lost with the store's data.
            StoreUnavailable: The store does not answer during all retries.
        """
        if await patiently(partial(self._store.worker_ready, id, address, slots=slots)):
            return
        # An earlier try may have succeeded although its answer was lost. Or another leader rebuilt the store, found
        # the worker running and adopted it. In both cases it has an address and may serve sessions. A leader that
        # found it starting, or an operator's restart, has drained it. Then it has no address.
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
        # Before the worker's removal frees its place in the pool: the next start must already find the backoff.
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
        """Count and log a failed start. Return the seconds for which the breaker opens, or 0."""
        name = environment.name
        if not isinstance(error, GatewayError):
            logger.error("worker_start_broken worker=%s", worker.id, exc_info=error)
        failures = self._failures.setdefault(name, _Failures())
        is_its_own = _is_its_own(error)
        if is_its_own and began_at >= failures.last_at:  # starts that overlap count as one failure
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
        """Fail waiting openings and open the breaker for *broken_s* seconds, unless the environment has a worker."""
        with contextlib.suppress(StoreUnavailable, NotLeading):
            if _is_alive((await self._store.load()).get(name, EnvironmentLoad())):
                return
            fence = self._lease.fence
            if not fence:
                return  # another replica leads and starts its own workers; fence 0 would skip the store's check
            await self._store.fail_waiting(name, message, for_s=broken_s, fence=fence)


class _GivenUp(Exception):
    """The worker was drained while it started, because the pool does not need it any more."""


def _is_its_own(error: BaseException) -> bool:
    """Return True if the environment caused the failure, False if the engine or the store does not answer."""
    return isinstance(error, StartFailed | UpstreamError)


def _died(death: Death, when: str) -> StartFailed:
    if death.reason is CloseReason.OUT_OF_MEMORY:
        return StartFailed(f"it ran out of memory {when}", reason=death.reason.value)
    if death.detail == "exit status 0":
        return StartFailed(f"it ended without an error {when}: its program has to serve until SIGTERM, as serve() does")
    return StartFailed(f"it died {when}" + (f" ({death.detail})" if death.detail else ""))


def _is_alive(load: EnvironmentLoad) -> bool:
    alive = (WorkerState.READY, WorkerState.STARTING, WorkerState.PAUSED, WorkerState.SUSPECT)
    return any(entry.worker.state in alive for entry in load.workers)

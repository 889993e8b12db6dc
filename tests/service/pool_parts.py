"""The parts of a gateway that a random walk can break: processes, their outgoing calls, an engine, episodes.

All calls of a replica to its store and its engine go through a `Passage`. It is shut while the process is frozen.
Once the process is dead, every call fails.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from gateway.core.environment import Environment
from gateway.core.episode import StepResult
from gateway.core.errors import GatewayError, StoreUnavailable
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.leader_lease import LeaderLease
from gateway.core.ports.store import Store
from gateway.core.session import Session
from gateway.core.worker import Worker
from gateway.sessions.cache import session_id
from gateway.sessions.service import ActiveSession
from tests.fakes.workers import FakeBackend, FakeWorker
from tests.service.stack import Replica, environment

IDLE_S: Final = 290.0
"""Seconds until an idle session expires. No sum of the test's time steps equals it, so the milliseconds that
Redis' clock adds never decide an expiry."""
STEP_S: Final = 10.0
PAUSING_S: Final = 0.01
"""Seconds that the engine takes to pause a worker: long enough for a trainer to need the worker meanwhile."""
MATH, BIG, SOLO = EnvironmentName("math"), EnvironmentName("math.big"), EnvironmentName("solo")


def environments() -> list[Environment]:
    """Return an environment with shared workers that pause when idle, with a split that has its own workers, and an
    environment with exclusive workers, one of which is kept ready."""
    short: dict[str, Any] = {"idle_s": IDLE_S, "open_s": 15.0, "setup_s": 10.0, "close_s": 5.0}
    math = environment("math", slots=2, max_workers=2, pause_idle_s=30.0, idle_worker_s=150.0, **short)
    big = environment("big", slots=1, max_workers=1, idle_worker_s=90.0, **short)
    solo = environment("solo", slots=1, max_uses=1, max_workers=3, warm=1, idle_worker_s=90.0, **short)
    return [replace(math, splits={"big": big}), solo]


class Passage:
    """The gate through which all outgoing calls of one process pass."""

    def __init__(self) -> None:
        self._is_open = asyncio.Event()
        self._is_open.set()
        self.is_dead = False
        self.under_way = 0
        """Number of calls that passed and have no answer yet, without openings that wait."""

    @property
    def is_frozen(self) -> bool:
        """True while the passage is shut."""
        return not self._is_open.is_set()

    def shut(self) -> None:
        """Hold all further calls and answers: the process is frozen."""
        self._is_open.clear()

    def open(self) -> None:
        """Let all held calls and answers pass."""
        self._is_open.set()

    def die(self) -> None:
        """Fail all further calls: the process is gone, and its clean-up has no effect."""
        self.is_dead = True
        self._is_open.set()

    def of(self, inner: object, error: type[GatewayError]) -> Any:
        """Return *inner* as the process sees it, through this passage."""
        return _Beyond(inner, self, error)

    async def passed(self, error: type[GatewayError]) -> None:
        """Wait until the passage is open. Raise *error* once the process is dead."""
        await self._is_open.wait()
        if self.is_dead:
            raise error("this process is dead")


class _Beyond:
    def __init__(self, inner: object, passage: Passage, error: type[GatewayError]) -> None:
        self._inner = inner
        self._passage = passage
        self._error = error

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._inner, name)
        if not inspect.iscoroutinefunction(inner):
            return inner

        async def called(*arguments: Any, **named: Any) -> Any:
            await self._passage.passed(self._error)
            counts = name != "claim"
            self._passage.under_way += counts
            try:
                answer = await inner(*arguments, **named)
            finally:
                self._passage.under_way -= counts
            await self._passage.passed(self._error)
            return answer

        return called


class Engine(FakeBackend):
    """A backend that remembers every worker it started, and takes `PAUSING_S` to pause a worker."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ever: dict[WorkerId, FakeWorker] = {}

    async def start(self, worker: Worker, environment: Environment, lease: LeaderLease | None = None) -> str:
        """See ``Backend.start``."""
        address = await super().start(worker, environment, lease)
        if worker.id in self.workers:
            self.ever[worker.id] = self.workers[worker.id]
        return address

    async def pause(self, id: WorkerId, lease: LeaderLease | None = None) -> None:
        """See ``Backend.pause``."""
        self._answer()
        await asyncio.sleep(PAUSING_S)
        if id in self.workers:
            self.paused.add(id)

    def calls(self) -> Counter[str]:
        """Return how often each step reached any worker, by its key."""
        return Counter(
            request.headers.get("idempotency-key", "")
            for worker in self.ever.values()
            for request in worker.requests
            if request.target.endswith("/call")
        )


@dataclass(eq=False)
class Process:
    """One gateway process."""

    name: str
    passage: Passage
    store: Store
    """The store itself, which bypasses the passage."""
    gateway: Replica
    loops: list[asyncio.Task[None]] = field(default_factory=list)


@dataclass(eq=False)
class Episode:
    """A session from its trainer's point of view."""

    owner: Owner
    name: str
    kind: EnvironmentName
    process: Process
    creating: asyncio.Task[ActiveSession]
    active_at: float
    """Time of the last activity, in seconds of the store's clock."""
    session: Session | None = None
    stepping: asyncio.Task[StepResult] | None = None
    by: Process | None = None
    """The process that serves the step."""
    doom: str = ""
    """The reason why the session may be gone, or must be gone. Empty while it must exist."""

    @property
    def id(self) -> SessionId:
        return session_id(self.owner, self.name)

    @property
    def is_open(self) -> bool:
        """True if the trainer may rely on the session."""
        return self.session is not None and not self.doom


def error_of(task: asyncio.Task[Any]) -> GatewayError | None:
    """Return the gateway error of a trainer's task, or None. Any other error is raised, and fails the test."""
    if task.cancelled():
        return StoreUnavailable("it was cancelled")
    error = task.exception()
    if error is not None and not isinstance(error, GatewayError):
        raise error
    return error

"""The parts of a gateway that a random walk can break: processes, their way to the outside, an engine, episodes.

All that a replica says to its store and its engine goes through a `Passage`, which is shut while the process is frozen,
and fails all once it is dead.
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
"""Never a sum of the times that pass here: the milliseconds that Redis' clock goes on by itself decide nothing."""
SETTLED_S: Final = 20.0
"""What must come to rest does so in some hundredths of a second; this is for a loaded machine."""
STEP_S: Final = 10.0
PAUSING_S: Final = 0.01
"""How long the engine takes to pause a worker: long enough for somebody to want it meanwhile."""
MATH, BIG, SOLO = EnvironmentName("math"), EnvironmentName("math.big"), EnvironmentName("solo")


def environments() -> list[Environment]:
    """Shared workers that are paused when idle, a split with its own, and exclusive ones of which one is prepared."""
    short: dict[str, Any] = {"idle_s": IDLE_S, "open_s": 15.0, "setup_s": 10.0, "close_s": 5.0}
    math = environment("math", slots=2, max_workers=2, pause_idle_s=30.0, idle_worker_s=150.0, **short)
    big = environment("big", slots=1, max_workers=1, idle_worker_s=90.0, **short)
    solo = environment("solo", slots=1, max_uses=1, max_workers=3, warm=1, idle_worker_s=90.0, **short)
    return [replace(math, splits={"big": big}), solo]


class Passage:
    """What one process says to the outside goes through here."""

    def __init__(self) -> None:
        self._is_open = asyncio.Event()
        self._is_open.set()
        self.is_dead = False
        self.under_way = 0
        """Calls that were let out and are not answered, without openings that wait."""

    @property
    def is_frozen(self) -> bool:
        """Whether it is shut."""
        return not self._is_open.is_set()

    def shut(self) -> None:
        """Hold whatever comes from here on, answers too: the process is frozen."""
        self._is_open.clear()

    def open(self) -> None:
        """Let all of it go on."""
        self._is_open.set()

    def die(self) -> None:
        """Fail all from here on: the process is gone, and its clean-up does nothing any more."""
        self.is_dead = True
        self._is_open.set()

    def of(self, inner: object, error: type[GatewayError]) -> Any:
        """*inner*, as the process sees it."""
        return _Beyond(inner, self, error)

    async def passed(self, error: type[GatewayError]) -> None:
        """Return when it is open; raises *error* once the process is dead."""
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
    """A backend that remembers all workers there ever were, and takes its time to pause one."""

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
        """How often each step came to any worker, by its key."""
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
    """As it really is: not through the passage."""
    gateway: Replica
    loops: list[asyncio.Task[None]] = field(default_factory=list)


@dataclass(eq=False)
class Episode:
    """A session as its trainer knows it."""

    owner: Owner
    name: str
    kind: EnvironmentName
    process: Process
    creating: asyncio.Task[ActiveSession]
    active_at: float
    """When something was done in it last, by the store's clock."""
    session: Session | None = None
    stepping: asyncio.Task[StepResult] | None = None
    by: Process | None = None
    """The process that the step goes by."""
    doom: str = ""
    """Why it may be gone, or must be."""

    @property
    def id(self) -> SessionId:
        return session_id(self.owner, self.name)

    @property
    def is_open(self) -> bool:
        """Whether its trainer may count on it."""
        return self.session is not None and not self.doom


def error_of(task: asyncio.Task[Any]) -> GatewayError | None:
    """What a task of a trainer's failed with; an error that is none of ours is a failure of the test."""
    if task.cancelled():
        return StoreUnavailable("it was cancelled")
    error = task.exception()
    if error is not None and not isinstance(error, GatewayError):
        raise error
    return error

"""Workers: their states, what the store and the backend know of them, and how they die. Frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gateway.core.ids import EnvironmentName, SessionId, WorkerId
from gateway.core.session import CloseReason, Session


class WorkerState(StrEnum):
    """Where a worker is in its life."""

    STARTING = "starting"  #: asked of the backend, not ready yet; holds no session
    READY = "ready"  #: takes sessions
    PAUSED = "paused"  #: idle and frozen: holds no session, and takes none until it is woken
    SUSPECT = "suspect"  #: it does not answer: keeps the sessions it has, and takes no more until it does
    DRAINING = "draining"  #: serves the sessions it has and takes no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A running container, or a local process, of an environment."""

    id: WorkerId
    environment: EnvironmentName
    digest: str
    slots: int
    max_uses: int = 0
    address: str = ""
    """``unix:PATH``, ``tcp:HOST:PORT``, or a static server's URL (``http://…``); empty while it starts."""
    state: WorkerState = WorkerState.STARTING


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A worker as the store sees it."""

    worker: Worker
    used: int
    """Slots that are held."""
    idle_s: float
    """Since when none was held; 0 while one is."""
    age_s: float
    """Since it was added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentLoad:
    """What the control loop decides from, for one environment."""

    workers: tuple[WorkerLoad, ...] = ()
    waiting: int = 0
    """Openings that wait for a slot."""
    to_come: int = 0
    """Openings of groups that have not come yet: slots are kept for them, or waited for."""
    arrivals: int = 0
    """Openings that ever asked for a slot; counts from 0 again where the store lost its data."""
    hits: int = 0
    """Those of them that got one at once."""
    broken_s: float = 0.0
    """How much longer its breaker is open: until then openings that find no free slot fail at once."""

    @property
    def wanted(self) -> int:
        """Slots for openings that wait or are to come."""
        return self.waiting + self.to_come


@dataclass(frozen=True, slots=True)
class Death:
    """A worker that ended, whoever ended it."""

    id: WorkerId
    reason: CloseReason
    """``WORKER_LOST``, or ``OUT_OF_MEMORY`` where the kernel took it for its memory limit."""
    detail: str = ""
    """For logs: the exit status, the signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSession:
    """One entry of a worker's own list of sessions."""

    id: SessionId
    busy: bool
    steps: int
    idle_s: float
    session: Session | None = None
    """The session as the store knew it when it was opened, which the worker kept for us; None: it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTasks:
    """The tasks that an environment's workers know by themselves: built in, or from an operator's modules."""

    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By id; of each what people are shown (``name``, ``description``, ``tags`` …), never the task itself."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Modules that did not import, and why."""
    config_keys: tuple[str, ...] | None = None
    """Keys that the environment reads of an episode's configuration; None: the worker does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendWorker:
    """A worker that the backend knows of."""

    id: WorkerId
    environment: EnvironmentName
    digest: str
    address: str
    running: bool

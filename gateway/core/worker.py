"""Workers: their states, their records in the store and the backend, and their deaths. Frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gateway.core.ids import EnvironmentName, SessionId, WorkerId
from gateway.core.session import CloseReason, Session


class WorkerState(StrEnum):
    """State of a worker's life cycle."""

    STARTING = "starting"  #: requested from the backend, not ready yet; holds no session
    READY = "ready"  #: takes sessions
    PAUSED = "paused"  #: idle and frozen: holds no session, and takes no session until it is woken
    SUSPECT = "suspect"  #: does not answer: keeps its sessions, and takes no more until it answers
    DRAINING = "draining"  #: serves its sessions and takes no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A running container, or a local process, of an environment."""

    id: WorkerId
    environment: EnvironmentName
    digest: str
    slots: int
    max_uses: int = 0
    address: str = ""
    """``unix:PATH``, ``tcp:HOST:PORT``, ``node:NODE/WORKER/SOCKET``, or a static server's URL (``http://…``); empty
    while the worker starts."""
    state: WorkerState = WorkerState.STARTING


def worker_of(session: Session) -> Worker:
    """Return the worker of *session* with the fields that an upstream needs."""
    return Worker(id=session.worker, environment=session.environment, digest="", slots=1, address=session.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A worker and its use, as the store records them."""

    worker: Worker
    used: int
    """Number of slots that sessions hold."""
    idle_s: float
    """Seconds since the worker last held a session; 0 while it holds one."""
    age_s: float
    """Seconds since the worker was added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentLoad:
    """The control loop's input for one environment."""

    workers: tuple[WorkerLoad, ...] = ()
    waiting: int = 0
    """Openings that wait for a slot."""
    to_come: int = 0
    """Openings of groups that have not arrived yet: slots are kept for them, or waited for."""
    over_limit: int = 0
    """Number of the openings in ``waiting`` and ``to_come`` that exceed the limits of their keys. A further slot does
    not serve them: they wait until sessions of their own keys end."""
    arrivals: int = 0
    """Total number of openings that requested a slot within the limits of their keys. It restarts at 0 if the store
    lost its data."""
    hits: int = 0
    """Number of these openings that got a slot immediately."""
    broken_s: float = 0.0
    """Seconds until the environment's circuit breaker closes. Until then, openings that find no free slot fail
    immediately."""
    broken_why: str = ""
    """Why workers do not start, with the last lines of a log. Empty: the breaker is closed."""

    @property
    def wanted(self) -> int:
        """Number of slots for openings that wait or are still to arrive, within the limits of their keys."""
        return self.waiting + self.to_come - self.over_limit


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a worker, whatever caused it."""

    id: WorkerId
    reason: CloseReason
    """``WORKER_LOST``, or ``OUT_OF_MEMORY`` if the kernel killed it for its memory limit."""
    detail: str = ""
    """Exit status or signal, for logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSession:
    """One entry of a worker's own list of sessions."""

    id: SessionId
    busy: bool
    steps: int
    idle_s: float
    session: Session | None = None
    """The store's record of the session when it was opened, which the worker kept; None: the worker kept no record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTasks:
    """The tasks that an environment's workers provide themselves: built in, or from an operator's modules."""

    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By id, the task's public description (``name``, ``description``, ``tags`` …), never the task itself."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Modules that failed to import, each with the reason."""
    config_keys: tuple[str, ...] | None = None
    """Keys that the environment reads from an episode's configuration; None: the worker does not report them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendWorker:
    """A worker that the backend lists."""

    id: WorkerId
    environment: EnvironmentName
    digest: str
    address: str
    running: bool

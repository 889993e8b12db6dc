"""What the memory store keeps of workers and sessions, besides the sessions themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.core.ids import SessionId
from gateway.core.session import CloseReason
from gateway.core.worker import Worker, WorkerState


@dataclass(slots=True)
class Closed:
    """What is remembered of a session that we ended."""

    lease: str
    reason: CloseReason


@dataclass(slots=True)
class MemoryTurns:
    """How many turns a session has had, and the key of the last one."""

    count: int = 0
    key: str = ""


@dataclass(slots=True)
class Held:
    """A worker and the sessions that it holds."""

    worker: Worker
    number: int
    """Workers count up; the older of two has the lower one."""
    added_at: float
    idle_since: float
    uses: int = 0
    sessions: set[SessionId] = field(default_factory=set)

    @property
    def has_room(self) -> bool:
        return self.worker.state is WorkerState.READY and len(self.sessions) < self.worker.slots

    @property
    def room(self) -> int:
        """Sessions that it takes more."""
        if not self.has_room:
            return 0
        room = self.worker.slots - len(self.sessions)
        return min(room, self.worker.max_uses - self.uses) if self.worker.max_uses else room

    @property
    def is_spent(self) -> bool:
        return 0 < self.worker.max_uses <= self.uses

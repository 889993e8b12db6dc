"""Sessions: what opens one, its states, why it ends, and its group. Frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from gateway.core.environment import TaskSpec
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId


class SessionState(StrEnum):
    """Where a session is in its life; it holds a slot in the first three."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


class CloseReason(StrEnum):
    """Why a session ended."""

    DELETED = "deleted"  #: by its trainer; from then on it is "not found"
    CANCELLED = "cancelled"  #: thrown away by its trainer: what was done in it counts for nothing; "not found" too
    EXPIRED = "expired"  #: idle for longer than its environment allows
    WORKER_LOST = "worker_lost"  #: its container or process died
    OUT_OF_MEMORY = "out_of_memory"  #: its container or process died for want of memory
    TIMEOUT = "timeout"  #: a call in it took longer than its environment allows: nobody knows what it did
    AUTHOR_FAULT = "author_fault"  #: the environment author's code failed: a reset, a judge, a tool at the end
    SESSION_FAILED = "session_failed"  #: what it needs in its worker broke: its sandbox, its browser
    OPEN_FAILED = "open_failed"  #: the worker could not set it up, or the trainer hung up before it was open
    SHUTDOWN = "shutdown"  #: the gateway went away together with its local workers
    OPERATOR = "operator"  #: ended by an operator


BY_TRAINER: Final = frozenset((CloseReason.DELETED, CloseReason.CANCELLED))
"""Reasons for which a session is "not found" from then on, as its trainer ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """The wish for a session, as handed to the store."""

    id: SessionId
    name: str
    """The id as the trainer knows it."""
    owner: Owner
    environment: EnvironmentName
    lease: str
    """Unique to this wish: a late release of an earlier holder of the same id cannot touch this one's slot."""
    fingerprint: str
    """Of the request: the same again is an identical retry."""
    idle_s: float
    setup_s: float
    task: str = ""
    """``split/index`` or a task's id, for people; never the task itself."""
    episode: str = ""
    """The trainer's own name for the episode, where its protocol has one that the session's name is not."""
    policy: str = ""
    """The trainer's tag of the policy that plays it; empty: none was given."""
    group: str = ""
    """Of openings that begin together; all of one group have the same owner and environment. Empty: it is by itself."""
    group_size: int = 1
    """How many of it there will be, as far as the environment can hold them at once."""
    together_s: float = 0.0
    """How long slots are kept for its group: until there are enough, and then until all have come."""
    is_use: bool = True
    """Whether it counts against ``max_uses``; False: the gateway asks the worker a question, and opens no session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One episode on one task."""

    id: SessionId
    name: str
    owner: Owner
    environment: EnvironmentName
    lease: str
    fingerprint: str
    idle_s: float
    worker: WorkerId
    address: str
    state: SessionState
    task: str = ""
    episode: str = ""
    policy: str = ""
    reason: CloseReason | None = None
    handle: str = ""
    """What its upstream needs to find the episode again, from any replica; the upstream's own text."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What a replica saw of one session since its last note."""

    id: SessionId
    quiet_s: float
    """Seconds since the end of its last call or touch; 0 while a call runs."""


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session is no longer to be served from a cache; one of its id under another lease is not meant."""

    id: SessionId
    lease: str


@dataclass(frozen=True, slots=True)
class CapacityWanted:
    """An opening waits for a slot of this environment, or a worker of it is to be stopped."""

    environment: EnvironmentName


Notice = SessionEnded | CapacityWanted


@dataclass(frozen=True, slots=True)
class Group:
    """Openings that should begin together, as the episodes of one GRPO group do."""

    name: str
    """Unique among the groups of one owner in one environment."""
    size: int
    """How many openings there will be."""


@dataclass(frozen=True, slots=True)
class GroupMembership:
    """An opening's place in the group of a curriculum's handle."""

    curriculum: str
    handle: int
    member: str
    number: int = -1
    """Of the group's draw; -1: it is not known."""
    group_size: int = 1

    @property
    def group(self) -> Group | None:
        """Those that opened the handle for the same draw."""
        return None if self.number < 0 else Group(f"{self.curriculum}/{self.handle}/{self.number}", self.group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSetup:
    """What a worker needs to set a session up; secrets are neither stored nor shown."""

    spec: TaskSpec
    seed: int | None = None
    config: Mapping[str, Any] | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    split: str = ""
    """Where the task stands, if it was asked for by its place; empty: it was not."""
    index: int | None = None
    """Its place in *split*."""
    episode: str = ""
    """The trainer's own name for the episode, where its protocol has one."""
    toolset: str = ""
    """Further tools of an ORS server's own that the trainer asks for by their name; empty: none."""
    of_split: str = ""
    """The split that the task is of, whoever has it; it decides what resources the session gets. Empty: not known."""
    policy: str = ""
    """The trainer's tag of the policy that plays the episode; empty: none was given."""
    group: Group | None = None
    """That the trainer said; a curriculum's own is its ticket's."""
    ticket: GroupMembership | None = None
    """Of a task that was drawn from a curriculum: the place in its group, to be given back if nothing is opened."""

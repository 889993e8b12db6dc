"""Sessions: the request that opens a session, its states, its end and its group. Frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from gateway.core.environment import Environment, TaskSpec
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId


class SessionState(StrEnum):
    """State of a session's life cycle; a session holds a slot in the first three states."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


class CloseReason(StrEnum):
    """The reason why a session ended."""

    DELETED = "deleted"  #: its trainer ended it; afterwards it is "not found"
    CANCELLED = "cancelled"  #: its trainer discarded it, so its steps do not count; afterwards it is "not found"
    EXPIRED = "expired"  #: idle for longer than its environment allows
    WORKER_LOST = "worker_lost"  #: its container or process died
    OUT_OF_MEMORY = "out_of_memory"  #: its container or process ran out of memory and died
    TIMEOUT = "timeout"  #: a call in it took longer than its environment allows; its effect is unknown
    AUTHOR_FAULT = "author_fault"  #: the environment author's code failed: a reset, a judge, a tool at the end
    SESSION_FAILED = "session_failed"  #: a resource of it in the worker broke: its sandbox, its browser
    OPEN_FAILED = "open_failed"  #: the worker could not set it up, or the trainer disconnected before it was open
    SHUTDOWN = "shutdown"  #: the gateway stopped together with its local workers
    OPERATOR = "operator"  #: an operator ended it


BY_TRAINER: Final = frozenset((CloseReason.DELETED, CloseReason.CANCELLED))
"""Reasons after which a session is "not found", because its trainer ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """A request for a session, as the store receives it."""

    id: SessionId
    name: str
    """The session's id as the trainer knows it."""
    owner: Owner
    environment: EnvironmentName
    lease: str
    """Unique id of this request, from `gateway.sessions.cache.new_lease`. It prevents a late release by an earlier
    session of the same id from freeing this session's slot."""
    fingerprint: str
    """Fingerprint of the request; a request with the same fingerprint is a retry."""
    idle_s: float
    setup_s: float
    task: str = ""
    """Key of the task's name, see `TaskName`."""
    episode: str = ""
    """The trainer's name for the episode, if its protocol has a name apart from the session's."""
    policy: str = ""
    """The trainer's tag of the policy that acts in the session; empty: no tag was given."""
    group: str = ""
    """Name of the group of openings that begin together; empty: no group. All openings of a group have the same owner
    and environment."""
    group_size: int = 1
    """Number of openings in the group, limited to the number that the environment can hold concurrently."""
    together_s: float = 0.0
    """Seconds for which slots are kept for the group: first until there are enough, then until all openings have
    arrived."""
    is_use: bool = True
    """True if the session counts against ``max_uses``. False: the gateway only queries the worker and opens no
    session."""
    max_sessions: int = 0
    """Maximum number of sessions that the owner holds concurrently, in all environments; 0: no limit."""
    max_here: int = 0
    """Maximum number of sessions that the owner holds concurrently in this environment, its share of the pool; 0: no
    limit."""


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
    """Key of the task's name, see `TaskName`."""
    episode: str = ""
    policy: str = ""
    reason: CloseReason | None = None
    handle: str = ""
    """Text of the upstream by which any replica finds the episode again; opaque to the rest of the gateway."""
    scorer: str = ""
    """Version of the code that judges the episode: an own image's hash (64 hexadecimal digits), or a third-party
    image's id (``sha256:…``). Empty: not known, as for an external server."""
    steps_before_late: int | None = None
    """Number of steps before the last ORS call that took too long; None: no call did. Unless the episode has more steps
    at its end, its course is unknown."""
    result: str = ""
    """Summary of the episode that its environment has ended, as ``episode.summary_to_json`` writes it. Empty: the
    environment has not ended the episode, or the gateway learns the summary only at the session's end."""


@dataclass(frozen=True, slots=True)
class Activity:
    """A replica's observation of one session since its last note."""

    id: SessionId
    quiet_s: float
    """Seconds since the end of its last call or touch; 0 while a call runs."""


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """Notice that caches must no longer serve this session.

    Sessions of the same id under another lease are not affected.
    """

    id: SessionId
    lease: str


@dataclass(frozen=True, slots=True)
class CapacityWanted:
    """Notice that an opening waits for a slot of this environment, or that one of its workers must stop."""

    environment: EnvironmentName


Notice = SessionEnded | CapacityWanted


@dataclass(frozen=True, slots=True)
class Group:
    """Openings that should begin together, such as the episodes of a GRPO group."""

    name: str
    """Unique among the groups of one owner in one environment."""
    size: int
    """Number of openings in the group."""


@dataclass(frozen=True, slots=True)
class GroupMembership:
    """An opening's place in the group of a curriculum's handle."""

    curriculum: str
    handle: int
    member: str
    number: int = -1
    """Number of the group's draw; -1: not known."""
    group_size: int = 1

    @property
    def group(self) -> Group | None:
        """The group of openings that share this draw of the handle; None if the draw is not known."""
        return None if self.number < 0 else Group(f"{self.curriculum}/{self.handle}/{self.number}", self.group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSetup:
    """The data that a worker needs to set a session up; secrets are neither stored nor shown."""

    spec: TaskSpec
    task: str = ""
    """Key of the task's name, see `TaskName`; empty: there is no task."""
    place: str = ""
    """``split/index`` of the task; empty: it has no place that the gateway knows."""
    seed: int | None = None
    config: Mapping[str, Any] | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    split: str = ""
    """Split by which the request names the task; empty: the request does not name it by split and index."""
    index: int | None = None
    """The task's index in *split*."""
    episode: str = ""
    """The trainer's name for the episode, if its protocol has one."""
    toolset: str = ""
    """Name of additional tools of an ORS server that the trainer requests; empty: no additional tools."""
    of_split: str = ""
    """The task's split, wherever the task is stored; it decides which resources the session gets. Empty: not known."""
    policy: str = ""
    """The trainer's tag of the policy that plays the episode; empty: no tag was given."""
    group: Group | None = None
    """The group that the trainer named. A curriculum's group is in `ticket`."""
    ticket: GroupMembership | None = None
    """Place in the group, if the task was drawn from a curriculum; the gateway releases it if no session is opened."""


SECRET_MARK: Final = "s"
"""First character of the lease of a session with secrets; the others begin with a hexadecimal digit."""
SECRET_CHARS: Final = 8
"""Minimum length of a secret that the step log masks: shorter texts occur by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """A frontend's request for an episode."""

    owner: Owner
    """The name of the trainer's API key."""
    name: str
    """The session's id as the trainer knows it."""
    environment: Environment
    setup: SessionSetup
    """The setup for the worker. The gateway neither stores nor logs its secrets."""
    fingerprint: str
    """The identity of the whole request. A retry with the same fingerprint gets the same session."""
    episode: str = ""
    """The trainer's own name for the episode; only resets have one."""
    within_s: float | None = None
    """Maximum wait in seconds, if it is shorter than the environment's own limits."""
    protocol: str = ""
    """The trainer's protocol, for the step log: ``ors``, ``areal``, ``openenv`` or ``nemo``; ``probe``: the gateway
    tries a task."""

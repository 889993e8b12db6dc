"""The interface of the step log, which records what happens in episodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from gateway.core.environment import Environment
from gateway.core.episode import Action, Block, StepResult, Summary
from gateway.core.faults import Fault
from gateway.core.ids import Owner
from gateway.core.outcomes import EpisodeOutcome
from gateway.core.session import CloseReason, EpisodeRequest, Session

Content = bytes | Sequence[bytes] | Action | StepResult | Sequence[Block] | Mapping[str, Any] | None
"""A request or a reply of a call: bytes of the worker's protocol, or the values of the gateway's own model. A mapping
is a message of a rollout."""
CONTENT_BYTES: Final = 8 * 2**20
"""Maximum size of one request or reply in the log. The rest is cut off."""
REFERENCE: Final = "blob:sha256:"
"""Prefix of the text that stands for a blob, such as an image's base64 data. Its SHA-256 follows."""
LoggedCall = tuple[str, str, float, float, str, Content, Content, BaseException | None, Sequence[Fault], int]
"""One call that has ended: the session's lease, the operation, monotonic times of its begin and end, the outcome (one
of ``gateway.metrics.CALLS``), request, reply, the error if it has no reply, faults of the author's code, and the
worker's number of the call if it is not in the reply (0: it is, or there is none). The operation is ``call`` for a step
and ``prompt`` for the first observation. It is a plain tuple, because each microsecond here is one percent of the
gateway's work for a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnd:
    """How an episode ended."""

    reason: CloseReason
    outcome: EpisodeOutcome
    reward: float | None = None
    summary: Summary | None = None
    """The worker's summary; None: the worker did not send one."""


MESSAGE: Final = "message"
"""Operation of a logged message of a rollout. Its lease is the rollout's key, and its request the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A trainer's record of one episode, from the model's side."""

    key: str
    """Key of its messages in the log."""
    id: str
    """The trainer's id."""
    owner: Owner
    run: str
    name: str
    environment: str
    split: str
    started_at: float
    """Unix time in seconds."""
    info: Mapping[str, Any]
    """Everything else that the trainer sent."""


class StepLog(Protocol):
    """Records episodes and their calls. Every method returns immediately, and drops records if the log is full."""

    gateway: str
    """Identity of the gateway, which its episodes get; empty: it is not known yet."""
    called: Callable[[LoggedCall], object]
    """Records a call. The log replaces this function while it cannot keep up, so it must be looked up for each call."""

    async def flush(self) -> None:
        """Write what is queued, so that a reader finds it."""

    def keeps(self, lease: str, environment: Environment) -> bool:
        """Return True if this replica logs the calls of the session with this *lease*."""

    def opened(self, session: Session, environment: Environment, request: EpisodeRequest, *, open_s: float) -> None:
        """Record that an episode began. The request's secrets are left out."""

    def rollout(self, rollout: Rollout) -> None:
        """Record that a trainer began to log a rollout."""

    def closed(self, session: Session, environment: Environment, end: EpisodeEnd) -> None:
        """Record that an episode ended."""


ANY: Final = "*"
"""The value of `EpisodeFilter.unexpected_error` for any text, and of a query's ``gateway`` for all gateways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFilter:
    """Selects episodes. Empty values select all, except for episodes that the gateway itself played."""

    owner: str = ""
    environment: str = ""
    split: str = ""
    task: str = ""
    """A task's label, see `TaskName`, or its place ``split/index``."""
    task_digest: str = ""
    policy: str = ""
    group: str = ""
    name: str = ""
    outcome: str = ""
    reason: str = ""
    scorer: str = ""
    """Version of the scorer, see ``Session.scorer``."""
    unexpected_error: str = ""
    """An unexpected exception, see ``Summary.unexpected_error``, or `ANY`."""
    reward_min: float | None = None
    reward_max: float | None = None
    tag: str = ""
    """A tag of the task."""
    gateway: str = ""
    """Identity of the gateway that recorded the episode. Episodes of older versions have none, and are selected too."""
    since: float = 0.0
    """Unix time from which on episodes began."""
    before: tuple[float, str] | None = None
    """Time and lease of the last episode of the page before."""


class RecordedCalls(NamedTuple):
    """The calls of an episode that can be read."""

    calls: list[Sequence[Any]]
    """The calls by their begin. Each is Unix time of its begin, seconds, operation, outcome, request, reply, error,
    faults and number; calls of an older version have no number."""
    damaged: list[str]
    """Places of damaged batches, which may have had further calls of the episode: a file's name and a position."""


UNRECORDED: Final = "unrecorded"
"""The reason of an episode whose end was lost, because the replica that had to record it was killed."""


class EpisodeWithoutEnd(NamedTuple):
    """An episode whose end is not recorded: it still runs, or its replica was lost."""

    lease: str
    gateway: str | None
    """Identity of the gateway that recorded its begin; None: not known."""
    at: float
    """Unix time of its begin, in seconds."""


class EndlessEpisodes(Protocol):
    """The episodes of one folder that have no end. Raises ``StoreUnavailable`` if the folder cannot be used."""

    def without_end(self, before: float) -> AsyncIterator[EpisodeWithoutEnd]:
        """Yield the episodes that have no end and began before a Unix time, oldest first."""

    async def end_unrecorded(self, leases: Sequence[str]) -> int:
        """End those episodes of *leases* that have no end, with the reason `UNRECORDED` and without a reward.

        Return their number.
        """


class StepLogQueries(Protocol):
    """Reads what all replicas have recorded. Raises ``StoreUnavailable`` if the log cannot be read."""

    async def episodes(self, wanted: EpisodeFilter, *, limit: int) -> list[dict[str, Any]]:
        """Return the newest episodes that *wanted* selects, newest first: the index's columns without begin and end."""

    async def episode(self, id: str) -> dict[str, Any] | None:
        """Return the episode with the lease *id*.

        If there is none, it is the newest one of the session with this name, or else the newest one that the trainer
        itself gave this name.
        """

    async def calls(self, episode: dict[str, Any]) -> RecordedCalls:
        """Return the calls of *episode*."""

    async def rollouts(self, episode: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the rollouts that the episode's owner logged about the time of *episode*, with their ``messages``.

        They are rollouts of its environment, or of no named one, and of no other episode.
        """

    async def link(self, key: str, lease: str) -> None:
        """Note that the rollout with this *key* belongs to the episode with this *lease*."""

    async def blob(self, digest: str) -> bytes | None:
        """Return the data with this SHA-256, or None if it is not stored any more."""

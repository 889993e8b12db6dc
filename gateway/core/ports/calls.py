"""The interface of the call store, which records calls to servers that do not keep outcomes themselves.

It records which replica runs a call, and the outcome. Such servers keep no sum of rewards either, so each replica
reports its share of a session's count. Outcomes are bytes that are opaque to the store: `upstreams.idempotency` writes
and reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from gateway.core.faults import FaultKind
from gateway.core.ids import SessionId

KEYED_S = 600.0
"""Seconds for which the outcome of a call with a key is kept, because trainers repeat the key after a restart."""
UNKEYED_S = 75.0
"""The same for a call that has only a task id. The reference servers keep a result for 60 s."""
MARGIN_S = 60.0
"""Seconds beyond its maximum duration for which a call counts as running."""
OUTCOME_BYTES = 2**20
"""Maximum size of a kept outcome of a call with a key."""
SESSION_BYTES = 16 * 2**20
"""Maximum size of all outcomes of a session; beyond it the oldest outcomes are removed."""
SESSION_MAX = 1024
"""Maximum number of known calls of a session; beyond it the oldest calls that do not run are removed."""
TOTAL_BYTES = 256 * 2**20
"""Maximum size of all outcomes; beyond it no further outcome is kept until others have expired."""
TALLY_S = 86_400.0
"""Seconds for which a count is kept after its last report. No session lasts that long without a step."""


class CallState(StrEnum):
    """State of a known call."""

    RUNNING = "running"  #: in a live replica
    LOST = "lost"  #: in a dead replica, so that it is unknown whether it ran
    DONE = "done"  #: its outcome is stored
    DROPPED = "dropped"  #: it has ended, and its outcome was not kept


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """The store's record of a call."""

    task_id: str
    state: CallState
    replica: str = ""
    """The replica that runs it, or ran it."""
    outcome: bytes = b""
    """Outcome of a call that is ``DONE``."""


class Change(StrEnum):
    """The kind of a replica's report about a call."""

    RUNNING = "running"  #: it runs; a call that is already known does not change
    DONE = "done"  #: it has ended, with an outcome
    DROPPED = "dropped"  #: it has ended, and its outcome is too large to be kept
    UNDONE = "undone"  #: it certainly did not run: its key may be tried again
    FORGOTTEN = "forgotten"  #: the session has ended: all its calls and counts are deleted
    TALLIED = "tallied"  #: this replica's count of the session so far, which replaces its earlier count


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """One replica's count of a session; the counts of all replicas together are complete."""

    number: int = 0
    """Distinguishes counts of one replica. A count that was deleted and restarted here lacks the earlier steps."""
    version: int = 0
    """Grows with each change, so that an older count that is written late does not replace a newer count."""
    is_opener: bool = False
    """True if this replica opened the session."""
    steps: int = 0
    reward: float = 0.0
    is_rewarded: bool = False
    """True if any of these steps gave a reward, even 0."""
    finished: bool = False
    seconds: float = 0.0
    """Seconds from the first to the last step that this replica saw."""
    fault: FaultKind | None = None
    """The party at fault for the end of the last call here; None: no fault, or the agent's."""
    ended_at: float | None = None
    """End of that call by ``time.monotonic`` of this process; None: no call has ended here."""
    notes: tuple[str, ...] = ()
    """What the upstream has to know of these steps at the end of the episode."""
    told_in: str = ""
    """The store's run that received this count first; empty: no run has. If that run lost the count, the store accepts
    no later report of it. Every count in the store is therefore complete."""
    is_whole: bool = True
    """False if the count may be incomplete: the store restarted since the report, and may have kept an older state, or
    the count was restarted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallChange:
    """A report about one call. Repeated reports have the same effect as a single report."""

    kind: Change
    session: SessionId
    lease: str
    task_id: str = ""
    key: str = ""
    """The call's key; empty: it has no key."""
    digest: str = ""
    """Digest of the request under *key*."""
    keep_s: float = 0.0
    """Seconds for which the store keeps this."""
    outcome: bytes = b""
    tally: Tally = Tally()
    """Count of a change that is ``TALLIED``."""

    @property
    def place(self) -> tuple[SessionId, str]:
        """The session's id and lease."""
        return self.session, self.lease


class CallStore(Protocol):
    """Calls of all replicas. Each method except `settled` is one atomic step.

    Every method raises ``StoreUnavailable`` if the store does not answer.
    """

    @property
    def replica(self) -> str:
        """The name of this replica, which no other process ever has."""

    async def begin(self, call: CallChange) -> CallRecord | None:
        """Record that this replica runs *call*, which has a key, and return None.

        If the key is already known, record nothing and return the known call's record.

        Raises:
            CallConflict: The key is known with another digest.
            StoreUnavailable: Also raised while the store is not whole (``core.ports.store``): the key may have been
                lost.
        """

    async def write(self, changes: Sequence[CallChange]) -> str:
        """Report *changes* of this replica's calls, in this order.

        Each report also shows that the replica is alive, even with no change. A replica without a report for some
        seconds, here or by `begin`, counts as dead.

        Returns:
            The name of the store's run. If it differs from the previous name, the store may have lost earlier reports.
        """

    async def look(self, session: SessionId, lease: str, task_id: str) -> CallRecord | None:
        """Return the record of a call; return None if the store does not know it (any more)."""

    async def settled(self, session: SessionId, lease: str, task_id: str, *, within_s: float) -> CallRecord | None:
        """Like `look`, but wait until the call does not run any more, for at most *within_s* seconds.

        ``LOST`` is returned only if the replica stays silent for a while: after an outage of the store all replicas
        seem dead for a moment.

        Raises:
            StoreUnavailable: The store still does not answer when the time is over.
        """

    async def tallies(self, session: SessionId, lease: str) -> Mapping[str, Tally]:
        """Return the reported counts of a session by replica name; counts that were not reported yet are missing."""

    async def aclose(self) -> None:
        """Close the connections."""

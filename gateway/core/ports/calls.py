"""The seam of calls to servers that keep no outcomes themselves: who runs which, and what came of it.

Such servers keep no sum of rewards either: each replica tells its share of a session's count.

What the store keeps of an outcome is opaque to it: bytes in, the same bytes out. Who writes and reads them is
`upstreams.idempotency`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from gateway.core.faults import FaultKind
from gateway.core.ids import SessionId

KEYED_S = 600.0
"""Seconds for which a call's outcome is kept, and its key known: trainers come again with a key after a restart."""
UNKEYED_S = 75.0
"""The same of a call that is known by its task id only: the reference servers keep a result for 60 s."""
MARGIN_S = 60.0
"""How much longer than its longest run a call is known as running."""
OUTCOME_BYTES = 2**20
"""The largest outcome that is kept of a call with a key."""
SESSION_BYTES = 16 * 2**20
"""Outcomes of one session; beyond it the oldest ones go."""
SESSION_MAX = 1024
"""Calls of one session that are known; beyond it the oldest ones go that do not run."""
TOTAL_BYTES = 256 * 2**20
"""All outcomes together; beyond it no further one is kept until others have gone."""
TALLY_S = 86_400.0
"""How long a count is kept after it was told last: no session goes on for so long without a step."""


class CallState(StrEnum):
    """What is known of a call."""

    RUNNING = "running"  #: in a replica that lives
    LOST = "lost"  #: in a replica that is gone: nobody can tell whether it ran
    DONE = "done"  #: its outcome is there
    DROPPED = "dropped"  #: it has ended, and its outcome is not kept


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """A call that is known."""

    task_id: str
    state: CallState
    replica: str = ""
    """The one that runs it, or ran it."""
    outcome: bytes = b""
    """Of a call that is ``DONE``."""


class Change(StrEnum):
    """What a replica tells of a call that it runs."""

    RUNNING = "running"  #: it runs; of one that is known already nothing changes
    DONE = "done"  #: it has ended, with an outcome
    DROPPED = "dropped"  #: it has ended, and its outcome is too large to be kept
    UNDONE = "undone"  #: it is sure not to have run: its key may be tried again
    FORGOTTEN = "forgotten"  #: the session has ended: all its calls are forgotten, and all counts
    TALLIED = "tallied"  #: what this replica saw of the session until now, in place of what it told before


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What one replica saw of a session; all replicas together saw all of it."""

    number: int = 0
    """Tells counts of one replica apart: one that was forgotten here, and begun anew, lacks what came before."""
    version: int = 0
    """Grows with each change: an older count that is written late replaces no newer one."""
    is_opener: bool = False
    """Whether this replica opened the session."""
    steps: int = 0
    reward: float = 0.0
    is_rewarded: bool = False
    """Whether any of these steps gave a reward, be it 0."""
    finished: bool = False
    seconds: float = 0.0
    """From the first that was seen here to the last."""
    fault: FaultKind | None = None
    """Who is at fault for how the last call here ended, if not the agent."""
    ended_at: float | None = None
    """When that call ended, by ``time.monotonic`` of this process; None: no call has ended here."""
    told_in: str = ""
    """The run of the store in which it was told first; empty: it was not. Whatever that run lost is not told again, so
    that a count that is there is one of which nothing is missing."""
    is_whole: bool = True
    """False: the store was started again since it was told, and may have kept an older state; or it was begun anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallChange:
    """News of one call. To tell it twice is to tell it once."""

    kind: Change
    session: SessionId
    lease: str
    task_id: str = ""
    key: str = ""
    """Empty: it has none."""
    digest: str = ""
    """Of what was asked for under *key*."""
    keep_s: float = 0.0
    """How long this is to be known."""
    outcome: bytes = b""
    tally: Tally = Tally()
    """Of a change that is ``TALLIED``."""

    @property
    def place(self) -> tuple[SessionId, str]:
        """The session's id and lease."""
        return self.session, self.lease


class CallStore(Protocol):
    """Calls of all replicas. Each method but `settled` is one atomic step.

    Every method raises ``StoreUnavailable`` when the store does not answer.
    """

    @property
    def replica(self) -> str:
        """The name of this replica, which no other process ever has."""

    async def begin(self, call: CallChange) -> CallRecord | None:
        """Record that this replica runs *call*, which has a key, and return None.

        If its key is known, record nothing, and return what is known of it.

        Raises:
            CallConflict: the key is known with another digest.
            StoreUnavailable: also while the store is not whole (``core.ports.Store``): the key may have been lost.
        """

    async def write(self, changes: Sequence[CallChange]) -> str:
        """Tell what became of calls of this replica, in this order; also that it lives, with no change at all.

        A replica that said nothing for some seconds, here or by `begin`, counts as gone.

        Returns the name of the store's run: another one than before, and the store may have lost what it was told.
        """

    async def look(self, session: SessionId, lease: str, task_id: str) -> CallRecord | None:
        """What is known of a call; None if it is not known (any more)."""

    async def settled(self, session: SessionId, lease: str, task_id: str, *, within_s: float) -> CallRecord | None:
        """As `look`, but wait until the call does not run any more, at most *within_s* seconds.

        ``LOST`` is answered only if the replica stays silent for a while: a store that was away makes all of them
        look so for a moment.

        Raises:
            StoreUnavailable: it still does not answer when the time is over.
        """

    async def tallies(self, session: SessionId, lease: str) -> Mapping[str, Tally]:
        """What replicas told that they saw of a session, by their names; not what they have not told yet."""

    async def aclose(self) -> None:
        """Let go of connections."""

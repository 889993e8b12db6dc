"""The store: what replicas share about sessions, workers, leases and deadlines.

One contract suite runs on every implementation (``tests/contract``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from gateway.core.ids import EnvironmentName, SessionId, WorkerId
from gateway.core.leader_lease import Lead
from gateway.core.session import Activity, CloseReason, Notice, Session, SessionRequest
from gateway.core.worker import EnvironmentLoad, Worker


class SessionStore(Protocol):
    """Sessions, the slots that they hold, and their deadlines."""

    async def claim(self, opening: SessionRequest, *, wait_s: float) -> Session:
        """Take a slot for *opening*, waiting for one at most *wait_s* seconds.

        Those of one owner are served in order of arrival; owners take turns, however many openings each has in the
        queue: one that asks while another has a thousand waiting is served next but one.

        Those of one group begin together. The first of it takes slots for all that are still to come, or waits until
        there are as many, and meanwhile nobody behind it is served. Each time for ``opening.together_s`` at most: then
        as many of the group begin as there are slots, and what was kept for those that did not come is anybody's.
        Each slot is a turn of the group's owner.

        The slot comes from the ready worker of the environment with the fewest sessions. The session is ``OPENING``;
        if nobody calls `opened` within ``opening.setup_s`` of the grant, it becomes `due`.

        When the caller is cancelled or the wait ends, its place in the queue, or the slot that was granted meanwhile,
        is given back.

        Raises:
            SessionExists: a session of this id holds a slot, or waits for one (whatever its fingerprint: the caller
                looks it up with `find` and compares).
            PoolExhausted: no slot within *wait_s*, or the queue of this environment is full; with an estimate of when
                to come again, from the pace at which slots became free of late.
            EnvironmentUnavailable: `fail_waiting` was called while this opening waited; or no slot is free and the
                breaker of the environment is open, with its message and what is left of its time.
        """

    async def opened(self, id: SessionId, lease: str, *, handle: str = "") -> Session:
        """Turn an ``OPENING`` session into an ``OPEN`` one, and keep its upstream's *handle*; its idle time starts now.

        Raises:
            SessionNotFound: it is unknown, or of another lease.
            SessionClosed: it was closed meanwhile.
        """

    async def rebind(self, id: SessionId, lease: str, *, was: str, handle: str) -> bool:
        """Replace the handle of an ``OPEN`` session, if it still is *was*: of several that try, one succeeds.

        Returns False, and changes nothing, if it is unknown, of another lease or state, or has another handle.
        """

    async def find(self, id: SessionId) -> Session:
        """Look up a session that is ``OPENING``, ``OPEN`` or ``CLOSING``.

        Raises:
            SessionNotFound: never known, deleted by its trainer, or closed so long ago that it was forgotten.
            SessionClosed: closed by us, with the reason (remembered for ``closed_kept_s``).
        """

    async def touch(self, notes: Sequence[Activity]) -> list[SessionId]:
        """Renew idle deadlines to ``now - quiet_s + idle_s``; a deadline never moves backwards.

        Returns those that are not ``OPEN`` any more (their replicas should drop them).
        """

    async def count_turn(self, id: SessionId, lease: str, *, key: str = "") -> int:
        """Count one more turn of an ``OPEN`` session and return how many it has had.

        The same *key* as at the last turn, unless empty, counts nothing: it is that turn asked for again.

        Raises:
            SessionNotFound: it is unknown, of another lease, or being deleted.
            SessionClosed: ended by us, or just being ended.
        """

    async def begin_close(self, id: SessionId, reason: CloseReason, *, lease: str = "") -> Session | None:
        """Turn an ``OPENING`` or ``OPEN`` session into a ``CLOSING`` one; it keeps its slot until `release`.

        *lease*, if given, must be the session's: an opening that failed must not end its successor of the same id.
        Publishes `SessionEnded`. Returns the session, or None if there is none in those states. A session that nobody
        releases within ``closing_s`` becomes `due`.
        """

    async def release(self, id: SessionId, lease: str) -> bool:
        """End a ``CLOSING`` session: remember its reason, free its slot, hand the slot to the next that waits.

        Returns False, and changes nothing, if the session is unknown, of another lease, or not ``CLOSING``.
        """

    async def hand_over(self, id: SessionId, lease: str, opening: SessionRequest) -> Session | None:
        """End a ``CLOSING`` session as `release` does, and make its slot *opening*'s in the same step.

        Nobody who waits comes between the two: sessions that follow each other on one attachment keep their slot, or
        all that reset at once on a full pool would wait for each other. *opening* may be of the same id.

        Returns None, and changes nothing, if the session is unknown, of another lease, or not ``CLOSING``; or if its
        worker is of another environment or takes no more sessions.

        Raises:
            SessionExists: another session has the id of *opening*, or waits for a slot.
        """

    async def late(self, limit: int) -> list[Session]:
        """List up to *limit* ``OPEN`` sessions whose deadline has passed, earliest first; changes nothing.

        The control loop asks their workers before it ends them with `expire`: a call whose trainer hung up, or whose
        replica died, is known to its worker only.
        """

    async def expire(self, ids: Sequence[SessionId]) -> list[Session]:
        """Move those of *ids* that are ``OPEN`` and whose deadline has passed to ``CLOSING`` (``EXPIRED``).

        The deadline is checked in the same atomic step. Publishes `SessionEnded` for each; returns them.
        """

    async def due(self, limit: int) -> list[Session]:
        """Move up to *limit* ``OPENING`` sessions whose deadline has passed to ``CLOSING`` (``OPEN_FAILED``).

        And take up again ``CLOSING`` ones that nobody released within ``closing_s``; they keep their reason. Returns
        both, earliest first. The deadline is checked in the same atomic step. Publishes `SessionEnded` for each.
        """

    async def sessions(self, *, limit: int = 1000) -> list[Session]:
        """List sessions that hold a slot, for operators."""

    def notices(self) -> AsyncIterator[Notice]:
        """Follow what happens from now on. May lose notices (a slow reader, a broken connection): only a hint."""


class WorkerStore(Protocol):
    """Workers, their states and slots, and the openings that wait for them."""

    async def add_worker(self, worker: Worker, *, fence: int = 0) -> None:
        """Register a worker that starts (``STARTING``), or one that was adopted.

        *fence*, here and below, is that of the caller's `lead`; 0: it acts for itself, whoever leads.

        Raises:
            NotLeading: a later leader's fence is known, or the data is gone in which the caller began to lead; nothing
                was changed.
        """

    async def worker_ready(self, id: WorkerId, address: str, *, slots: int = 0) -> bool:
        """Make a ``STARTING`` worker ``READY`` at *address* and give its slots to those that wait.

        *slots*, if not 0, is the capacity that it told, and replaces the one that it was added with.

        Closes the environment's breaker. Returns False if the worker is unknown or not ``STARTING``.
        """

    async def pause_worker(self, id: WorkerId, *, fence: int = 0) -> bool:
        """Make a ``READY`` worker that holds no session ``PAUSED``; whether it is now. Raises ``NotLeading``."""

    async def suspect_worker(self, id: WorkerId) -> bool:
        """Make a ``READY`` worker ``SUSPECT``: it gets no more sessions until `wake_worker`; whether it is now."""

    async def wake_worker(self, id: WorkerId) -> bool:
        """Make a ``PAUSED`` or ``SUSPECT`` worker ``READY``, and give its slots to those that wait.

        Returns False if it is neither.
        """

    async def limit_worker(self, id: WorkerId, slots: int) -> None:
        """Lower a worker's slots, to no less than 1: it refused a session beyond them.

        Sessions that hold one beyond *slots* keep it. Nothing happens where it has fewer, or is unknown.
        """

    async def drain_worker(self, id: WorkerId, *, only_if_idle: bool = False, fence: int = 0) -> bool:
        """Make a worker ``DRAINING``; with *only_if_idle* if it holds no session. One that starts never serves any.

        Returns whether it is draining now (True also if it was before, whatever it holds; False if it is unknown).
        Raises ``NotLeading``.
        """

    async def remove_worker(self, id: WorkerId, reason: CloseReason, *, fence: int = 0) -> list[Session] | None:
        """Forget a worker; its sessions become ``CLOSED`` with *reason* and are returned. Publishes for each.

        None if it is unknown: of several that remove a worker at once, one removes it. Raises ``NotLeading``.
        """

    async def worker(self, id: WorkerId) -> Worker | None:
        """Look a worker up."""

    async def load(self) -> Mapping[EnvironmentName, EnvironmentLoad]:
        """What every environment holds and what waits; environments without either may be absent."""

    async def fail_waiting(
        self, environment: EnvironmentName, message: str, *, for_s: float = 0.0, fence: int = 0
    ) -> int:
        """Let every opening that waits for *environment* fail with ``EnvironmentUnavailable(message)``.

        With *for_s*, the breaker of the environment also opens: for so many seconds, openings that find no free slot
        fail at once. After that time they wait again, and the next start is the trial. `worker_ready` ends it early.
        Returns how many openings failed. Raises ``NotLeading``.
        """


class LeaderStore(Protocol):
    """Which replica leads, and the recovery of a store that lost data.

    A store that was emptied, or that came back with an older state, is not whole until its leader has rebuilt it from
    what workers and replicas know. Until then `find` of what it lacks, `touch` and `opened` raise ``StoreUnavailable``:
    it can't say that a session is gone. Claims wait. Nothing expires. A new store is not whole either: there is nothing
    to rebuild then.
    """

    async def own(self, owner: str, *, takes_over: bool = False) -> str:
        """Claim the store for the gateway *owner*, before any of its replicas leads; returns whose store it is.

        It is *owner*'s if it is nobody's, as a new or an emptied one; or with *takes_over*, if no replica is alive, as
        far as the store has heard. `lead` claims an emptied store anew, and raises ``StoreUnavailable`` where another
        owner took it over.
        """

    async def lead(self, replica: str, *, ttl_s: float) -> Lead:
        """Become or stay the leader of the control loop for *ttl_s* seconds; and learn whether the store is whole."""

    async def resign(self, replica: str) -> None:
        """Give the lead up, if *replica* has it, so that another need not wait for its end."""

    async def adopt(self, worker: Worker, sessions: Sequence[Session], *, fence: int) -> list[SessionId]:
        """Register a running worker and the sessions that it holds, in one step; of known ones what is missing.

        *sessions* become ``OPEN`` and their idle time starts now; those that the store knows, of the same lease, stay
        as they are; one that it knows under another lease in another worker is left out. Known ``OPEN`` sessions of
        this worker that are not among *sessions* stay as they are too. Returns the ids of the sessions that the worker
        holds now. *worker*'s state is taken where it is new; a known one keeps its own. Raises ``NotLeading``.
        """

    async def restore(self, sessions: Sequence[Session]) -> list[SessionId]:
        """Register sessions that a replica serves and the store may have lost; returns those that it holds now.

        Only those whose worker is known, and whose id is not taken by another lease; a worker may come to hold more
        than it has slots. Their idle time starts now. Allowed while the store is not whole, and a no-op for those that
        it knows.
        """

    async def rebuilt(self, *, fence: int) -> None:
        """Say that the store is whole again. Raises ``NotLeading``."""


class Store(SessionStore, WorkerStore, LeaderStore, Protocol):
    """All of it in one place. Each method is one atomic step; time is the store's own.

    Every method raises ``StoreUnavailable`` when the store does not answer; that is never "not found".
    """

    async def start(self) -> None:
        """Connect. Raises ``StoreUnavailable`` if the store does not answer; then nothing is left open."""

    async def ping(self) -> None:
        """Return if the store answers."""

    async def aclose(self) -> None:
        """Let go of connections; waiting claims fail with ``StoreUnavailable``."""

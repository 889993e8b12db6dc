"""The interface of the store, which shares sessions, workers, leases and deadlines among replicas.

One contract suite runs on every implementation (``tests/contract``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.leader_lease import Lead
from gateway.core.session import Activity, CloseReason, Notice, Session, SessionRequest
from gateway.core.worker import EnvironmentLoad, Worker


class SessionStore(Protocol):
    """Sessions, their slots and their deadlines."""

    async def claim(self, opening: SessionRequest, *, wait_s: float) -> Session:
        """Take a slot for *opening*; wait for a slot for at most *wait_s* seconds.

        Openings of one owner are served in order of arrival. Owners take turns, however many of their openings wait. If
        one owner has a thousand openings in the queue, another owner's opening is served next but one.

        Openings of one group begin together. The first opening takes slots for all that are still to arrive, or waits
        until there are enough. While it waits, no opening behind it is served. Each of the two waits lasts
        ``opening.together_s`` at most. Afterwards as many openings of the group begin as there are slots, and the slots
        kept for missing openings become free for all. Each slot counts as a turn of the group's owner.

        An owner never gets more sessions than ``opening.max_sessions`` and ``opening.max_here``. At a limit its
        openings wait, with the same deadline, until its sessions end. Meanwhile they keep no slot from other owners. A
        group begins together only within the limits. After ``together_s`` it parts and takes what they allow. Once a
        session of the owner ends, its openings get free slots in every environment, in order of arrival.

        The slot belongs to the ready worker of the environment with the fewest sessions. The session is ``OPENING``. If
        `opened` is not called within ``opening.setup_s`` of the grant, the session becomes `due`.

        If the caller is cancelled or the wait ends, its place in the queue, or a slot granted meanwhile, is released.

        Raises:
            SessionExists: A session of this id holds a slot, or waits for a slot. The caller compares the fingerprints
                with `find`.
            PoolExhausted: No slot became free within *wait_s*, or the environment's queue is full. The error estimates
                when to retry, from the recent rate at which slots became free. If the owner is at a limit, the message
                names the limit and its setting.
            EnvironmentUnavailable: `fail_waiting` was called during the wait; or no slot is free and the environment's
                circuit breaker is open. The error has the breaker's message and remaining time.
        """

    async def pace(self, owner: Owner, *, per_s: float, within_s: float) -> float:
        """Book the next opening of *owner*, and return the number of seconds after which it may start.

        The owner's openings then start at most *per_s* (positive) times a second on average, counted over all replicas.
        At most ``max(1, per_s)`` of them start at the same moment.

        Raises:
            PoolExhausted: The opening would have to wait for longer than *within_s*; nothing was booked.
        """

    async def opened(self, id: SessionId, lease: str, *, handle: str = "", scorer: str = "") -> Session:
        """Turn an ``OPENING`` session into an ``OPEN`` one; its idle time starts now.

        The session gets its upstream's *handle*, and the version of its *scorer*.

        Raises:
            SessionNotFound: The session is unknown, or has another lease.
            SessionClosed: The session was closed meanwhile.
        """

    async def rebind(self, id: SessionId, lease: str, *, was: str, handle: str) -> bool:
        """Replace the handle of an ``OPEN`` session if it still is *was*; of several concurrent callers one succeeds.

        Return False, and change nothing, if the session is unknown or has another lease, state or handle.
        """

    async def find(self, id: SessionId) -> Session:
        """Return a session that is ``OPENING``, ``OPEN`` or ``CLOSING``.

        Raises:
            SessionNotFound: The session was never known, its trainer deleted it, or its closing was forgotten.
            SessionClosed: The gateway closed the session, for the given reason (remembered for ``closed_kept_s``). The
                error has ``Session.result``.
        """

    async def touch(self, notes: Sequence[Activity]) -> list[SessionId]:
        """Renew idle deadlines to ``now - quiet_s + idle_s``; a deadline never moves backwards.

        Returns:
            The sessions that are not ``OPEN`` any more; their replicas should drop them.
        """

    async def count_turn(self, id: SessionId, lease: str, *, key: str = "") -> int:
        """Count another turn of an ``OPEN`` session and return the number of its turns.

        If *key* is not empty and equals the last turn's key, nothing is counted: the request repeats that turn.

        Raises:
            SessionNotFound: The session is unknown, has another lease, or is being deleted.
            SessionClosed: The gateway ended the session, or is ending it.
        """

    async def note_late(self, id: SessionId, lease: str, steps: int) -> None:
        """Note that an open session had *steps* steps before a call that took too long. Ignore any other session."""

    async def note_result(self, id: SessionId, lease: str, result: str) -> None:
        """Set ``Session.result`` of an open session. Ignore any other session."""

    async def begin_close(self, id: SessionId, reason: CloseReason, *, lease: str = "") -> Session | None:
        """Turn an ``OPENING`` or ``OPEN`` session into a ``CLOSING`` one; it keeps its slot until `release`.

        *lease*, if given, must be the session's: a failed opening must not end its successor of the same id. Publishes
        `SessionEnded`. Returns the session, or None if it is in neither of these states. A session that is not released
        within ``closing_s`` becomes `due`.
        """

    async def release(self, id: SessionId, lease: str) -> bool:
        """End a ``CLOSING`` session: remember its reason and assign its slot to the first waiting opening.

        Return False, and change nothing, if the session is unknown, has another lease, or is not ``CLOSING``.
        """

    async def keep_reply(self, id: SessionId, reply: bytes) -> None:
        """Keep the reply that ends an episode for repeats of its request, for ``closed_kept_s``.

        A further reply replaces it. The next session of this id removes it.
        """

    async def kept_reply(self, id: SessionId) -> bytes | None:
        """Return the reply that `keep_reply` kept, or None."""

    async def hand_over(self, id: SessionId, lease: str, opening: SessionRequest) -> Session | None:
        """End a ``CLOSING`` session as `release` does, and transfer its slot to *opening* in the same step.

        No waiting opening gets the slot in between: successive sessions of one attachment keep their slot. Otherwise
        attachments that reset concurrently on a full pool would all wait for each other. *opening* may have the same
        id. The limits of the owner do not matter, because it holds as many sessions as before.

        Returns None, and changes nothing, if the session is unknown, has another lease, or is not ``CLOSING``. The same
        holds if its worker belongs to another environment or takes no more sessions, or if *opening* has another owner,
        which is at a limit.

        Raises:
            SessionExists: Another session has the id of *opening*, or waits for a slot with that id.
        """

    async def late(self, limit: int) -> list[Session]:
        """List up to *limit* ``OPEN`` sessions past their deadline, earliest first; change nothing.

        The control loop queries their workers before it ends them with `expire`. If the trainer of a call disconnected,
        or its replica died, only the worker knows of the call.
        """

    async def expire(self, ids: Sequence[SessionId]) -> list[Session]:
        """Move those of *ids* that are ``OPEN`` and past their deadline to ``CLOSING`` (``EXPIRED``), and return them.

        The deadline is checked in the same atomic step. Publishes `SessionEnded` for each.
        """

    async def due(self, limit: int) -> list[Session]:
        """Move up to *limit* ``OPENING`` sessions past their deadline to ``CLOSING`` (``OPEN_FAILED``).

        Also take up ``CLOSING`` sessions that were not released within ``closing_s``; they keep their reason. Returns
        both, earliest first. The deadline is checked in the same atomic step. Publishes `SessionEnded` for each.
        """

    async def sessions(self, *, limit: int = 1000) -> list[Session]:
        """List sessions that hold a slot, for operators."""

    async def session_page(self, *, limit: int, cursor: str = "") -> tuple[list[Session], str]:
        """List about *limit* sessions that hold a slot, and return the cursor of the next page, empty at the end.

        A session that holds its slot during the whole listing is in at least one page, and may be in two.

        Raises:
            InvalidRequest: *cursor* is not from a page before.
        """

    def notices(self) -> AsyncIterator[Notice]:
        """Follow notices from now on. Some may be lost (slow reader, broken connection), so they are only hints."""


class WorkerStore(Protocol):
    """Workers with their states and slots, and the openings that wait for slots."""

    async def add_worker(self, worker: Worker, *, fence: int = 0) -> None:
        """Register a worker that starts (``STARTING``), or a worker that was adopted.

        *fence*, here and below, is the fence of the caller's `lead`. 0: the call does not depend on the leader.

        Raises:
            NotLeading: A later leader's fence is known, or the data of the caller's lead is lost; nothing was changed.
        """

    async def worker_ready(self, id: WorkerId, address: str, *, slots: int = 0) -> bool:
        """Make a ``STARTING`` worker ``READY`` at *address* and give its slots to waiting openings.

        *slots*, if not 0, is the capacity that the worker reported, and replaces the capacity that it was added with.
        Closes the environment's circuit breaker. Returns False if the worker is unknown or not ``STARTING``.
        """

    async def pause_worker(self, id: WorkerId, *, fence: int = 0) -> bool:
        """Make a ``READY`` worker without sessions ``PAUSED``.

        Return True if it is paused now. Raises ``NotLeading``.
        """

    async def suspect_worker(self, id: WorkerId) -> bool:
        """Make a ``READY`` worker ``SUSPECT``, which gets no more sessions until `wake_worker`.

        Return True if it is suspect now.
        """

    async def wake_worker(self, id: WorkerId) -> bool:
        """Make a ``PAUSED`` or ``SUSPECT`` worker ``READY`` and give its slots to waiting openings.

        Return False if the worker has another state.
        """

    async def limit_worker(self, id: WorkerId, slots: int) -> None:
        """Lower a worker's slots, to no less than 1, because it refused a session beyond them.

        Sessions beyond *slots* keep their slot. Nothing happens if the worker has fewer slots, or is unknown.
        """

    async def drain_worker(self, id: WorkerId, *, only_if_idle: bool = False, fence: int = 0) -> bool:
        """Make a worker ``DRAINING``; with *only_if_idle*, do so only if it holds no session.

        A starting worker then never serves a session. Returns True if the worker is draining now, even if it was
        before, and False if it is unknown. Raises ``NotLeading``.
        """

    async def remove_worker(self, id: WorkerId, reason: CloseReason, *, fence: int = 0) -> list[Session] | None:
        """Delete a worker; its sessions become ``CLOSED`` with *reason* and are returned. Publishes a notice for each.

        Returns None if the worker is unknown: of several concurrent callers only one removes it. Raises ``NotLeading``.
        """

    async def worker(self, id: WorkerId) -> Worker | None:
        """Return a worker; return None if it is unknown."""

    async def load(self) -> Mapping[EnvironmentName, EnvironmentLoad]:
        """Return the load of every environment; environments without workers and openings may be absent."""

    async def fail_waiting(
        self, environment: EnvironmentName, message: str, *, for_s: float = 0.0, fence: int = 0
    ) -> int:
        """Fail every opening that waits for *environment* with ``EnvironmentUnavailable(message)``.

        With *for_s*, the circuit breaker of the environment also opens. For that many seconds, openings that find no
        free slot fail immediately. Afterwards they wait again, and the next start is the trial. `worker_ready` closes
        the breaker early. Returns the number of failed openings. Raises ``NotLeading``.
        """


class LeaderStore(Protocol):
    """Leader election, and the recovery of a store that lost data.

    A store that was emptied, or that returned with an older state, is not whole until its leader has rebuilt it. The
    leader rebuilds it from the knowledge of workers and replicas. Until then `find` of missing sessions, `touch` and
    `opened` raise ``StoreUnavailable``, because the store can't say that a session is gone. Claims wait, and nothing
    expires. A new store is not whole either, but needs no rebuild.
    """

    async def own(self, owner: str, *, takes_over: bool = False) -> str:
        """Claim the store for the gateway *owner*, before any of its replicas leads; return the store's owner.

        The claim succeeds if the store has no owner, being new or emptied. With *takes_over* it also succeeds if no
        replica is alive, as far as the store knows. `lead` claims an emptied store again. It raises
        ``StoreUnavailable`` if another owner took the store over.
        """

    async def lead(self, replica: str, *, ttl_s: float) -> Lead:
        """Become or stay the leader of the control loop for *ttl_s* seconds; report whether the store is whole."""

    async def resign(self, replica: str) -> None:
        """End the lead, if *replica* has it, so that another replica need not wait for its end."""

    async def adopt(self, worker: Worker, sessions: Sequence[Session], *, fence: int) -> list[SessionId]:
        """Register a running worker and its sessions in one step; add only what is missing.

        New *sessions* become ``OPEN`` and their idle time starts now. Sessions that the store knows under the same
        lease do not change. A session that it knows under another lease in another worker is left out. Known ``OPEN``
        sessions of this worker that are not among *sessions* do not change either. *worker*'s address, slots and state
        are used only if the worker is new or known as ``STARTING``: an older state of the store may lack the end of its
        start. Raises ``NotLeading``.

        Returns:
            The ids of the sessions that the worker holds now.
        """

    async def restore(self, sessions: Sequence[Session]) -> list[SessionId]:
        """Register sessions that a replica serves and the store may have lost; return the sessions that it holds now.

        Only sessions whose worker is known, and whose id has no other lease, are registered. A worker may then hold
        more sessions than slots. Their idle time starts now. Allowed while the store is not whole; known sessions do
        not change.
        """

    async def rebuilt(self, *, fence: int) -> None:
        """Mark the store as whole again. Raises ``NotLeading``."""


class Store(SessionStore, WorkerStore, LeaderStore, Protocol):
    """The whole store. Each method is one atomic step; time is the store's own.

    Every method raises ``StoreUnavailable`` if the store does not answer, which never means "not found".
    """

    async def start(self) -> None:
        """Connect to the store. Raises ``StoreUnavailable`` if it does not answer; then nothing stays open."""

    async def ping(self) -> None:
        """Return if the store answers."""

    async def aclose(self) -> None:
        """Close the connections; waiting claims fail with ``StoreUnavailable``."""

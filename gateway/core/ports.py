"""The seams: store, backend, upstream, transport.

Each speaks the words of DESIGN, never those of Redis, Docker or HTTP. One contract suite per seam runs on every
implementation (``tests/contract``).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from gateway.core.addresses import Address
from gateway.core.faults import Fault
from gateway.core.leader_lease import LeaderLease
from gateway.core.model import (
    Action,
    Block,
    CloseReason,
    Death,
    Environment,
    EnvironmentLoad,
    EnvironmentName,
    Found,
    Lead,
    Note,
    Notice,
    Opening,
    Registered,
    Session,
    SessionId,
    Setup,
    Split,
    StepResult,
    Summary,
    TaskSpec,
    Worker,
    WorkerId,
    WorkerSession,
)

Headers = Sequence[tuple[bytes, bytes]]
P = TypeVar("P", bound=asyncio.Protocol)


class Store(Protocol):
    """Sessions, workers, leases and deadlines. Each method is one atomic step; time is the store's own.

    Every method raises ``StoreUnavailable`` when the store does not answer; that is never "not found".
    """

    # -- the request path ---------------------------------------------------------------------------------------

    async def claim(self, opening: Opening, *, wait_s: float) -> Session:
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
                breaker of the environment is open (`open_breaker`), with its message and what is left of its time.
        """
        ...

    async def opened(self, id: SessionId, lease: str, *, handle: str = "") -> Session:
        """Turn an ``OPENING`` session into an ``OPEN`` one, and keep its upstream's *handle*; its idle time starts now.

        Raises:
            SessionNotFound: it is unknown, or of another lease.
            SessionClosed: it was closed meanwhile.
        """
        ...

    async def rebind(self, id: SessionId, lease: str, *, was: str, handle: str) -> bool:
        """Replace the handle of an ``OPEN`` session, if it still is *was*: of several that try, one succeeds.

        Returns False, and changes nothing, if it is unknown, of another lease or state, or has another handle.
        """
        ...

    async def find(self, id: SessionId) -> Session:
        """Look up a session that is ``OPENING``, ``OPEN`` or ``CLOSING``.

        Raises:
            SessionNotFound: never known, deleted by its trainer, or closed so long ago that it was forgotten.
            SessionClosed: closed by us, with the reason (remembered for ``closed_kept_s``).
        """
        ...

    async def touch(self, notes: Sequence[Note]) -> list[SessionId]:
        """Renew idle deadlines to ``now - quiet_s + idle_s``; a deadline never moves backwards.

        Returns those that are not ``OPEN`` any more (their replicas should drop them).
        """
        ...

    async def count_turn(self, id: SessionId, lease: str, *, key: str = "") -> int:
        """Count one more turn of an ``OPEN`` session and return how many it has had.

        The same *key* as at the last turn, unless empty, counts nothing: it is that turn asked for again.

        Raises:
            SessionNotFound: it is unknown, of another lease, or being deleted.
            SessionClosed: ended by us, or just being ended.
        """
        ...

    async def begin_close(self, id: SessionId, reason: CloseReason, *, lease: str = "") -> Session | None:
        """Turn an ``OPENING`` or ``OPEN`` session into a ``CLOSING`` one; it keeps its slot until `release`.

        *lease*, if given, must be the session's: an opening that failed must not end its successor of the same id.
        Publishes `SessionEnded`. Returns the session, or None if there is none in those states. A session that nobody
        releases within ``closing_s`` becomes `due`.
        """
        ...

    async def release(self, id: SessionId, lease: str) -> bool:
        """End a ``CLOSING`` session: remember its reason, free its slot, hand the slot to the next that waits.

        Returns False, and changes nothing, if the session is unknown, of another lease, or not ``CLOSING``.
        """
        ...

    async def hand_over(self, id: SessionId, lease: str, opening: Opening) -> Session | None:
        """End a ``CLOSING`` session as `release` does, and make its slot *opening*'s in the same step.

        Nobody who waits comes between the two: sessions that follow each other on one attachment keep their slot, or
        all that reset at once on a full pool would wait for each other. *opening* may be of the same id.

        Returns None, and changes nothing, if the session is unknown, of another lease, or not ``CLOSING``; or if its
        worker is of another environment or takes no more sessions.

        Raises:
            SessionExists: another session has the id of *opening*, or waits for a slot.
        """
        ...

    # -- the control loop ---------------------------------------------------------------------------------------

    async def late(self, limit: int) -> list[Session]:
        """List up to *limit* ``OPEN`` sessions whose deadline has passed, earliest first; changes nothing.

        The control loop asks their workers before it ends them with `expire`: a call whose trainer hung up, or whose
        replica died, is known to its worker only.
        """
        ...

    async def expire(self, ids: Sequence[SessionId]) -> list[Session]:
        """Move those of *ids* that are ``OPEN`` and whose deadline has passed to ``CLOSING`` (``EXPIRED``).

        The deadline is checked in the same atomic step. Publishes `SessionEnded` for each; returns them.
        """
        ...

    async def due(self, limit: int) -> list[Session]:
        """Move up to *limit* ``OPENING`` sessions whose deadline has passed to ``CLOSING`` (``OPEN_FAILED``).

        And take up again ``CLOSING`` ones that nobody released within ``closing_s``; they keep their reason. Returns
        both, earliest first. The deadline is checked in the same atomic step. Publishes `SessionEnded` for each.
        """
        ...

    async def add_worker(self, worker: Worker, *, fence: int = 0) -> None:
        """Register a worker that starts (``STARTING``), or one that was adopted.

        *fence*, here and below, is that of the caller's `lead`; 0: it acts for itself, whoever leads.

        Raises:
            NotLeading: a later leader's fence is known, or the data is gone in which the caller began to lead; nothing
                was changed.
        """
        ...

    async def worker_ready(self, id: WorkerId, address: str, *, slots: int = 0) -> bool:
        """Make a ``STARTING`` worker ``READY`` at *address* and give its slots to those that wait.

        *slots*, if not 0, is the capacity that it told, and replaces the one that it was added with.

        Closes the environment's breaker. Returns False if the worker is unknown or not ``STARTING``.
        """
        ...

    async def pause_worker(self, id: WorkerId, *, fence: int = 0) -> bool:
        """Make a ``READY`` worker that holds no session ``PAUSED``; whether it is now. Raises ``NotLeading``."""
        ...

    async def suspect_worker(self, id: WorkerId) -> bool:
        """Make a ``READY`` worker ``SUSPECT``: it gets no more sessions until `wake_worker`; whether it is now."""
        ...

    async def wake_worker(self, id: WorkerId) -> bool:
        """Make a ``PAUSED`` or ``SUSPECT`` worker ``READY``, and give its slots to those that wait.

        Returns False if it is neither.
        """
        ...

    async def limit_worker(self, id: WorkerId, slots: int) -> None:
        """Lower a worker's slots, to no less than 1: it refused a session beyond them.

        Sessions that hold one beyond *slots* keep it. Nothing happens where it has fewer, or is unknown.
        """
        ...

    async def drain_worker(self, id: WorkerId, *, only_if_idle: bool = False, fence: int = 0) -> bool:
        """Make a worker ``DRAINING``; with *only_if_idle* if it holds no session. One that starts never serves any.

        Returns whether it is draining now (True also if it was before, whatever it holds; False if it is unknown).
        Raises ``NotLeading``.
        """
        ...

    async def remove_worker(self, id: WorkerId, reason: CloseReason, *, fence: int = 0) -> list[Session] | None:
        """Forget a worker; its sessions become ``CLOSED`` with *reason* and are returned. Publishes for each.

        None if it is unknown: of several that remove a worker at once, one removes it. Raises ``NotLeading``.
        """
        ...

    async def worker(self, id: WorkerId) -> Worker | None:
        """Look a worker up."""
        ...

    async def load(self) -> Mapping[EnvironmentName, EnvironmentLoad]:
        """What every environment holds and what waits; environments without either may be absent."""
        ...

    async def sessions(self, *, limit: int = 1000) -> list[Session]:
        """List sessions that hold a slot, for operators."""
        ...

    async def fail_waiting(self, environment: EnvironmentName, message: str, *, fence: int = 0) -> int:
        """Let every opening that waits for *environment* fail with ``EnvironmentUnavailable(message)``; how many.

        Raises ``NotLeading``.
        """
        ...

    async def open_breaker(self, environment: EnvironmentName, message: str, *, for_s: float, fence: int = 0) -> None:
        """Let openings of *environment* that find no free slot fail at once, for *for_s* seconds; those that wait fail.

        After that time they wait again, and the next start is the trial. `worker_ready` ends it early. Raises
        ``NotLeading``.
        """
        ...

    async def own(self, owner: str, *, takes_over: bool = False) -> str:
        """Claim the store for the gateway *owner*, before any of its replicas leads; returns whose store it is.

        It is *owner*'s if it is nobody's, as a new or an emptied one; or with *takes_over*, if no replica is alive, as
        far as the store has heard. `lead` claims an emptied store anew, and raises ``StoreUnavailable`` where another
        owner took it over.
        """
        ...

    async def lead(self, replica: str, *, ttl_s: float) -> Lead:
        """Become or stay the leader of the control loop for *ttl_s* seconds; and learn whether the store is whole."""
        ...

    async def resign(self, replica: str) -> None:
        """Give the lead up, if *replica* has it, so that another need not wait for its end."""
        ...

    # -- after a loss of data -----------------------------------------------------------------------------------
    # A store that was emptied, or that came back with an older state, is not whole until its leader has rebuilt it from
    # what workers and replicas know. Until then `find` of what it lacks, `touch` and `opened` raise
    # ``StoreUnavailable``: it can't say that a session is gone. Claims wait. Nothing expires. A new store is not whole
    # either: there is nothing to rebuild then.

    async def adopt(self, worker: Worker, sessions: Sequence[Session], *, fence: int) -> list[SessionId]:
        """Register a running worker and the sessions that it holds, in one step; of known ones what is missing.

        *sessions* become ``OPEN`` and their idle time starts now; those that the store knows, of the same lease, stay
        as they are; one that it knows under another lease in another worker is left out. Known ``OPEN`` sessions of
        this worker that are not among *sessions* stay as they are too. Returns the ids of the sessions that the worker
        holds now. *worker*'s state is taken where it is new; a known one keeps its own. Raises ``NotLeading``.
        """
        ...

    async def restore(self, sessions: Sequence[Session]) -> list[SessionId]:
        """Register sessions that a replica serves and the store may have lost; returns those that it holds now.

        Only those whose worker is known, and whose id is not taken by another lease; a worker may come to hold more
        than it has slots. Their idle time starts now. Allowed while the store is not whole, and a no-op for those that
        it knows.
        """
        ...

    async def rebuilt(self, *, fence: int) -> None:
        """Say that the store is whole again. Raises ``NotLeading``."""
        ...

    # -- all ----------------------------------------------------------------------------------------------------

    def notices(self) -> AsyncIterator[Notice]:
        """Follow what happens from now on. May lose notices (a slow reader, a broken connection): only a hint."""
        ...

    async def start(self) -> None:
        """Connect. Raises ``StoreUnavailable`` if the store does not answer; then nothing is left open."""
        ...

    async def ping(self) -> None:
        """Return if the store answers."""
        ...

    async def aclose(self) -> None:
        """Let go of connections; waiting claims fail with ``StoreUnavailable``."""
        ...


class Backend(Protocol):
    """What starts and stops workers. Blocking clients live behind this seam, in threads."""

    async def start(self, worker: Worker, environment: Environment, lease: LeaderLease | None = None) -> str:
        """Start *worker* and return its address; it need not be ready yet.

        Leaves nothing behind when it fails or is cancelled.

        Args:
            lease: Of the leader that asks; checked right before each request to the engine that makes or starts
                something.

        Raises:
            NotLeading: the lease ended.
            StartFailed: the engine refused, or the worker died at once.
            BackendError: the engine does not answer; the environment may be as good as ever.
        """
        ...

    async def stop(self, id: WorkerId) -> None:
        """Stop and remove a worker and all that belongs to it; unknown ids are no error.

        Raises:
            BackendError: the engine does not answer; the worker may still be there.
        """
        ...

    async def logs(self, id: WorkerId, *, lines: int = 20) -> str:
        """The last *lines* of a worker's output; empty if there is none."""
        ...

    async def found(self) -> list[Found]:
        """List the workers of this gateway's instance that the engine knows of, running or dead."""
        ...

    async def pause(self, id: WorkerId, lease: LeaderLease | None = None) -> None:
        """Freeze an idle worker: it keeps its memory and gets no CPU.

        Args:
            lease: Of the leader that asks; checked right before the request to the engine.

        Raises:
            NotLeading: the lease ended.
            BackendError: there is no such worker, or it can't be frozen.
        """
        ...

    async def resume(self, id: WorkerId) -> None:
        """Let a paused worker go on; one that runs is no error. Raises ``BackendError``."""
        ...

    async def prepare(self, environment: Environment) -> str:
        """Bring about what every start of *environment* needs, its image above all, and name it.

        Returns the image's id (``sha256:…``), which is another one when the image was built or pulled anew; empty where
        there is no image.

        Raises:
            StartFailed: there is no such image, and it can't be had.
            BackendError: the engine does not answer.
        """
        ...

    def deaths(self) -> AsyncIterator[Death]:
        """Follow workers that die, whoever ended them. May lose some: `found` is the truth."""
        ...

    def engines(self) -> int:
        """How many engines start workers side by side, by what is known now: each takes its own number at once."""
        ...

    def leaving(self) -> frozenset[WorkerId]:
        """Workers that are to get no more sessions, as their machine drains; from what is known by now, without asking.

        What runs in them goes on. Ids that nobody knows any more may be among them.
        """
        ...

    async def check(self) -> None:
        """Raise ``BackendError`` with what to do when workers can't be started here.

        Also where an environment asks for more CPUs, memory or GPUs than there are.
        """
        ...

    async def aclose(self) -> None:
        """Let go of clients and threads; workers that cannot outlive the gateway are stopped."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """One request to a worker: HTTP/1.1 in the words of any protocol that is carried by it."""

    method: bytes
    target: bytes
    """Path and query, percent-encoded."""
    headers: Headers = ()
    body: bytes = b""


class Exchange(Protocol):
    """A request that was sent and whose answer is coming in. Must be closed, also when it was read to the end."""

    status: int
    headers: Headers
    """As received, names in lower case; framing and connection headers are left out."""

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What the answer tells of the author's code besides, for operators; whole once the body was read."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises ``UpstreamGone`` or ``UpstreamTimeout`` when it breaks off."""
        ...

    async def read(self, limit_bytes: int) -> bytes:
        """Read the whole body. Raises ``UpstreamError`` when it exceeds *limit_bytes*."""
        ...

    async def aclose(self) -> None:
        """Give the connection back, or drop it if the body was not read to its end."""
        ...


class Dial(Protocol):
    """Opens connections to workers on other machines: to ``node:`` addresses."""

    async def __call__(self, address: Address, factory: Callable[[], P]) -> tuple[asyncio.BaseTransport, P]:
        """Connect to *address*; the protocol that *factory* makes gets all that comes, and nothing stands between.

        Raises:
            OSError: no connection, with the reason; nothing reached the worker. ``TimeoutError`` is one.
        """
        ...


class DialSocket(Protocol):
    """As `Dial`, for clients that want a socket."""

    async def __call__(self, address: Address) -> socket.socket:
        """A connected Unix socket, which belongs to the caller. Raises ``OSError``."""
        ...


class Transport(Protocol):
    """Carries requests to workers; keeps connections per worker and never repeats a request."""

    async def send(self, worker: WorkerId, address: str, request: Request, *, silence_s: float) -> Exchange:
        """Send *request* and return when the head of the answer is there.

        Args:
            worker: The life that a connection belongs to: an address may be used again by another worker.
            silence_s: The longest wait for the head, and between two pieces of the body.

        Raises:
            UpstreamGone: no connection, or it broke; ``sent`` tells whether anything may have run.
            UpstreamTimeout: nothing came for *silence_s*.
        """
        ...

    def forget(self, worker: WorkerId) -> None:
        """Drop a worker's connections; requests under way fail with ``UpstreamGone``."""
        ...


class Upstream(Protocol):
    """One protocol towards workers.

    A request for a session is sent once, and never again where it may have run.
    """

    async def ready(self, worker: Worker, environment: Environment) -> int:
        """Return when *worker* answers as *environment* should; tries until the caller's deadline cancels it.

        Returns the sessions that it can hold at once if that is to be learned (``pool.learns_slots``) and it told,
        else 0.

        Raises:
            UpstreamError: it answers, but is not what it should be: waiting longer would not help.
        """
        ...

    async def alive(self, worker: Worker, environment: Environment, *, busy_counts: bool = True) -> None:
        """Return if *worker*, which has been ready once, still answers; takes no room, and disturbs no session.

        With *busy_counts* one that works on a request from here may count as alive without an answer: its environment
        may hold up all that its server does.

        Raises:
            UpstreamError: it does not, or is not what it should be.
        """
        ...

    async def tools(self, worker: Worker, environment: Environment) -> bytes:
        """The environment's tool list as JSON in ORS' form (``ListToolsOutput``)."""
        ...

    async def registered(self, worker: Worker, environment: Environment) -> Registered:
        """The tasks that the worker knows by itself, by id; none where its protocol has no word for them."""
        ...

    async def splits(self, worker: Worker, environment: Environment) -> list[Split]:
        """The splits of tasks that the worker has by itself; none where it has no tasks, or they are the gateway's."""
        ...

    async def count(self, worker: Worker, environment: Environment, split: str) -> int:
        """How many tasks a split of the worker's has. Raises ``UnknownSplit``."""
        ...

    async def tasks(
        self, worker: Worker, environment: Environment, split: str, start: int, stop: int
    ) -> list[TaskSpec]:
        """Tasks of a split of the worker's, from index *start* up to, not including, *stop*: ``0 <= start <= stop``.

        Those beyond the end are left out. What is returned can be a ``Setup``'s spec. Raises ``UnknownSplit``.
        """
        ...

    async def about(self, worker: Worker, environment: Environment) -> Mapping[str, Any]:
        """What the worker tells of itself in its own protocol's words, for a front of the same one; ``{}``: nothing.

        OpenEnv: ``{"schema": …, "metadata": …}``. AReaL: the answer to ``task/info``.
        """
        ...

    async def open(self, session: Session, environment: Environment, setup: Setup) -> str:
        """Open the session in its worker; returns the handle by which any replica finds it again.

        Raises:
            AuthorFault: the author's code failed.
            InvalidRequest: the worker refuses the task, or would drop a part of it silently; with the reason.
            WorkerFull: it holds fewer sessions than was thought; nothing was opened.
            UpstreamError: it failed.
        """
        ...

    async def close(self, session: Session, environment: Environment, *, keeps: bool = False) -> Summary | None:
        """Close the session in its worker, waiting for its teardown. None if the worker does not know it.

        With *keeps* a successor of the same id is about to be opened in the same slot, by this replica, and what the
        session ran in may be kept for it. Closing this session once more, or the successor, gives that back.

        Raises:
            UpstreamError: its slot can't be trusted: the worker did not take the end, or a step still runs in it.
        """
        ...

    async def sessions(
        self, worker: Worker, environment: Environment, ids: Collection[SessionId] | None = None
    ) -> list[WorkerSession] | None:
        """The worker's own list of sessions; None if its protocol has none.

        With *ids* at least those of them that it has: of tens of thousands a few may be asked for.
        """
        ...

    async def steps(self, session: Session, environment: Environment) -> int | None:
        """How many steps the session has seen; None if the worker does not know it."""
        ...

    async def client_state(self, session: Session, environment: Environment) -> Mapping[str, Any]:
        """What the environment itself shows of the session's state; empty where it has no word for that."""
        ...

    async def prompt(self, session: Session, environment: Environment) -> list[Block]:
        """What the agent is told first; waits for the task's setup until the caller's deadline cancels it.

        Raises:
            SessionNotFound: the worker does not know the session.
            AuthorFault: the setup failed, with its reason.
            UpstreamError: the worker failed.
        """
        ...

    async def act(
        self, session: Session, environment: Environment, action: Action, *, key: str | None = None
    ) -> StepResult:
        """Run *action* once; the same *key* and action again get the outcome of the first run.

        Raises:
            SessionNotFound: the worker does not know the session; nothing ran.
            CallConflict: *key* stands for another action.
            InvalidRequest: the worker can't read the action at all.
            AuthorFault, SessionFailed: the session has failed, and is over.
            UpstreamError: the worker failed; only ``UpstreamGone`` with ``sent`` False is sure not to have run.
        """
        ...

    async def forward(
        self, session: Session, environment: Environment, operation: str, *, body: bytes, headers: Headers
    ) -> Exchange:
        """Pass an ORS operation (``call``, ``prompt``, ``task_tools``, ``messages``, ``score_group``) on.

        *body* and the answer are bytes in ORS' form; *headers* are those of the trainer's request that matter to
        a worker. Raises as `Transport.send`; and ``AuthorFault``, where the session has failed.
        """
        ...

    async def relay(self, session: Session, environment: Environment, message: bytes) -> bytes:
        """Pass a message of the worker's own protocol on and return its answer, both bytes for bytes.

        For a front of the same protocol. OpenEnv: one frame, and the one that replies to it; an empty message asks for
        the reply to the reset that opened the session; a reply that tells of faults is a ``FaultReply``. Other
        protocols have no use for it: ``NotImplementedError``.

        Raises:
            SessionNotFound: the worker does not know the session; nothing ran.
            UpstreamError: as `act`.
        """
        ...


class Peers(Protocol):
    """The other replicas of this gateway.

    A session whose state is a connection (an OpenEnv socket) is held by one replica; the others ask that one.
    """

    @property
    def me(self) -> str:
        """The URL under which other replicas reach this one; empty: there are no others."""
        ...

    async def ask(self, peer: str, operation: str, session: Session, message: bytes, *, within_s: float) -> bytes:
        """Let the replica at the URL *peer* do *operation* for a session that it holds, and return its answer.

        Raises:
            SessionNotFound: it does not hold the session (any more); nothing ran.
            UpstreamGone: the replica is not there (``sent`` False), or was lost while it worked (``sent`` True).
            GatewayError: what failed over there, as the same class.
        """
        ...

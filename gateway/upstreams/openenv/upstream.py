"""OpenEnv towards workers: unmodified servers of 0.2.0 to 0.10.0, one WebSocket for each session.

A session's socket is held by one replica; the others ask that one. Where the server's sessions outlive their sockets
(from 0.5 on), another replica takes a session over when its holder is gone; before, the session is gone with it.

Differences from a stock client: a socket that broke is never replaced by one with a fresh episode; a request whose
asker left is played to its end, so that replies never shift; the stateless HTTP reset and step are never used.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, TypeVar

from gateway.core.environment import Environment, Split, TaskSpec
from gateway.core.episode import Action, Block, FaultReply, StepResult, Summary
from gateway.core.errors import (
    AuthorFault,
    InvalidRequest,
    SessionNotFound,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
)
from gateway.core.faults import author_faults
from gateway.core.json_text import compact, parse
from gateway.core.ports.transport import DialSocket, Transport
from gateway.core.session import CloseReason, Session, SessionSetup
from gateway.core.worker import Worker
from gateway.upstreams.idempotency.recorder import Recorder
from gateway.upstreams.openenv.actions import Forms, step_frame
from gateway.upstreams.openenv.capabilities import CapabilityProbe
from gateway.upstreams.openenv.episodes import OpenEnvSessions
from gateway.upstreams.openenv.frames import acts, check_reward, failure_of, kind_of
from gateway.upstreams.openenv.http import Http, Place, remember
from gateway.upstreams.openenv.observations import first_blocks, step_result
from gateway.upstreams.openenv.ownership import (
    Handle,
    SessionOwnership,
    StoredSessions,
    read_action,
    read_handle,
    read_result,
    read_summary,
    write_action,
    write_result,
    write_summary,
)
from gateway.upstreams.openenv.tasks import Tasks, reset_data
from gateway.upstreams.openenv.websocket import LiveSession, WebSocketPool
from gateway.upstreams.ors_facade import OrsFacade, spelled
from gateway.upstreams.replica_client import ReplicaClient

T = TypeVar("T")

OPENED_MAX: Final = 10_000
THREAD_BYTES: Final = 4 * 2**20
"""Larger observations are read in a thread, so that other sessions go on."""
_RELAYED: Final = frozenset(("step", "state", "mcp"))


class OpenEnvUpstream(OrsFacade):
    """Speaks OpenEnv to workers: HTTP over *transport*, WebSockets of its own."""

    counts_itself: ClassVar[bool] = True

    def __init__(
        self,
        transport: Transport,
        peers: ReplicaClient | None = None,
        *,
        store: StoredSessions | None = None,
        recorder: Recorder | None = None,
        dial_socket: DialSocket | None = None,
    ) -> None:
        """Wire it.

        Args:
            peers: The other replicas; None: there are none.
            store: Says which replica holds a session, and is told when another one takes it over. None: there are no
                other replicas.
            recorder: Tells other replicas of the calls of this one.
            dial_socket: Leads to workers on other machines.
        """
        super().__init__(recorder=recorder)
        self._http = Http(transport)
        self._sockets = WebSocketPool(dial_socket)
        self._probe = CapabilityProbe(self._http, self._sockets)
        self._forms = Forms(self._http)
        self._tasks = Tasks(self._http)
        self._episodes = OpenEnvSessions(self._http, self._sockets, self._probe)
        self._holding = SessionOwnership(self._episodes, peers=peers, store=store)
        self._opened: OrderedDict[str, None] = OrderedDict()
        """Leases whose opening was tried here: what they left behind is known."""

    # -- workers --------------------------------------------------------------------------------------------------

    async def ready(self, worker: Worker, environment: Environment) -> int:
        """Return when a socket gets a reply; with ``pool.learns_slots`` the sessions that the server holds at once."""
        return await self._probe.ready(worker, environment)

    async def alive(self, worker: Worker, environment: Environment, *, busy_counts: bool = True) -> None:
        """Return if the server answers; no socket is opened, which would take a place.

        With *busy_counts* one that works on a request from here is not asked.
        """
        if busy_counts and self._holding.is_busy(worker.id):
            return
        await self._probe.alive(worker, environment)

    async def tools(self, worker: Worker, environment: Environment) -> bytes:
        """The image's own tools; for a Gym image the tool ``step``, whose input is its action."""
        return (await self._forms.of(Place(worker.id, worker.address), environment.digest())).listing

    async def splits(self, worker: Worker, environment: Environment) -> list[Split]:
        """The splits of the image's Task API, else one of seeds."""
        return await self._tasks.splits(Place(worker.id, worker.address), environment)

    async def count(self, worker: Worker, environment: Environment, split: str) -> int:
        """How many tasks a split has. Raises ``UnknownSplit``."""
        return await self._tasks.count(Place(worker.id, worker.address), environment, split)

    async def tasks(
        self, worker: Worker, environment: Environment, split: str, start: int, stop: int
    ) -> list[TaskSpec]:
        """Tasks of a split. Raises ``UnknownSplit``."""
        return await self._tasks.range(Place(worker.id, worker.address), environment, split, start, stop)

    async def about(self, worker: Worker, environment: Environment) -> Mapping[str, Any]:
        """The image's schemas and metadata, as it answers them."""
        at = Place(worker.id, worker.address)
        found = {}
        for what in ("schema", "metadata"):
            status, answer = await self._http.get(at, f"/{what}")
            if status == 200 and isinstance(answer, Mapping):
                found[what] = answer
        return found

    # -- open and close -------------------------------------------------------------------------------------------

    async def open(self, session: Session, environment: Environment, setup: SessionSetup) -> str:
        """Begin an episode; see ``Upstream.open``. From then on this replica holds its socket."""
        data = reset_data(environment, setup)
        remember(self._opened, session.lease, None, OPENED_MAX)
        kept = await self._holding.take_kept(session, environment)
        held = await self._episodes.begin(session, environment, data, kept)
        self._holding.add(held)
        return Handle(sid=held.sid, holder=self._holding.me, first=held.first).written()

    async def close(self, session: Session, environment: Environment, *, keeps: bool = False) -> Summary | None:
        """End the episode, here or in the replica that holds it; see ``Upstream.close``.

        A server's session is reset for the next episode, as its own clients would do: to make one may take long.
        """
        within_s = environment.timeouts.close_s
        await self._holding.drop_kept(session, within_s)
        held, handle = self._holding.pop(session)
        was_opened_here = self._opened.pop(session.lease, False) is None
        try:
            if held is not None:
                if keeps and await self._holding.keep(held):
                    return held.summary
                return await self._episodes.close(held, within_s)
            if await self._episodes.undone(session.lease, within_s):
                return None
            if handle:
                return await self._close_elsewhere(session, environment, read_handle(handle))
            if session.reason is CloseReason.OPEN_FAILED and not was_opened_here:
                await self._refuse_unknown_rest(session)
            return None
        finally:
            self.forget(session)

    async def _close_elsewhere(self, session: Session, environment: Environment, handle: Handle) -> Summary | None:
        within_s = environment.timeouts.close_s
        answer = None
        try:
            answer = await self._holding.ask_holder(handle, "close", session, b"", within_s=within_s)
        except UpstreamGone:
            if not handle.sid:
                raise
        if answer is not None:
            return read_summary(answer)
        if handle.sid:
            await self._episodes.end(Place(session.worker, session.address), handle.sid, within_s)
        return None

    async def _refuse_unknown_rest(self, session: Session) -> None:
        """A replica that died while it opened a session may have left one in the server that nobody knows the id of.

        Raises:
            UpstreamError: that may be so.
        """
        if await self._probe.outlives_sockets(Place(session.worker, session.address)):
            raise UpstreamError("another replica did not finish its opening: it may have left a session in the worker")

    # -- act ------------------------------------------------------------------------------------------------------

    async def step(self, session: Session, environment: Environment, action: Action, *, key: str | None) -> StepResult:
        """Run *action* in the replica that holds the session. Raises as ``Upstream.act``."""
        found = await self._holding.find(session, environment, "act", lambda: write_action(action, key))
        return read_result(found) if isinstance(found, bytes) else await self._stepped(found, action)

    async def _stepped(self, held: LiveSession, action: Action) -> StepResult:
        try:
            form = await self._forms.of(held.at, held.digest)
        except (UpstreamGone, UpstreamTimeout) as error:  # of a question: nothing of the action was sent
            raise UpstreamGone(error.detail, sent=False) from error
        frame = step_frame(action, held.environment, form)
        if isinstance(frame, StepResult):
            return frame
        return await _read(step_result, await self._episodes.ask(held, frame))

    async def pass_frame(self, session: Session, environment: Environment, message: bytes) -> bytes:
        """Pass a frame on and return the one that replies to it; see ``FrameUpstream.pass_frame``."""
        if message and kind_of(message, parsed_max=len(message)) not in _RELAYED:
            raise InvalidRequest("only step, state and mcp are passed on: the gateway itself begins and ends episodes")
        if not message and self._holding.get(session) is None and (first := read_handle(session.handle).first):
            return first
        try:
            found = await self._holding.find(session, environment, "relay", lambda: message)
            reply = found if isinstance(found, bytes) else await self._relayed(found, message)
        except AuthorFault as error:
            error.faults = error.faults or author_faults(error.detail, "step")  # another replica tells of none
            raise
        return _with_faults(message, reply)

    async def _relayed(self, held: LiveSession, message: bytes) -> bytes:
        if message:
            reply = await self._episodes.ask(held, message)
            check_reward(reply)
            return reply
        if not held.first:
            raise UpstreamError("the first observation is not kept any more: it was too large")
        return held.first

    async def prompt(self, session: Session, environment: Environment) -> list[Block]:
        """The first observation."""
        return await _read(first_blocks, await self.pass_frame(session, environment, b""))

    async def steps(self, session: Session, environment: Environment) -> int | None:
        """Return the steps that the session's holder has seen; None if no replica knows the session."""
        try:
            found = await self._holding.find(session, environment, "steps")
        except SessionNotFound:
            return None
        return int(parse(found)) if isinstance(found, bytes) else found.steps

    async def _asked(self, held: LiveSession, action: Action, key: str | None) -> StepResult:
        """As `act`, for the replica that has recorded the call, and waits for it."""
        run = self._stepping(held.session, held.environment, action, key)
        within_s = held.environment.timeouts.call_s
        return await self.calls.run(held.session, spelled(action), run, within_s=within_s, key=key, is_asked=True)

    # -- replicas -------------------------------------------------------------------------------------------------

    async def serve(self, operation: str, session_id: str, lease: str, message: bytes, within_s: float) -> bytes:
        """Do for another replica what it asks of a session that is held here; the other side of ``ReplicaClient.ask``.

        Who calls this ends it after *within_s*, by a cancellation: what was sent to the server is played to its end.

        Raises:
            SessionNotFound: it is not held here; nothing ran.
        """
        held = await self._holding.here(session_id, lease)
        if operation == "relay":
            return await self._relayed(held, message)
        if operation == "act":
            action, key = read_action(message)
            return write_result(await self._asked(held, action, key))
        if operation == "steps":
            return compact(held.steps)
        if operation == "close":
            return write_summary(await self.close(held.session, held.environment))
        raise InvalidRequest(f"replicas do not ask for {operation[:40]!r}")

    async def aclose(self) -> None:
        """Let go of all sockets; sessions that outlive them go on, for other replicas."""
        await self.calls.aclose()
        await self._holding.aclose()
        await self._episodes.aclose()


def _with_faults(message: bytes, reply: bytes) -> bytes:
    """*reply* to the frame *message*, with what it tells of an action that failed in the environment's code."""
    if not message or not acts(message) or not (failed := failure_of(reply)):
        return reply
    told = FaultReply(reply)
    told.faults = author_faults(failed, "step" if kind_of(reply) != "mcp" else "tools/call")
    return told


async def _read(read: Callable[[bytes], T], reply: bytes) -> T:
    return await asyncio.to_thread(read, reply) if len(reply) > THREAD_BYTES else read(reply)

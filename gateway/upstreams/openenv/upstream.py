"""Call workers by the OpenEnv protocol: unmodified servers of 0.2.0 to 0.10.0, with one WebSocket per session.

One replica holds a session's socket, and the other replicas forward their calls to it. From 0.5 on, a server's
sessions outlive their sockets, so another replica takes a session over when its holder is gone. Before 0.5, the session
ends with its holder.

This client differs from a stock client in three ways. It never replaces a broken socket by a socket with a new episode.
It completes a request whose caller was cancelled, so that each request gets its own reply. It never uses the stateless
HTTP reset and step.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

from gateway.core.environment import Environment, Split, TaskSpec
from gateway.core.episode import Action, Block, StepResult, Summary, TextBlock
from gateway.core.errors import (
    AuthorFault,
    InvalidRequest,
    SessionNotFound,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
)
from gateway.core.faults import author_faults
from gateway.core.ids import EnvironmentName
from gateway.core.json_text import THREAD_BYTES, compact, parse
from gateway.core.ports.store import SessionStore
from gateway.core.ports.transport import DialSocket, Transport
from gateway.core.ports.upstream import EpisodeResults
from gateway.core.session import CloseReason, Session, SessionSetup
from gateway.core.worker import Worker
from gateway.upstreams.idempotency.recorder import Recorder
from gateway.upstreams.openenv.actions import Forms, step_frame
from gateway.upstreams.openenv.capabilities import CapabilityProbe
from gateway.upstreams.openenv.episodes import OpenEnvSessions
from gateway.upstreams.openenv.frames import check_reward, kind_of
from gateway.upstreams.openenv.http import Http, Place, remember
from gateway.upstreams.openenv.observations import EMPTY, first_blocks, step_result
from gateway.upstreams.openenv.ownership import (
    Handle,
    SessionOwnership,
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

logger = logging.getLogger(__name__)

T = TypeVar("T")

OPENED_MAX: Final = 10_000
_RELAYED: Final = frozenset(("step", "state", "mcp"))


class OpenEnvUpstream(OrsFacade):
    """Calls workers by the OpenEnv protocol, with HTTP over a transport and with WebSockets of its own."""

    counts_itself: ClassVar[bool] = True

    def __init__(
        self,
        transport: Transport,
        peers: ReplicaClient | None = None,
        *,
        store: SessionStore,
        recorder: Recorder | None = None,
        results: EpisodeResults | None = None,
        dial_socket: DialSocket | None = None,
    ) -> None:
        """Create the upstream and its parts.

        Args:
            peers: The client of the other replicas; None without other replicas.
            store: The store that records which replica holds a session.
            recorder: Reports this replica's calls to other replicas.
            results: Keeps the results of finished episodes; None keeps none.
            dial_socket: Connects to workers on other machines.
        """
        super().__init__(recorder=recorder, results=results)
        self._http = Http(transport)
        self._sockets = WebSocketPool(dial_socket)
        self._probe = CapabilityProbe(self._http, self._sockets)
        self._forms = Forms(self._http)
        self._tasks = Tasks(self._http)
        self._episodes = OpenEnvSessions(self._http, self._sockets, self._probe)
        self._holding = SessionOwnership(self._episodes, peers=peers, store=store)
        self._opened: OrderedDict[str, None] = OrderedDict()
        """Leases whose opening this replica attempted, so that it knows their remains."""
        self._empty: set[EnvironmentName] = set()
        """Environments whose first observation was empty, which is logged once."""

    # -- workers --------------------------------------------------------------------------------------------------

    async def ready(self, worker: Worker, environment: Environment) -> int:
        """Wait until a socket gets a reply; return the server's capacity if ``pool.learns_slots`` is set, else 0."""
        return await self._probe.ready(worker, environment)

    async def alive(self, worker: Worker, environment: Environment, *, busy_counts: bool = True) -> None:
        """Return if the server answers. The check opens no socket, because a socket would occupy a place.

        With *busy_counts*, a server that processes a request of this replica is not queried.
        """
        if busy_counts and self._holding.is_busy(worker.id):
            return
        await self._probe.alive(worker, environment)

    async def tools(self, worker: Worker, environment: Environment) -> bytes:
        """Return the image's own tools; for a Gym image the tool ``step``, whose input is the action."""
        return (await self._forms.of(Place(worker.id, worker.address), environment.digest())).listing

    async def splits(self, worker: Worker, environment: Environment) -> list[Split]:
        """Return the splits of the image's Task API, or else the single split of seeds."""
        return await self._tasks.splits(Place(worker.id, worker.address), environment)

    async def count(self, worker: Worker, environment: Environment, split: str) -> int:
        """Return the number of tasks in a split. Raises ``UnknownSplit``."""
        return await self._tasks.count(Place(worker.id, worker.address), environment, split)

    async def tasks(
        self, worker: Worker, environment: Environment, split: str, start: int, stop: int
    ) -> list[TaskSpec]:
        """Return the tasks of a split from *start* up to, but not including, *stop*. Raises ``UnknownSplit``."""
        return await self._tasks.range(Place(worker.id, worker.address), environment, split, start, stop)

    async def about(self, worker: Worker, environment: Environment) -> Mapping[str, Any]:
        """Return the image's responses to ``/schema``, ``/metadata`` and MCP's ``tools/list`` unchanged."""
        at = Place(worker.id, worker.address)
        found: dict[str, Any] = {}
        for what in ("schema", "metadata"):
            status, answer = await self._http.get(at, f"/{what}")
            if status == 200 and isinstance(answer, Mapping):
                found[what] = answer
        if isinstance(found.get("schema", {}).get("action"), Mapping):
            listed = (await self._forms.of(at, environment.digest())).listed
            found |= {} if listed is None else {"tools": listed}
        return found

    # -- open and close -------------------------------------------------------------------------------------------

    async def open(self, session: Session, environment: Environment, setup: SessionSetup) -> Session:
        """Start an episode; see ``Upstream.open``. This replica then holds its socket."""
        data = reset_data(environment, setup)
        remember(self._opened, session.lease, None, OPENED_MAX)
        kept = await self._holding.take_kept(session, environment)
        held = await self._episodes.begin(session, environment, data, kept)
        self._holding.add(held)
        handle = Handle(sid=held.sid, holder=self._holding.me, first=held.first)
        return replace(session, handle=handle.written())

    async def close(self, session: Session, environment: Environment, *, keeps: bool = False) -> Summary | None:
        """End the episode, in this replica or in the holder; see ``Upstream.close``.

        With *keeps*, the server's session stays for the next episode, which resets it: a new session may take long to
        create.
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
        """Check that another replica's failed opening left no session, whose id would be unknown, in the server.

        Raises:
            UpstreamError: The server's sessions outlive their sockets, so the opening may have left a session.
        """
        if await self._probe.outlives_sockets(Place(session.worker, session.address)):
            raise UpstreamError("another replica did not finish its opening: it may have left a session in the worker")

    # -- act ------------------------------------------------------------------------------------------------------

    async def step(self, session: Session, environment: Environment, action: Action, *, key: str | None) -> StepResult:
        """Run *action* in the replica that holds the session. Raises the errors of ``Upstream.act``."""
        found = await self._holding.find(session, environment, "act", lambda: write_action(action, key))
        return read_result(found) if isinstance(found, bytes) else await self._stepped(found, action)

    async def _stepped(self, held: LiveSession, action: Action) -> StepResult:
        try:
            form = await self._forms.of(held.at, held.digest)
        except (UpstreamGone, UpstreamTimeout) as error:  # only the query of the form failed: the action was not sent
            raise UpstreamGone(error.detail, sent=False) from error
        frame = step_frame(action, held.environment, form)
        if isinstance(frame, StepResult):
            return frame
        read = partial(step_result, mapping=held.environment.observations)
        result = await _read(read, await self._episodes.ask(held, frame))
        if held.finished:
            await self.keep_result(held.session, held.summary)
        return result

    async def pass_frame(self, session: Session, environment: Environment, message: bytes) -> bytes:
        """Relay a frame and return its reply; see ``FrameUpstream.pass_frame``."""
        if message and kind_of(message, parsed_max=len(message)) not in _RELAYED:
            raise InvalidRequest("only step, state and mcp are passed on: the gateway itself begins and ends episodes")
        if not message and self._holding.get(session) is None and (first := read_handle(session.handle).first):
            return first
        try:
            found = await self._holding.find(session, environment, "relay", lambda: message)
            return found if isinstance(found, bytes) else await self._relayed(found, message)
        except AuthorFault as error:
            error.faults = error.faults or author_faults(error.detail, "step")  # a holder's error has no faults
            raise

    async def _relayed(self, held: LiveSession, message: bytes) -> bytes:
        if message:
            reply = await self._episodes.ask(held, message)
            check_reward(reply)
            if held.finished:
                await self.keep_result(held.session, held.summary)
            return reply
        if not held.first:
            raise UpstreamError("the first observation is not kept any more: it was too large")
        return held.first

    async def prompt(self, session: Session, environment: Environment) -> list[Block]:
        """Return the blocks of the first observation."""
        read = partial(first_blocks, mapping=environment.observations)
        blocks = await _read(read, await self.pass_frame(session, environment, b""))
        if blocks == [TextBlock(EMPTY, blocks[0].detail)] and environment.name not in self._empty:
            self._empty.add(environment.name)
            logger.warning("prompt_empty environment=%s: agents of other protocols see nothing first", environment.name)
        return blocks

    async def steps(self, session: Session, environment: Environment) -> int | None:
        """Return the number of steps that the session's holder has counted; None if the session is not found."""
        try:
            found = await self._holding.find(session, environment, "steps")
        except SessionNotFound:
            return None
        return int(parse(found)) if isinstance(found, bytes) else found.steps

    async def _asked(self, held: LiveSession, action: Action, key: str | None) -> StepResult:
        """Run `act` for another replica, which has recorded the call and waits for its result."""
        run = self._stepping(held.session, held.environment, action, key)
        within_s = held.environment.timeouts.call_s
        return await self.calls.run(held.session, spelled(action), run, within_s=within_s, key=key, is_asked=True)

    # -- replicas -------------------------------------------------------------------------------------------------

    async def serve(self, operation: str, session_id: str, lease: str, message: bytes, within_s: float) -> bytes:
        """Run another replica's *operation* on a session that this replica holds; see ``ReplicaClient.ask``.

        The caller cancels this after *within_s* seconds; a request already sent to the server still completes.

        Raises:
            SessionNotFound: This replica does not hold the session, and nothing ran.
            InvalidRequest: The operation is unknown.
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
        """Release all sockets; sessions that outlive their sockets stay, for other replicas."""
        await self.calls.aclose()
        await self._holding.aclose()
        await self._episodes.aclose()


async def _read(read: Callable[[bytes], T], reply: bytes) -> T:
    return await asyncio.to_thread(read, reply) if len(reply) > THREAD_BYTES else read(reply)

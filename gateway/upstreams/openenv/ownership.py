"""Track which replica holds a session's socket, call that replica, and take sessions over when it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from gateway.core.environment import Environment
from gateway.core.episode import Action, StepResult, Summary, summary_of_json, summary_to_json
from gateway.core.errors import SessionNotFound, UpstreamError, UpstreamGone
from gateway.core.ids import SessionId, WorkerId
from gateway.core.json_text import compact, parse
from gateway.core.ports.store import SessionStore
from gateway.core.session import Session, SessionState
from gateway.upstreams.idempotency.codec import result_of_json, result_to_json
from gateway.upstreams.openenv.episodes import SETTLE_S, OpenEnvSessions
from gateway.upstreams.openenv.http import remember
from gateway.upstreams.openenv.websocket import LiveSession
from gateway.upstreams.replica_client import ReplicaClient

FIRST_MAX_BYTES: Final = 32 * 2**10
"""Bytes of the largest first observation in a handle. Only the replica that opened the session has a larger one."""
MOVES_MAX: Final = 3
"""Maximum number of lookups of a session that other replicas take over meanwhile."""
MOVED_MAX: Final = 10_000
FIRST_TOTAL_BYTES: Final = 256 * 2**20
"""Maximum total bytes of first observations that do not fit into handles; the oldest are dropped first."""
KEPT_S: Final = 60.0
"""Seconds for which a kept session waits for its next episode. A longer wait means an irregular release of its slot."""
KEPT_END_S: Final = 10.0
SWEEP_S: Final = 300.0
"""Seconds between sweeps for sessions whose socket broke, with their worker for example, and that were never ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """The data by which any replica finds a session."""

    sid: str = ""
    """The session's id in the server; empty if the session is its socket, which the holder has."""
    holder: str = ""
    """The URL of the replica that holds the socket; empty without other replicas."""
    first: bytes = b""
    """The reply to the session's reset; empty if only the holder has it."""

    def written(self) -> str:
        """Return the handle's text for the store."""
        first = self.first.decode() if len(self.first) <= FIRST_MAX_BYTES else ""
        return compact({"sid": self.sid, "at": self.holder, "first": first}).decode()


def read_handle(text: str) -> Handle:
    """Parse a session's handle.

    Raises:
        SessionNotFound: The session has no readable handle, because no replica opened it.
    """
    try:
        value = parse(text.encode())
        return Handle(sid=str(value["sid"]), holder=str(value["at"]), first=str(value["first"]).encode())
    except (ValueError, KeyError, TypeError) as error:
        raise SessionNotFound("the session has no handle") from error


class SessionOwnership:
    """Keeps the sessions that this replica holds, and routes calls about other sessions to their holders."""

    def __init__(self, episodes: OpenEnvSessions, *, peers: ReplicaClient | None, store: SessionStore) -> None:
        """Create the object; see ``OpenEnvUpstream`` for *peers* and *store*."""
        self._episodes = episodes
        self._peers = peers
        self._store = store
        # The sessions whose sockets this replica holds, by lease.
        self._held: dict[str, LiveSession] = {}
        self._moved: OrderedDict[str, str] = OrderedDict()
        """Handles, by lease, that are newer than the handles that callers have."""
        self._taking: dict[str, asyncio.Task[LiveSession | None]] = {}
        self._large: OrderedDict[str, LiveSession] = OrderedDict()
        """Sessions with a large first observation, oldest first."""
        self._swept_at = time.monotonic()
        self._kept: dict[SessionId, tuple[LiveSession, float]] = {}
        """Servers' sessions that wait for the next episode of the same id, with the time when they started to wait."""
        self._ending: set[asyncio.Task[None]] = set()

    def get(self, session: Session) -> LiveSession | None:
        """Return the session; None if this replica does not hold it."""
        return self._held.get(session.lease)

    def pop(self, session: Session) -> tuple[LiveSession | None, str]:
        """Remove a session that is being closed; return it, if this replica holds it, and its newest handle."""
        self._large.pop(session.lease, None)
        handle = self._moved.pop(session.lease, session.handle)
        return self._held.pop(session.lease, None), handle

    async def here(self, id: str, lease: str) -> LiveSession:
        """Return the session with this id and lease. Raises ``SessionNotFound`` if this replica does not hold it."""
        held = self._held.get(lease)
        if held is None and (taking := self._taking.get(lease)) is not None:
            held = await asyncio.shield(taking)  # this replica is becoming the holder
        if held is None or held.session.id != id:
            raise SessionNotFound("this replica does not hold the session")
        return held

    async def keep(self, held: LiveSession) -> bool:
        """Keep the server's session after its episode; return False if the next episode cannot use it.

        The creation of an environment may take seconds, and its reset milliseconds. OpenEnv's own clients also reset
        one environment for all their episodes.
        """
        now = time.monotonic()
        for id in [id for id, (_, since) in self._kept.items() if now - since > KEPT_S]:
            self._end_kept(id)
        if not await held.line.settle(SETTLE_S) or not held.line.is_open or held.line.overran:
            return False
        held.is_ended = True
        self._kept[held.session.id] = held, time.monotonic()
        return True

    async def take_kept(self, session: Session, environment: Environment) -> LiveSession | None:
        """Return the kept session for *session*, if any; end it and return None if it is not usable."""
        held, _ = self._kept.pop(session.id, (None, 0.0))
        if held is None:
            return None
        is_same = held.session.worker == session.worker and held.digest == environment.digest()
        if is_same and held.line.is_open:
            return held
        await self._close_quietly(held)
        return None

    async def drop_kept(self, session: Session, within_s: float) -> None:
        """End the kept session with *session*'s id, if any.

        Raises:
            UpstreamError: Its place may still be occupied.
        """
        held, _ = self._kept.pop(session.id, (None, 0.0))
        if held is not None:
            await self._episodes.close(held, within_s)

    def _end_kept(self, id: SessionId) -> None:
        task = asyncio.ensure_future(self._close_quietly(self._kept.pop(id)[0]))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _close_quietly(self, held: LiveSession) -> None:
        with contextlib.suppress(UpstreamError):
            await self._episodes.close(held, KEPT_END_S)

    def is_busy(self, worker: WorkerId) -> bool:
        """Return True if *worker* processes a request of this replica."""
        return any(held.line.is_busy for held in self._held.values() if held.session.worker == worker)

    async def ask_holder(
        self, handle: Handle, operation: str, session: Session, message: bytes, *, within_s: float
    ) -> bytes | None:
        """Request *operation* from the replica that holds the session.

        Return None if no other replica holds it; nothing ran then.

        Raises:
            UpstreamGone: The connection to the holder broke during the operation.
            GatewayError: The operation failed in the holder.
        """
        if self._peers is None or not self.is_elsewhere(handle):
            return None
        try:
            return await self._peers.ask(handle.holder, operation, session, message, within_s=within_s)
        except SessionNotFound:
            return None  # the holder closed the session, or was restarted
        except UpstreamGone as error:
            if error.sent:
                raise
            return None

    async def aclose(self) -> None:
        """Release all sockets; sessions that outlive their sockets stay, for other replicas."""
        for task in list(self._taking.values()):
            task.cancel()
        held, self._held = list(self._held.values()), {}
        for one in held:
            one.is_ended = True
        await asyncio.gather(*(one.line.leave() for one in held), return_exceptions=True)
        for id in list(self._kept):
            self._end_kept(id)
        if self._ending:
            await asyncio.wait(self._ending, timeout=KEPT_END_S)

    @property
    def me(self) -> str:
        """The URL of this replica; empty without other replicas."""
        return self._peers.me if self._peers is not None else ""

    def is_elsewhere(self, handle: Handle) -> bool:
        """Return True if another replica holds, or held, the session."""
        return self._peers is not None and handle.holder not in ("", self._peers.me)

    async def find(
        self, session: Session, environment: Environment, operation: str, message: Callable[[], bytes] = bytes
    ) -> LiveSession | bytes:
        """Return the session if this replica holds it or takes it over, else the holder's answer to *operation*.

        Raises:
            SessionNotFound: The session ended with its socket, or the server does not have it.
            UpstreamGone: Other replicas keep taking the session over.
        """
        for _ in range(MOVES_MAX):
            held = self._held.get(session.lease)
            if held is None:
                text = self._moved.get(session.lease, session.handle)
                handle = read_handle(text)
                if self.is_elsewhere(handle):
                    within_s = environment.timeouts.call_s
                    answer = await self.ask_holder(handle, operation, session, message(), within_s=within_s)
                    if answer is not None:
                        return answer
                if not handle.sid:
                    raise SessionNotFound("the session was lost with its socket")
                held = await self._taken_over(replace(session, handle=text), environment, handle)
            if held is not None:
                return held
        raise UpstreamGone("another replica is taking over the session", sent=False)

    async def _taken_over(self, session: Session, environment: Environment, handle: Handle) -> LiveSession | None:
        """Attach to a session whose holder is gone, in one shared attempt; None if another replica did so first."""
        taking = self._taking.get(session.lease)
        if taking is None:
            taking = asyncio.ensure_future(self._take_over(session, environment, handle))
            self._taking[session.lease] = taking
            taking.add_done_callback(lambda task: self._taken(session.lease, task))
        return await asyncio.shield(taking)  # concurrent callers wait for the same task

    def _taken(self, lease: str, task: asyncio.Task[LiveSession | None]) -> None:
        self._taking.pop(lease, None)
        if not task.cancelled():
            task.exception()  # retrieved here, because all its waiters may have been cancelled

    async def _take_over(self, session: Session, environment: Environment, handle: Handle) -> LiveSession | None:
        mine = replace(handle, holder=self.me).written()
        # The store comes first: only one replica succeeds, and none attaches to a session that is being closed.
        if not await self._store.rebind(session.id, session.lease, was=session.handle, handle=mine):
            await self._moved_on(session)
            return None
        remember(self._moved, session.lease, mine, MOVED_MAX)
        held = await self._episodes.attach(session, environment, handle.sid, handle.first)
        self.add(held)
        return held

    async def _moved_on(self, session: Session) -> None:
        """Record the session's new handle from the store. Raises ``SessionNotFound`` if the session has ended."""
        found = await self._store.find(session.id)
        if found.lease != session.lease or found.state is not SessionState.OPEN:
            raise SessionNotFound(session.name)
        remember(self._moved, session.lease, found.handle, MOVED_MAX)

    def sweep(self) -> None:
        """Release sessions whose socket was already broken at the last sweep.

        A later call reattaches to such a session if the server still has it.
        """
        for lease, held in list(self._held.items()):
            if held.line.is_open:
                held.was_broken = False
            elif held.was_broken:
                del self._held[lease]
                self._large.pop(lease, None)
            else:
                held.was_broken = True

    def add(self, held: LiveSession) -> None:
        """Add a session that this replica opened or took over."""
        now = time.monotonic()
        if now - self._swept_at >= SWEEP_S:
            self._swept_at = now
            self.sweep()
        self._held[held.session.lease] = held
        if len(held.first) <= FIRST_MAX_BYTES:
            return
        self._large[held.session.lease] = held
        while len(self._large) > 1 and sum(len(one.first) for one in self._large.values()) > FIRST_TOTAL_BYTES:
            _, oldest = self._large.popitem(last=False)
            oldest.first = b""


def write_action(action: Action, key: str | None) -> bytes:
    """Return an action and its idempotency key as JSON."""
    return compact(
        {
            "name": action.name,
            "arguments": dict(action.arguments),
            "text": action.text,
            "fields": None if action.fields is None else dict(action.fields),
            "key": key,
        }
    )


def read_action(message: bytes) -> tuple[Action, str | None]:
    """Parse the output of `write_action`."""
    value = parse(message)
    action = Action(name=value["name"], arguments=value["arguments"], text=value["text"], fields=value["fields"])
    return action, value["key"]


def write_result(result: StepResult) -> bytes:
    """Return an action's result as JSON."""
    return compact(result_to_json(result))


def read_result(message: bytes) -> StepResult:
    """Parse the output of `write_result`. Raises ``UpstreamError``."""
    try:
        return result_of_json(parse(message))
    except (ValueError, KeyError, TypeError) as error:
        raise UpstreamError(f"the other replica's answer can't be read: {error}") from error


def write_summary(summary: Summary | None) -> bytes:
    """Return an episode's summary as JSON."""
    return compact(None) if summary is None else summary_to_json(summary)


def read_summary(message: bytes) -> Summary | None:
    """Parse the output of `write_summary`. Raises ``UpstreamError``."""
    try:
        return None if parse(message) is None else summary_of_json(message)
    except (ValueError, TypeError) as error:
        raise UpstreamError(f"the other replica's answer can't be read: {error}") from error

"""Who holds a session's socket: this replica, or another one that is asked; and what happens when that one is gone."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, Protocol, TypeVar

from gateway.core.environment import Environment
from gateway.core.errors import SessionNotFound, UpstreamGone
from gateway.core.ids import SessionId, WorkerId
from gateway.core.session import Session, SessionState
from gateway.upstreams.openenv.episodes import OpenEnvSessions
from gateway.upstreams.openenv.replica_codec import FIRST_MAX_BYTES, Handle, read_handle
from gateway.upstreams.openenv.websocket import LiveSession
from gateway.upstreams.replica_client import ReplicaClient

T = TypeVar("T")

MOVES_MAX: Final = 3
"""How often a session is looked for anew that other replicas take over meanwhile."""
MOVED_MAX: Final = 10_000
FIRST_TOTAL_BYTES: Final = 256 * 2**20
"""First observations that are kept here at most, those that fit into handles not counted; the oldest go first."""

SWEEP_S: Final = 300.0
"""How often sessions are looked for here whose socket broke and that nobody ended: with their worker, say."""


class StoredSessions(Protocol):
    """The part of ``Store`` that knows which replica holds a session."""

    async def find(self, id: SessionId) -> Session:
        """See ``Store.find``."""
        ...

    async def rebind(self, id: SessionId, lease: str, *, was: str, handle: str) -> bool:
        """See ``Store.rebind``."""
        ...


class SessionOwnership:
    """The sessions that this replica holds, and the way to those that it does not."""

    def __init__(self, episodes: OpenEnvSessions, *, peers: ReplicaClient | None, store: StoredSessions | None) -> None:
        """*peers* and *store* as of ``OpenEnvUpstream``."""
        self._episodes = episodes
        self._peers = peers
        self._store = store
        # The state of this replica: the sessions whose sockets it has, by lease.
        self._held: dict[str, LiveSession] = {}
        self._moved: OrderedDict[str, str] = OrderedDict()
        """Handles that are newer than those that sessions are remembered with, by lease."""
        self._taking: dict[str, asyncio.Task[LiveSession | None]] = {}
        self._large: OrderedDict[str, LiveSession] = OrderedDict()
        """Sessions with a large first observation, the oldest first."""
        self._swept_at = time.monotonic()

    def get(self, session: Session) -> LiveSession | None:
        """The session, if it is held here."""
        return self._held.get(session.lease)

    def pop(self, session: Session) -> tuple[LiveSession | None, str]:
        """Let go of a session that is being closed: what is held of it, and its newest handle."""
        self._large.pop(session.lease, None)
        handle = self._moved.pop(session.lease, session.handle)
        return self._held.pop(session.lease, None), handle

    async def here(self, id: str, lease: str) -> LiveSession:
        """The session of this id and lease. Raises ``SessionNotFound`` if it is not held here."""
        held = self._held.get(lease)
        if held is None and (taking := self._taking.get(lease)) is not None:
            held = await asyncio.shield(taking)  # it is just becoming the holder
        if held is None or held.session.id != id:
            raise SessionNotFound("this replica does not hold the session")
        return held

    def is_busy(self, worker: WorkerId) -> bool:
        """Whether *worker* works on a request from here."""
        return any(held.line.is_busy for held in self._held.values() if held.session.worker == worker)

    async def ask_holder(
        self, handle: Handle, operation: str, session: Session, message: bytes, *, within_s: float
    ) -> bytes | None:
        """Let the replica that holds the session do *operation*. None: none does, and nothing ran.

        Raises:
            UpstreamGone: it was lost while it worked.
            GatewayError: what failed over there.
        """
        if self._peers is None or not self.is_elsewhere(handle):
            return None
        try:
            return await self._peers.ask(handle.holder, operation, session, message, within_s=within_s)
        except SessionNotFound:
            return None  # it was closed there, or its holder was started anew
        except UpstreamGone as error:
            if error.sent:
                raise
            return None

    async def aclose(self) -> None:
        """Let go of all sockets; sessions that outlive them go on, for other replicas."""
        for task in list(self._taking.values()):
            task.cancel()
        held, self._held = list(self._held.values()), {}
        for one in held:
            one.is_ended = True
        await asyncio.gather(*(one.line.leave() for one in held), return_exceptions=True)

    @property
    def me(self) -> str:
        """The URL of this replica; empty: there are no others."""
        return self._peers.me if self._peers is not None else ""

    def is_elsewhere(self, handle: Handle) -> bool:
        """Whether another replica holds, or held, the session."""
        return self._peers is not None and handle.holder not in ("", self._peers.me)

    async def wherever(
        self,
        session: Session,
        environment: Environment,
        operation: str,
        message: Callable[[], bytes],
        here: Callable[[LiveSession], Awaitable[T]],
        read: Callable[[bytes], T],
    ) -> T:
        """Do *here* if the session is held here, or can be; else let its holder do *operation*, and *read* its answer.

        Raises:
            SessionNotFound: it is gone with its socket, or its server does not know it.
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
                        return read(answer)
                if not handle.sid:
                    raise SessionNotFound("the session was lost with its socket")
                held = await self._taken_over(replace(session, handle=text), environment, handle)
            if held is not None:
                return await here(held)
        raise UpstreamGone("the session is just taken over by another replica", sent=False)

    async def _taken_over(self, session: Session, environment: Environment, handle: Handle) -> LiveSession | None:
        """Attach to a session whose holder is gone; one attempt at a time. None: another replica has done so."""
        taking = self._taking.get(session.lease)
        if taking is None:
            taking = asyncio.ensure_future(self._take_over(session, environment, handle))
            self._taking[session.lease] = taking
            taking.add_done_callback(lambda task: self._taken(session.lease, task))
        return await asyncio.shield(taking)  # others wait for it as well

    def _taken(self, lease: str, task: asyncio.Task[LiveSession | None]) -> None:
        self._taking.pop(lease, None)
        if not task.cancelled():
            task.exception()  # nobody may have waited for it

    async def _take_over(self, session: Session, environment: Environment, handle: Handle) -> LiveSession | None:
        mine = replace(handle, holder=self.me).written()
        # First: of several replicas one succeeds, and none attaches to a session that is being closed.
        if self._store is not None:
            is_ours = await self._store.rebind(session.id, session.lease, was=session.handle, handle=mine)
            if not is_ours:
                await self._moved_on(session, self._store)
                return None
        remember(self._moved, session.lease, mine, MOVED_MAX)
        held = await self._episodes.attach(session, environment, handle)
        self.add(held)
        return held

    async def _moved_on(self, session: Session, store: StoredSessions) -> None:
        """Learn who holds the session now. Raises ``SessionNotFound`` if it has ended."""
        found = await store.find(session.id)
        if found.lease != session.lease or found.state is not SessionState.OPEN:
            raise SessionNotFound(session.name)
        remember(self._moved, session.lease, found.handle, MOVED_MAX)

    def sweep(self) -> None:
        """Let go of sessions whose socket was broken at the last sweep already.

        Those that live still are attached to again when they are asked for, if they can be.
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
        """Hold a session that was opened here, or taken over."""
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


def remember(known: OrderedDict[str, T], lease: str, value: T, at_most: int) -> None:
    """Keep *value*, and at most so many of them."""
    known[lease] = value
    known.move_to_end(lease)
    if len(known) > at_most:
        known.popitem(last=False)

"""Which replica holds a session's socket: handles, calls to the holder as JSON, and what happens when it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Final, Protocol

from gateway.core.environment import Environment
from gateway.core.episode import Action, StepResult, Summary
from gateway.core.errors import SessionNotFound, UpstreamError, UpstreamGone
from gateway.core.faults import FaultKind
from gateway.core.ids import SessionId, WorkerId
from gateway.core.json_text import compact, parse
from gateway.core.session import Session, SessionState
from gateway.upstreams.idempotency.codec import result_of_json, result_to_json
from gateway.upstreams.openenv.episodes import SETTLE_S, OpenEnvSessions
from gateway.upstreams.openenv.http import remember
from gateway.upstreams.openenv.websocket import LiveSession
from gateway.upstreams.replica_client import ReplicaClient

FIRST_MAX_BYTES: Final = 32 * 2**10
"""A larger first observation is known to the replica that opened the session only."""
MOVES_MAX: Final = 3
"""How often a session is looked for anew that other replicas take over meanwhile."""
MOVED_MAX: Final = 10_000
FIRST_TOTAL_BYTES: Final = 256 * 2**20
"""First observations that are kept here at most, those that fit into handles not counted; the oldest go first."""
KEPT_S: Final = 60.0
"""Seconds for which a kept session waits for its next episode; beyond that its slot was not released regularly."""
KEPT_END_S: Final = 10.0
SWEEP_S: Final = 300.0
"""How often sessions are looked for here whose socket broke and that nobody ended: with their worker, say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """The data by which any replica finds a session."""

    sid: str = ""
    """The session's id in the server; empty: the session is its socket, which the holder has."""
    holder: str = ""
    """The URL of the replica that has the socket; empty: there are no others."""
    first: bytes = b""
    """The reply to the session's reset; empty: only the holder has it."""

    def written(self) -> str:
        """Return the text that the store keeps."""
        first = self.first.decode() if len(self.first) <= FIRST_MAX_BYTES else ""
        return compact({"sid": self.sid, "at": self.holder, "first": first}).decode()


def read_handle(text: str) -> Handle:
    """Read a session's handle.

    Raises:
        SessionNotFound: the session has no readable handle: no replica opened it.
    """
    try:
        value = parse(text.encode())
        return Handle(sid=str(value["sid"]), holder=str(value["at"]), first=str(value["first"]).encode())
    except (ValueError, KeyError, TypeError) as error:
        raise SessionNotFound("the session has no handle") from error


class StoredSessions(Protocol):
    """The part of ``Store`` that knows which replica holds a session."""

    async def find(self, id: SessionId) -> Session:
        """See ``Store.find``."""

    async def rebind(self, id: SessionId, lease: str, *, was: str, handle: str) -> bool:
        """See ``Store.rebind``."""


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
        self._kept: dict[SessionId, tuple[LiveSession, float]] = {}
        """Servers' sessions whose episode has ended, and since when they wait for the next episode of the same id."""
        self._ending: set[asyncio.Task[None]] = set()

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

    async def keep(self, held: LiveSession) -> bool:
        """Keep the server's session of an episode that ends; return False if the next episode cannot use it.

        To make an environment may take seconds, where its reset takes milliseconds: OpenEnv's own clients reset one
        environment for all their episodes.
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
        """Return the session that is kept for *session*, if it is usable for it; end an unusable one."""
        held, _ = self._kept.pop(session.id, (None, 0.0))
        if held is None:
            return None
        is_same = held.session.worker == session.worker and held.digest == environment.digest()
        if is_same and held.line.is_open:
            return held
        await self._close_quietly(held)
        return None

    async def drop_kept(self, session: Session, within_s: float) -> None:
        """End the session that is kept for *session*, or of it, if there is one.

        Raises:
            UpstreamError: its place may not be free.
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
        for id in list(self._kept):
            self._end_kept(id)
        if self._ending:
            await asyncio.wait(self._ending, timeout=KEPT_END_S)

    @property
    def me(self) -> str:
        """The URL of this replica; empty: there are no others."""
        return self._peers.me if self._peers is not None else ""

    def is_elsewhere(self, handle: Handle) -> bool:
        """Whether another replica holds, or held, the session."""
        return self._peers is not None and handle.holder not in ("", self._peers.me)

    async def find(
        self, session: Session, environment: Environment, operation: str, message: Callable[[], bytes] = bytes
    ) -> LiveSession | bytes:
        """Return the session if this replica holds it or can take it over; else its holder's answer to *operation*.

        Raises:
            SessionNotFound: the session is gone with its socket, or its server does not know it.
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
        held = await self._episodes.attach(session, environment, handle.sid, handle.first)
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


def write_action(action: Action, key: str | None) -> bytes:
    """Write an action and its idempotency key."""
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
    """Read what `write_action` wrote."""
    value = parse(message)
    action = Action(name=value["name"], arguments=value["arguments"], text=value["text"], fields=value["fields"])
    return action, value["key"]


def write_result(result: StepResult) -> bytes:
    """Write what an action came to."""
    return compact(result_to_json(result))


def read_result(message: bytes) -> StepResult:
    """Read what `write_result` wrote. Raises ``UpstreamError``."""
    try:
        return result_of_json(parse(message))
    except (ValueError, KeyError, TypeError) as error:
        raise UpstreamError(f"the other replica's answer can't be read: {error}") from error


def write_summary(summary: Summary | None) -> bytes:
    """Write how an episode went."""
    if summary is None:
        return compact(None)
    told = asdict(summary)
    for name, usual in (("is_whole", True), ("is_judged", False)):
        if told[name] is usual:
            del told[name]  # replicas of an older version can't read it
    return compact(told)


def read_summary(message: bytes) -> Summary | None:
    """Read what `write_summary` wrote. Raises ``UpstreamError``."""
    try:
        value = parse(message)
        if value is None:
            return None
        fault = FaultKind(value["fault"]) if value.get("fault") else None
        return Summary(**{**value, "fault": fault, "faults": ()})
    except (ValueError, TypeError) as error:
        raise UpstreamError(f"the other replica's answer can't be read: {error}") from error

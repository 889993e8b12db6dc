"""The sessions that one replica serves, cached: a call in the steady state needs no store.

The replica notes when each session was last active, and writes the notes to the store once a second.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import dataclass, field
from itertools import islice

import anyio

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment
from gateway.core.errors import SessionClosed, SessionNotFound, StoreUnavailable
from gateway.core.faults import Fault
from gateway.core.ids import Owner, SessionId
from gateway.core.ports.store import SessionStore
from gateway.core.retry import STORE_PATIENCE_S, patiently
from gateway.core.session import BY_TRAINER, Activity, CloseReason, Session, SessionEnded, SessionState
from gateway.sessions.interruption import Watcher

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""How often notes are written: idle sessions expire within about this much after their deadline."""
EDGE_S = 3 * TICK_S
"""A call that begins this close to its session's deadline writes its note at once."""
CACHED_MAX = 200_000
"""Sessions that one replica remembers; the oldest idle ones beyond it are looked up again when they call."""


@dataclass(slots=True, eq=False)  # each is itself only, and so may stand in a set
class CachedSession:
    """What this replica knows of one session."""

    session: Session
    environment: Environment
    quiet_since: float
    """End of its last call or touch, by this process's clock."""
    noted_at: float
    """When the store was last told."""
    busy: int = 0
    """Calls under way here."""
    is_ended: bool = False
    """Whether this replica knows that the session has ended."""
    watchers: set[Watcher] = field(default_factory=set)
    """Of those under way, the ones that end with the session."""
    turns: int = 0
    """Counted by the store, as it last told."""
    barren: int = 0
    """Turns from its first one on that gave no reward, as far as they were taken here."""
    owed: list[str] = field(default_factory=list)
    """Keys of turns, of a worker that does not count them, that were taken while the store was away, in their order: it
    counts them when it is back."""
    owes_until: float = 0.0
    """Until then the store is not asked again, by this process's clock: each step would wait for it in vain."""
    reported: Fault | None = None
    """The last fault that was logged: a call that is asked for again has the same one."""
    stirred: set[CachedSession] = field(default_factory=set, repr=False)
    """Where it enters itself when something happens in it: all of those that there is something to note of."""

    def begin(self) -> None:
        """A call begins."""
        self.busy += 1
        self.stirred.add(self)

    def finish(self) -> None:
        """A call has ended."""
        self.busy -= 1
        self.quiet_since = time.monotonic()

    def stir(self) -> None:
        """Its trainer gave a sign of life."""
        self.quiet_since = time.monotonic()
        self.stirred.add(self)

    def end(self) -> None:
        """Note the session's end, and interrupt what runs in it."""
        self.is_ended = True
        for watcher in tuple(self.watchers):
            watcher.end()


class SessionCache:
    """The sessions that this replica serves. Reads through: what it does not hold it looks up in the store."""

    def __init__(self, store: SessionStore, catalog: Catalog, *, patience_s: float = STORE_PATIENCE_S) -> None:
        """*patience_s*: how long `find` waits for a store that does not answer, or is being rebuilt."""
        self._store = store
        self._catalog = catalog
        self._patience_s = patience_s
        self._entries: dict[SessionId, CachedSession] = {}
        self._stirred: set[CachedSession] = set()
        """Of a hundred thousand sessions most are idle: to look at each, every second, would cost as much as steps."""
        self._writing = asyncio.Lock()

    def get(self, id: SessionId) -> CachedSession | None:
        """Return a session that this replica holds; None: it holds none of this id."""
        return self._entries.get(id)

    async def find(self, id: SessionId) -> CachedSession:
        """Return an open session: from this replica's memory, else from the store.

        Raises:
            SessionNotFound: never known, not open yet, deleted, or of another key.
            SessionClosed: ended by the gateway, with the reason.
        """
        entry = self._entries.get(id)
        if entry is not None:
            return entry
        session = await patiently(lambda: self._store.find(id), for_s=self._patience_s)
        if session.state is SessionState.CLOSING:
            reason = session.reason or CloseReason.DELETED
            raise SessionNotFound(session.name) if reason in BY_TRAINER else SessionClosed(reason.value)
        if session.state is SessionState.OPENING:
            raise SessionNotFound(session.name)
        return self.add(session, self.environment_of(session))

    def environment_of(self, session: Session) -> Environment:
        """Return the environment that *session* runs in, as it is now in the catalog."""
        return self._catalog.named(session.environment)

    async def renewed(self, entry: CachedSession) -> CachedSession:
        """Write the note of *entry* at once if its deadline in the store may be near: a call must not race its expiry.

        Returns the entry that holds now: the session may have ended, and another one of its name have begun.
        Raises as `find`.
        """
        if entry.is_ended:
            return await self.find(entry.session.id)
        now = time.monotonic()
        if now - entry.noted_at < entry.session.idle_s - EDGE_S:
            return entry
        try:
            ended = await self._store.touch([Activity(entry.session.id, 0.0)])
        except StoreUnavailable:
            return entry  # nobody can end it either; and once the store is back, its worker is asked first
        if ended:
            self.forget(entry.session.id, entry.session.lease)
            entry = await self.find(entry.session.id)
        entry.noted_at = entry.quiet_since = now
        return entry

    def sessions(self) -> list[Session]:
        """All that are remembered."""
        return [entry.session for entry in self._entries.values()]

    def is_busy(self) -> bool:
        """Whether a call is under way here."""
        return any(entry.busy for entry in self._stirred if self._is_here(entry))

    def add(self, session: Session, environment: Environment, *, noted: bool = False) -> CachedSession:
        """Keep a session in mind; *noted* says that the store's deadline for it is fresh."""
        now = time.monotonic()
        entry = self._entries.get(session.id)
        if entry is None or entry.session.lease != session.lease:
            if len(self._entries) >= CACHED_MAX:
                self._drop_the_oldest()
            # Unless fresh, the deadline may be near: noted_at in the past makes the next call tell the store at once.
            noted_at = now if noted else now - session.idle_s
            entry = CachedSession(session, environment, quiet_since=now, noted_at=noted_at, stirred=self._stirred)
            self._entries[session.id] = entry
            if not noted:
                self._stirred.add(entry)
        return entry

    def forget(self, id: SessionId, lease: str = "") -> None:
        """Drop a session from memory; what runs in it here, and ends with it, is woken.

        *lease*, if given, must be its own: word of an end may come when the next session of the id has begun.
        """
        entry = self._entries.get(id)
        if entry is not None and lease in ("", entry.session.lease):
            del self._entries[id]
            entry.end()

    def _is_here(self, entry: CachedSession) -> bool:
        return self._entries.get(entry.session.id) is entry

    def _drop_the_oldest(self) -> None:
        for id, entry in list(islice(self._entries.items(), CACHED_MAX // 100)):
            if not entry.busy and not entry.owed and entry.noted_at >= entry.quiet_since:
                del self._entries[id]

    async def run(self) -> None:
        """Write notes each second and follow notices, until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._write_notes)
            group.start_soon(self._follow_notices)

    async def write_notes(self) -> None:
        """Tell the store what was active since the last time; what is being told already has been when this returns.

        Raises:
            StoreUnavailable: the next notes tell it.
        """
        async with self._writing:
            now = time.monotonic()
            active = [e for e in self._stirred if self._is_here(e) and (e.busy or e.quiet_since > e.noted_at)]
            self._stirred.clear()
            self._stirred.update(entry for entry in active if entry.busy)
            if not active:
                return
            notes = [Activity(e.session.id, 0.0 if e.busy else now - e.quiet_since) for e in active]
            try:
                ended = await self._store.touch(notes)
            except BaseException:
                self._stirred.update(active)
                raise
            for entry in active:
                entry.noted_at = now
        leases = {entry.session.id: entry.session.lease for entry in active} if ended else {}
        for id in ended:
            self.forget(id, leases[id])

    async def _write_notes(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self.write_notes()
            except StoreUnavailable as error:
                logger.warning("store_unavailable during=notes error=%s", error)
            except Exception:  # protects every session of this replica: without notes they expire
                logger.exception("notes_failed")

    async def _follow_notices(self) -> None:
        while True:
            try:
                async for notice in self._store.notices():
                    if isinstance(notice, SessionEnded):
                        self.forget(notice.id, notice.lease)
            except StoreUnavailable as error:
                logger.warning("store_unavailable during=notices error=%s", error)
            await asyncio.sleep(TICK_S)


def session_id(owner: Owner, name: str) -> SessionId:
    """Derive the id under which a trainer's *name* for a session is kept.

    Trainers choose names freely, so two keys may choose the same one: the id covers the owner, is short, and is safe in
    any key, header or path (32 hexadecimal digits).
    """
    return SessionId(hashlib.sha256(f"{owner}\0{name}".encode("utf-8", "surrogatepass")).hexdigest()[:32])

"""Caches the sessions that this replica serves, so that a call in the steady state needs no store.

The replica notes when each session was last active and writes these notes to the store once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from dataclasses import dataclass, field
from itertools import islice

import anyio

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment
from gateway.core.errors import SessionClosed, SessionNotFound, StoreUnavailable
from gateway.core.faults import Fault
from gateway.core.ids import Owner, SessionId
from gateway.core.ports.step_log import StepLog
from gateway.core.ports.store import SessionStore
from gateway.core.retry import STORE_PATIENCE_S, patiently
from gateway.core.session import (
    BY_TRAINER,
    SECRET_MARK,
    Activity,
    CloseReason,
    Session,
    SessionEnded,
    SessionSetup,
    SessionState,
)
from gateway.sessions.interruption import Watcher

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""Seconds between two writes of notes. An idle session expires within about this time after its deadline."""
EDGE_S = 3 * TICK_S
"""Seconds before a session's deadline within which a new call writes the session's note immediately."""
CACHED_MAX = 200_000
"""Number of cached sessions above which the oldest idle ones are dropped. Their next call reads the store again."""


@dataclass(slots=True, eq=False)  # compared and hashed by identity, for use in a set
class CachedSession:
    """This replica's record of one session."""

    session: Session
    environment: Environment
    quiet_since: float
    """Monotonic time at which the last call or touch ended."""
    noted_at: float
    """Monotonic time of the last note to the store."""
    is_logged: bool = False
    """True if the step log records its calls."""
    busy: int = 0
    """Number of calls that run in this replica."""
    is_ended: bool = False
    """True once this replica knows that the session has ended."""
    watchers: set[Watcher] = field(default_factory=set)
    """Watchers of running calls that the session's end interrupts."""
    forwards: set[Watcher] = field(default_factory=set)
    """Watchers of forwarded ORS calls. Only an operator interrupts them: a trainer's own delete lets them end, as on
    the reference servers."""
    turns: int = 0
    """Number of turns that the store last returned."""
    barren: int = 0
    """Number of turns before the first reward, as far as this replica ran them."""
    owed: list[str] = field(default_factory=list)
    """Keys, in order, of turns that ran while the store did not answer, in a worker that counts no turns. The store
    counts them once it answers."""
    owes_until: float = 0.0
    """Monotonic time before which turns do not query the store, so that steps do not wait for it without result."""
    reported: Fault | None = None
    """The last logged fault. A repeated call reports the same fault."""
    stirred: set[CachedSession] = field(default_factory=set, repr=False)
    """The cache's set of sessions with activity to note. The session adds itself."""

    def begin(self) -> None:
        """Note that a call starts."""
        self.busy += 1
        self.stirred.add(self)

    def finish(self) -> None:
        """Note that a call has ended."""
        self.busy -= 1
        self.quiet_since = time.monotonic()

    def stir(self) -> None:
        """Note that the trainer is alive."""
        self.quiet_since = time.monotonic()
        self.stirred.add(self)

    def end(self) -> None:
        """Note the session's end and interrupt its running calls."""
        self.is_ended = True
        for watcher in tuple(self.watchers):
            watcher.end()


class SessionCache:
    """A read-through cache of the sessions that this replica serves. On a miss it reads the store."""

    def __init__(
        self, store: SessionStore, catalog: Catalog, *, log: StepLog, patience_s: float = STORE_PATIENCE_S
    ) -> None:
        """*patience_s*: seconds for which `find` retries a store that does not answer, or is being rebuilt."""
        self._store = store
        self._catalog = catalog
        self._log = log
        self._patience_s = patience_s
        self._entries: dict[SessionId, CachedSession] = {}
        self._stirred: set[CachedSession] = set()
        """Sessions with activity to note. Most of 100,000 sessions are idle: a scan each second would cost as much as
        steps."""
        self._writing = asyncio.Lock()
        self._asking: set[asyncio.Task[None]] = set()

    def get(self, id: SessionId) -> CachedSession | None:
        """Return the cached session of this id, or None if this replica has none."""
        return self._entries.get(id)

    async def find(self, id: SessionId) -> CachedSession:
        """Return an open session from this replica's cache, or else from the store.

        Raises:
            SessionNotFound: The session is unknown, not open yet, ended by its trainer, or of another API key.
            SessionClosed: The gateway ended the session; the error has the reason.
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
        """Return the environment of *session*, in the catalog's current revision."""
        return self._catalog.named(session.environment)

    async def renewed(self, entry: CachedSession) -> CachedSession:
        """Write the note of *entry* immediately if its deadline may be near: a new call must not race the expiry.

        Return the current entry: the session may have ended, and another of the same name may have started.
        Raises the errors of `find`.
        """
        if entry.is_ended:
            return await self.find(entry.session.id)
        now = time.monotonic()
        if now - entry.noted_at < entry.session.idle_s - EDGE_S:
            return entry
        try:
            ended = await self._store.touch([Activity(entry.session.id, 0.0)])
        except StoreUnavailable:
            return entry  # no replica can expire it either, and expiry asks the worker first when the store is back
        if ended:
            self.forget(entry.session.id, entry.session.lease)
            entry = await self.find(entry.session.id)
        entry.noted_at = entry.quiet_since = now
        return entry

    def sessions(self) -> list[Session]:
        """Return all cached sessions."""
        return [entry.session for entry in self._entries.values()]

    def is_busy(self) -> bool:
        """Return True if a call runs in this replica."""
        return any(entry.busy for entry in self._stirred if self._is_here(entry))

    def add(self, session: Session, environment: Environment, *, noted: bool = False) -> CachedSession:
        """Cache a session. *noted* states that its deadline in the store is fresh."""
        now = time.monotonic()
        entry = self._entries.get(session.id)
        if entry is None or entry.session.lease != session.lease:
            if len(self._entries) >= CACHED_MAX:
                self._drop_the_oldest()
            # A deadline that is not fresh may be near. noted_at in the past makes the next call write a note first.
            noted_at = now if noted else now - session.idle_s
            entry = CachedSession(session, environment, quiet_since=now, noted_at=noted_at, stirred=self._stirred)
            entry.is_logged = self._log.keeps(session.lease, environment)
            self._entries[session.id] = entry
            if not noted:
                self._stirred.add(entry)
        return entry

    def forget(self, id: SessionId, lease: str = "") -> None:
        """Drop a session from the cache and interrupt its calls that this replica runs.

        A given *lease* must be the session's own: a notice of an end may arrive after the next session of the same id
        has started.
        """
        entry = self._entries.get(id)
        if entry is not None and lease in ("", entry.session.lease):
            del self._entries[id]
            entry.end()
            if entry.forwards:
                task = asyncio.create_task(self._end_forwards(entry))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)

    async def _end_forwards(self, entry: CachedSession) -> None:
        """Interrupt the forwarded calls of an ended session if an operator ended it."""
        session, reason = entry.session, ""
        with contextlib.suppress(SessionNotFound, StoreUnavailable):
            try:
                found = await patiently(lambda: self._store.find(session.id), for_s=self._patience_s)
                reason = found.reason or "" if found.lease == session.lease else ""
            except SessionClosed as closed:
                reason = closed.reason
        if reason == CloseReason.OPERATOR:
            for watcher in tuple(entry.forwards):
                watcher.end()

    def _is_here(self, entry: CachedSession) -> bool:
        return self._entries.get(entry.session.id) is entry

    def _drop_the_oldest(self) -> None:
        for id, entry in list(islice(self._entries.items(), CACHED_MAX // 100)):
            if not entry.busy and not entry.owed and entry.noted_at >= entry.quiet_since:
                del self._entries[id]

    async def run(self) -> None:
        """Write notes each second and follow the store's notices, until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._write_notes)
            group.start_soon(self._follow_notices)

    async def write_notes(self) -> None:
        """Write to the store which sessions were active since the last notes. Waits for a write that already runs.

        Raises:
            StoreUnavailable: The store does not answer. The next notes include these sessions.
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
            except Exception:  # protects all sessions of this replica, which expire without notes
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
    """Derive the id of a session from its *owner* and the *name* that the trainer chose.

    Two API keys may use the same name, so the id covers the owner. It has 32 hexadecimal digits, which are safe in any
    key, header or path.
    """
    return SessionId(hashlib.sha256(f"{owner}\0{name}".encode("utf-8", "surrogatepass")).hexdigest()[:32])


def new_lease(setup: SessionSetup) -> str:
    """Return a new, random lease. It shows every replica whether the session has secrets."""
    lease = uuid.uuid4().hex
    return f"{SECRET_MARK}{lease}" if setup.secrets else lease

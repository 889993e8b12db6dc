"""What one replica remembers of the sessions that it serves, and tells the store of them.

In the steady state a call needs no store: the replica notes what it saw of each session, and writes the notes once a
second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from itertools import islice

import anyio

from gateway.core.environment import Environment
from gateway.core.errors import StoreUnavailable
from gateway.core.faults import Fault
from gateway.core.ids import SessionId
from gateway.core.ports.store import Store
from gateway.core.session import Activity, Session, SessionEnded
from gateway.sessions.calls import Watcher

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""How often notes are written: idle sessions expire within about this much after their deadline."""
CACHED_MAX = 200_000
"""Sessions that one replica remembers; the oldest idle ones beyond it are looked up again when they call."""


@dataclass(slots=True, eq=False)  # each is itself only, and so may stand in a set
class ActiveSession:
    """What this replica knows of one session."""

    session: Session
    environment: Environment
    quiet_since: float
    """End of its last call or touch, by this process's clock."""
    noted_at: float
    """When the store was last told."""
    busy: int = 0
    """Calls under way here."""
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
    told: Fault | None = None
    """The last fault that the log was told: a call that is asked for again has the same one."""
    stirred: set[ActiveSession] = field(default_factory=set, repr=False)
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
        """Wake what ends with the session."""
        for watcher in tuple(self.watchers):
            watcher.end()


class SessionCache:
    """The sessions that this replica serves."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._entries: dict[SessionId, ActiveSession] = {}
        self._stirred: set[ActiveSession] = set()
        """Of a hundred thousand sessions most are idle: to look at each, every second, would cost as much as steps."""
        self._writing = asyncio.Lock()

    def get(self, id: SessionId) -> ActiveSession | None:
        """What is remembered of a session."""
        return self._entries.get(id)

    def sessions(self) -> list[Session]:
        """All that are remembered."""
        return [entry.session for entry in self._entries.values()]

    def is_busy(self) -> bool:
        """Whether a call is under way here."""
        return any(entry.busy for entry in self._stirred if self._is_here(entry))

    def add(self, session: Session, environment: Environment, *, noted: bool = False) -> ActiveSession:
        """Keep a session in mind; *noted* says that the store's deadline for it is fresh."""
        now = time.monotonic()
        entry = self._entries.get(session.id)
        if entry is None or entry.session.lease != session.lease:
            if len(self._entries) >= CACHED_MAX:
                self._drop_the_oldest()
            # Unless fresh, the deadline may be near: noted_at in the past makes the next call tell the store at once.
            noted_at = now if noted else now - session.idle_s
            entry = ActiveSession(session, environment, quiet_since=now, noted_at=noted_at, stirred=self._stirred)
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

    def _is_here(self, entry: ActiveSession) -> bool:
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

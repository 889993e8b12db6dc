"""Why a call failed: what became of its session, as its worker and the store report."""

from __future__ import annotations

import contextlib
import logging
from typing import Final

from gateway.core.errors import ReplicaLeft, SessionClosed, SessionNotFound, StoreUnavailable, UpstreamGone
from gateway.core.ports.store import SessionStore
from gateway.core.session import BY_TRAINER, CloseReason, SessionState
from gateway.sessions.cache import CachedSession, SessionCache
from gateway.sessions.closing import SessionCloser
from gateway.sessions.interruption import SessionEndEvent

logger = logging.getLogger(__name__)

REASON_S: Final = 3.0
"""How long a call whose connection broke waits for word of why: an engine tells of a death within some 100 ms, of
twenty at once on a busy machine within 600; beside three other tests on two CPUs it took more than a second once."""


class SessionMoved(Exception):
    """The cached session has ended, and another one of its name is open elsewhere. The call has not run."""

    def __init__(self, entry: CachedSession) -> None:
        super().__init__(entry.session.id)
        self.entry = entry


class FailureReasons:
    """Finds out why calls failed, for `gateway.sessions.service.ActiveSession`."""

    def __init__(self, *, store: SessionStore, cache: SessionCache, closer: SessionCloser) -> None:
        self._store = store
        self._cache = cache
        self._closer = closer

    async def of_unknown(self, entry: CachedSession) -> Exception:
        """Say what became of a session that its worker does not know.

        Raises:
            SessionNotFound, SessionClosed: with the reason that the store knows.
        """
        session = entry.session
        self._cache.forget(session.id, session.lease)
        found = await self._store.find(session.id)
        if found.lease == session.lease and found.state is SessionState.OPEN:
            # The store has it and its worker has not: what the trainer did in it is lost, and it has to hear so.
            logger.warning("session_lost_by_worker session=%s worker=%s", session.id, session.worker)
            await self._closer.give_back(session, entry.environment, CloseReason.WORKER_LOST)
            return SessionClosed(CloseReason.WORKER_LOST.value)
        if found.state is SessionState.OPEN:
            return SessionMoved(self._cache.add(found, entry.environment))
        return SessionNotFound(session.name)

    async def of_end(self, entry: CachedSession) -> Exception:
        """Say why a session was ended while something ran in it. Raises as `of_unknown`."""
        found = await self._store.find(entry.session.id)
        if found.state is SessionState.CLOSING and found.reason is not None and found.reason not in BY_TRAINER:
            return SessionClosed(found.reason.value)
        return SessionNotFound(entry.session.name)

    async def explain(self, entry: CachedSession, error: UpstreamGone) -> None:
        """A connection broke: if the session was ended, that is the better answer.

        A worker that dies closes its connections a moment before the engine tells of its death and why, and the control
        loop ends its sessions: that is waited for.

        Raises:
            SessionClosed: it was ended, with the reason.
        """
        if isinstance(error, ReplicaLeft):
            return
        ended = SessionEndEvent()
        entry.watchers.add(ended)
        try:
            await self._say_why(entry, error)
            if self._cache.get(entry.session.id) is entry and await ended.within(REASON_S):
                await self._say_why(entry, error)
        finally:
            entry.watchers.discard(ended)

    async def _say_why(self, entry: CachedSession, error: UpstreamGone) -> None:
        with contextlib.suppress(StoreUnavailable):
            session = await self._store.find(entry.session.id)
            if session.state is SessionState.CLOSING and session.reason is not None:
                raise SessionClosed(session.reason.value) from error

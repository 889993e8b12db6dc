"""Finds the reason of a failed call: the state of its session, as its worker and the store report it."""

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
"""Seconds that a call with a broken connection waits for the reason. An engine reports a death within about 100 ms, and
20 concurrent deaths on a busy machine within 600 ms. Next to three other tests on two CPUs it once took over 1 s."""


class SessionMoved(Exception):
    """The cached session has ended, and another session of the same name is open. The call has not run."""

    def __init__(self, entry: CachedSession) -> None:
        super().__init__(entry.session.id)
        self.entry = entry


class FailureReasons:
    """Finds the reasons of failed calls for `gateway.sessions.service.ActiveSession`."""

    def __init__(self, *, store: SessionStore, cache: SessionCache, closer: SessionCloser) -> None:
        self._store = store
        self._cache = cache
        self._closer = closer

    async def of_unknown(self, entry: CachedSession) -> Exception:
        """Return the error for a call in a session that its worker does not know.

        Raises:
            SessionNotFound: The store does not know the session any more.
            SessionClosed: The gateway ended the session; the error has the reason.
        """
        session = entry.session
        self._cache.forget(session.id, session.lease)
        found = await self._store.find(session.id)
        if found.lease == session.lease and found.state is SessionState.OPEN:
            # Open in the store but missing in the worker: the episode is lost, and the trainer must get an error.
            logger.warning("session_lost_by_worker session=%s worker=%s", session.id, session.worker)
            await self._closer.give_back(session, entry.environment, CloseReason.WORKER_LOST)
            return SessionClosed(CloseReason.WORKER_LOST.value)
        if found.state is SessionState.OPEN:
            return SessionMoved(self._cache.add(found, entry.environment))
        return SessionNotFound(session.name)

    async def of_end(self, entry: CachedSession) -> Exception:
        """Return the error for a call that its session's end interrupted. Raises the errors of `of_unknown`."""
        found = await self._store.find(entry.session.id)
        if found.state is SessionState.CLOSING and found.reason is not None and found.reason not in BY_TRAINER:
            return SessionClosed(found.reason.value)
        return SessionNotFound(entry.session.name)

    async def explain(self, entry: CachedSession, error: UpstreamGone) -> None:
        """Raise the reason of the session's end, if it has ended, for a call whose connection broke.

        A dying worker closes its connections shortly before the engine reports its death, on which the control loop
        ends the worker's sessions. This method waits for that end.

        Raises:
            SessionClosed: The session was ended; the error has the reason.
            SessionMoved: The trainer opened the session anew at another replica, and the call did not run. A store that
                lost its data announces no end of the former one.
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
            if session.state is SessionState.OPEN and session.lease != entry.session.lease and not error.sent:
                raise SessionMoved(self._cache.add(session, entry.environment)) from error

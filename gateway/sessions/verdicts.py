"""Why a call failed: what became of its session, by the word of its worker and of the store."""

from __future__ import annotations

import contextlib
import logging
from typing import Final

from gateway.core.errors import ReplicaLeft, SessionClosed, SessionNotFound, StoreUnavailable, UpstreamGone
from gateway.core.ports.store import Store
from gateway.core.session import CloseReason, SessionState
from gateway.sessions.cache import ActiveSession, SessionCache
from gateway.sessions.calls import SessionEndEvent
from gateway.sessions.closing import SessionCloser

logger = logging.getLogger(__name__)

VERDICT_S: Final = 3.0
"""How long a call whose connection broke waits for word of why: an engine tells of a death within some 100 ms, of
twenty at once on a busy machine within 600; beside three other tests on two CPUs it took more than a second once."""


class Moved(Exception):
    """The session that was remembered has ended, and another one of its name is open elsewhere."""

    def __init__(self, entry: ActiveSession) -> None:
        super().__init__(entry.session.id)
        self.entry = entry


class Verdicts:
    """Finds them, for `gateway.sessions.service.Sessions`."""

    def __init__(self, *, store: Store, remembered: SessionCache, closer: SessionCloser) -> None:
        self._store = store
        self._remembered = remembered
        self._closer = closer

    async def loss(self, entry: ActiveSession) -> Exception:
        """Say what became of a session that its worker does not know.

        Raises:
            SessionNotFound, SessionClosed: with the reason that the store knows.
        """
        session = entry.session
        self._remembered.forget(session.id, session.lease)
        found = await self._store.find(session.id)
        if found.lease == session.lease and found.state is SessionState.OPEN:
            # The store has it and its worker has not: what the trainer did in it is lost, and it has to hear so.
            logger.warning("session_lost_by_worker session=%s worker=%s", session.id, session.worker)
            await self._closer.give_back(session, entry.environment, CloseReason.WORKER_LOST)
            return SessionClosed(CloseReason.WORKER_LOST.value)
        if found.state is SessionState.OPEN:
            return Moved(self._remembered.add(found, entry.environment))
        return SessionNotFound(session.name)

    async def end_of(self, entry: ActiveSession) -> Exception:
        """Say why a session was ended while something ran in it. Raises as `loss`."""
        found = await self._store.find(entry.session.id)
        if found.state is SessionState.CLOSING and found.reason is not None and not found.reason.is_trainers:
            return SessionClosed(found.reason.value)
        return SessionNotFound(entry.session.name)

    async def explain(self, entry: ActiveSession, error: UpstreamGone) -> None:
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
            if self._remembered.get(entry.session.id) is entry and await ended.within(VERDICT_S):
                await self._say_why(entry, error)
        finally:
            entry.watchers.discard(ended)

    async def _say_why(self, entry: ActiveSession, error: UpstreamGone) -> None:
        with contextlib.suppress(StoreUnavailable):
            session = await self._store.find(entry.session.id)
            if session.state is SessionState.CLOSING and session.reason is not None:
                raise SessionClosed(session.reason.value) from error

"""Sends pings for sessions, so that standard ORS servers do not end them.

Such a server ends a session 15 minutes after the last request that named it, even while a call runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from gateway.core.errors import GatewayError
from gateway.core.ids import SessionId
from gateway.core.session import Session

logger = logging.getLogger(__name__)

AT_ONCE = 16
"""Largest number of concurrent pings."""


@dataclass(slots=True)
class _Beat:
    session: Session
    keep_s: float
    used_at: float
    """Time of the last request from a trainer, by ``time.monotonic``."""
    told_at: float
    """Time of the last request to the server that named the session."""


class PingedServers(Protocol):
    """The servers that hold the sessions."""

    async def ping(self, session: Session) -> bool:
        """Ping the server of *session*. Return False if the server does not know the session."""

    def is_busy(self, session: Session) -> bool:
        """Return True if a call runs in *session*."""


class Pulse:
    """Pings the sessions that this replica serves."""

    def __init__(self, servers: PingedServers, *, every_s: float) -> None:
        """Start without sessions. *every_s* is the time between two requests for a session, in seconds."""
        self._servers = servers
        self._every_s = every_s
        self._beats: OrderedDict[tuple[SessionId, str], _Beat] = OrderedDict()
        self._task: asyncio.Task[None] | None = None

    def note(self, session: Session, *, keep_s: float) -> None:
        """Note a request for *session*. Keep the session alive for *keep_s* more seconds, and while a call runs."""
        now = time.monotonic()
        self._beats[session.id, session.lease] = _Beat(session, keep_s, now, now)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())

    def forget(self, session: Session) -> None:
        """Stop the pings for a session that has ended."""
        self._beats.pop((session.id, session.lease), None)

    async def aclose(self) -> None:
        """Stop all pings."""
        self._beats.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._beats:
            await asyncio.sleep(self._every_s / 8)
            due = self._due()
            for at in range(0, len(due), AT_ONCE):
                await asyncio.gather(*map(self._beat, due[at : at + AT_ONCE]))

    def _due(self) -> list[_Beat]:
        now = time.monotonic()
        due = []
        for place, beat in list(self._beats.items()):
            if self._servers.is_busy(beat.session):
                beat.used_at = now
            if now - beat.used_at > beat.keep_s:
                del self._beats[place]  # the session has expired, so the gateway ends it too
            elif now - beat.told_at >= self._every_s:
                due.append(beat)
        return due

    async def _beat(self, beat: _Beat) -> None:
        beat.told_at = time.monotonic()
        try:
            is_known = await self._servers.ping(beat.session)
        except GatewayError as error:
            logger.info("session_not_pinged session=%s error=%s", beat.session.id, error)
            return
        except Exception:  # a failure must not stop the pings of other sessions
            logger.exception("ping_failed")
            return
        if not is_known and not self._servers.is_busy(beat.session):
            self.forget(beat.session)

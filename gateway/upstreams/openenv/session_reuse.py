"""Servers' sessions that have ended here and wait for the next episode of the same client, a moment long.

To make an environment may take seconds, where its reset takes milliseconds: OpenEnv's own clients reset one for all
their episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from gateway.core.environment import Environment
from gateway.core.errors import UpstreamError
from gateway.core.ids import SessionId
from gateway.core.session import Session
from gateway.upstreams.openenv.episodes import SETTLE_S, OpenEnvSessions
from gateway.upstreams.openenv.websocket import LiveSession

KEPT_S: Final = 60.0
"""One that nobody comes for within this is ended: its successor's slot was never given back in a regular way."""
END_S: Final = 10.0


class SessionReuse:
    """What ended episodes leave to those that follow them under the same id."""

    def __init__(self, episodes: OpenEnvSessions) -> None:
        self._episodes = episodes
        self._kept: dict[SessionId, tuple[LiveSession, float]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def put(self, held: LiveSession) -> bool:
        """Keep the server's session of an episode that ends; False if it can't be used again."""
        self._end_old_ones()
        if not await held.line.settle(SETTLE_S) or not held.line.is_open or held.line.overran:
            return False
        held.is_ended = True
        self._kept[held.session.id] = held, time.monotonic()
        return True

    async def take(self, session: Session, environment: Environment) -> LiveSession | None:
        """What is kept for *session*, if it can be used for it; what can't is ended."""
        found = self._kept.pop(session.id, None)
        if found is None:
            return None
        held = found[0]
        is_same = held.session.worker == session.worker and held.digest == environment.digest()
        if is_same and held.line.is_open:
            return held
        with contextlib.suppress(UpstreamError):
            await self._episodes.close(held, END_S)
        return None

    async def drop(self, session: Session, within_s: float) -> None:
        """End what is kept for *session*, or of it, if anything is.

        Raises:
            UpstreamError: its place may not be free.
        """
        found = self._kept.pop(session.id, None)
        if found is not None:
            await self._episodes.close(found[0], within_s)

    async def aclose(self) -> None:
        """End all of them."""
        kept, self._kept = [held for held, _ in self._kept.values()], {}
        for held in kept:
            self._end_soon(held)
        if self._ending:
            await asyncio.wait(self._ending, timeout=END_S)

    def _end_old_ones(self) -> None:
        now = time.monotonic()
        for id, (held, since) in list(self._kept.items()):
            if now - since > KEPT_S:
                del self._kept[id]
                self._end_soon(held)

    def _end_soon(self, held: LiveSession) -> None:
        task = asyncio.ensure_future(self._end(held))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self, held: LiveSession) -> None:
        with contextlib.suppress(UpstreamError):
            await self._episodes.close(held, END_S)

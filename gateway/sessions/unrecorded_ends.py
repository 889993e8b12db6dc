"""Ends recorded episodes that will never get an end, because the replica that had to record it was killed."""

from __future__ import annotations

import logging
import time
from typing import Final

from gateway.core.errors import StoreUnavailable
from gateway.core.periodic import pause
from gateway.core.ports.step_log import EndlessEpisodes, StepLog
from gateway.core.ports.store import SessionStore

logger = logging.getLogger(__name__)

EVERY_S: Final = 120.0
"""Seconds between two looks. The second look that finds no session for an episode ends it."""
YOUNG_S: Final = 60.0
"""Age in seconds below which an episode is left alone: its session may not be open yet."""
PAGE: Final = 1000
"""Number of sessions that are read together."""


class UnrecordedEnds:
    """Compares this replica's folder of the step log with the store, whose replicas may share the folder.

    An episode's slot is released before its end is recorded, so an episode is without both for a moment. Two looks
    prevent that it is taken for a lost one. If an end is recorded later all the same, it replaces this one.
    """

    def __init__(self, *, store: SessionStore, log: StepLog, episodes: EndlessEpisodes) -> None:
        self._store = store
        self._log = log
        self._episodes = episodes
        self._missing: set[str] = set()
        """Leases of episodes without an end that had no session at the last look."""

    async def run(self) -> None:
        """Look regularly until cancelled."""
        while True:
            await pause(EVERY_S)
            try:
                await self.look()
            except StoreUnavailable as error:
                logger.warning("store_unavailable during=unrecorded_ends error=%s", error)

    async def look(self) -> int:
        """Look once, and return the number of episodes that were ended.

        Raises:
            StoreUnavailable: The store or the step log does not answer.
        """
        begun_before = time.time() - YOUNG_S
        missing = {
            episode.lease
            async for episode in self._episodes.without_end(begun_before)
            if episode.gateway in (None, self._log.gateway)
        }
        if missing:
            missing -= await self._live()
        lost, self._missing = missing & self._missing, missing
        ended = await self._episodes.end_unrecorded(sorted(lost)) if lost else 0
        if ended:
            logger.warning("ends_unrecorded episodes=%s", ended)
        return ended

    async def _live(self) -> set[str]:
        """Return the leases of all sessions of the store."""
        leases: set[str] = set()
        cursor = ""
        while True:
            sessions, cursor = await self._store.session_page(limit=PAGE, cursor=cursor)
            leases.update(session.lease for session in sessions)
            if not cursor:
                return leases

"""Turns of sessions whose workers do not count them: the store keeps the number, for all replicas.

Only AReaL's trainers play by turns, and at the end of an episode their API has a number. So the end of one that never
gave any is the author's fault: 0 would be an invention. Workers that count turns tell whether any of them gave one.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from gateway.core.episode import StepResult
from gateway.core.errors import AuthorFault, StoreUnavailable, author_fault
from gateway.core.ports.store import SessionStore
from gateway.sessions.cache import CachedSession
from gateway.sessions.closing import log_faults

logger = logging.getLogger(__name__)

OWING_S: Final = 2.0
"""How long a store that did not count a turn is spared, and its session's steps with it."""


class TurnCounter:
    """Counts them."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store

    async def taken(self, entry: CachedSession, result: StepResult, *, key: str = "") -> int:
        """Count the turn that *result* came of; returns which one it is.

        Raises:
            AuthorFault: it ends the episode, and none of its turns gave a reward.
        """
        turn = await self.count(entry, key=key)
        if result.reward is None and turn == entry.barren + 1:
            entry.barren = turn
        # Turns that another replica took leave a gap: then nobody here can tell.
        if result.finished and entry.barren == turn:
            raise without_reward(entry, turn)
        return turn

    async def count(self, entry: CachedSession, *, key: str = "") -> int:
        """Count one more turn; see ``SessionStore.count_turn``.

        While the store is away this replica counts on from what it last heard, and tells the store later: the turn was
        taken, and its trainer must not lose what came of it.
        """
        session = entry.session
        if time.monotonic() < entry.owes_until:
            return _owing(entry, key)
        try:
            while entry.owed:
                entry.turns = await self._store.count_turn(session.id, session.lease, key=entry.owed[0])
                del entry.owed[:1]  # not pop: two steps of a session may owe at once
            entry.turns = await self._store.count_turn(session.id, session.lease, key=key)
        except StoreUnavailable as error:
            logger.warning("turn_owed session=%s error=%s", session.id, error)
            entry.owes_until = time.monotonic() + OWING_S
            return _owing(entry, key)
        return entry.turns


def without_reward(entry: CachedSession, turn: int) -> AuthorFault:
    """Log that the episode of *entry* ended in *turn* and that no turn of it gave a reward; return the error."""
    message = f"the environment ended the episode, and gave no reward in any of its {turn} turns (null, or NaN)"
    error = author_fault(message, "reward")
    log_faults(entry.session, error.faults)
    return error


def _owing(entry: CachedSession, key: str) -> int:
    """Note a turn that the store is to count later; returns which one it is."""
    if not key or key not in entry.owed:
        entry.owed.append(key)
    return entry.turns + len(entry.owed)

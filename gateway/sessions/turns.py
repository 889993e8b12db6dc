"""Counts turns of sessions whose workers do not count them. The store keeps the number for all replicas.

Only AReaL's trainers use turns, and their API requires a numeric reward at the end of an episode. So an episode without
any reward is the author's fault: 0 would be an invented reward. Workers that count turns report whether any turn had a
reward.
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
"""Seconds after a failed store query in which a session's turns skip the store, so that its steps do not wait."""


class TurnCounter:
    """Counts turns in the store, or locally while the store does not answer."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store

    async def taken(self, entry: CachedSession, result: StepResult, *, key: str = "") -> int:
        """Count the turn that produced *result* and return the turn's number.

        Raises:
            AuthorFault: The turn ends the episode, and no turn of the episode gave a reward.
        """
        turn = await self.count(entry, key=key)
        if result.reward is None and turn == entry.barren + 1:
            entry.barren = turn
        # Turns at another replica leave a gap. Then this replica can't know whether they gave a reward.
        if result.finished and entry.barren == turn:
            raise without_reward(entry, turn)
        return turn

    async def count(self, entry: CachedSession, *, key: str = "") -> int:
        """Count one more turn; see ``SessionStore.count_turn``.

        While the store does not answer, this replica continues from the last number and reports its turns to the store
        later. The turn has run, and the trainer must not lose its result.
        """
        session = entry.session
        if time.monotonic() < entry.owes_until:
            return _owing(entry, key)
        try:
            while entry.owed:
                entry.turns = await self._store.count_turn(session.id, session.lease, key=entry.owed[0])
                del entry.owed[:1]  # not pop: a concurrent step of the session may have emptied the list
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
    """Note a turn for the store to count later and return the turn's number."""
    if not key or key not in entry.owed:
        entry.owed.append(key)
    return entry.turns + len(entry.owed)

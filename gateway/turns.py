"""Turns of sessions whose workers do not count them: the store keeps the number, for all replicas."""

from __future__ import annotations

import logging
import time
from typing import Final

from gateway.core.errors import StoreUnavailable
from gateway.core.ports import Store
from gateway.remembered import Entry

logger = logging.getLogger(__name__)

OWING_S: Final = 2.0
"""How long a store that did not count a turn is spared, and its session's steps with it."""


class Turns:
    """Counts them."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def count(self, entry: Entry, *, key: str = "") -> int:
        """Count one more turn; see ``Store.count_turn``.

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


def _owing(entry: Entry, key: str) -> int:
    """Note a turn that the store is to count later; returns which one it is."""
    if not key or key not in entry.owed:
        entry.owed.append(key)
    return entry.turns + len(entry.owed)

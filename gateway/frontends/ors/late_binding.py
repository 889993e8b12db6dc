"""Creates by split and index that name no environment, kept until their first request does.

In this replica's memory only, for a minute: the SDK that needs it sends its next request at once, over the same
connection pool. Their secrets must not go to the store.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.core.environment import Environment
from gateway.core.errors import PoolExhausted
from gateway.core.ids import Owner
from gateway.core.session import Group
from gateway.frontends.ors.bodies import CreateSession

KEPT_S = 60.0
KEPT_MAX = 10_000


@dataclass(slots=True, kw_only=True, eq=False)
class Pending:
    """What a create asked for."""

    environment: Environment | None
    wish: CreateSession
    secrets: Mapping[str, str] = field(repr=False)
    fingerprint: str
    policy: str = ""
    """The trainer's tag of the policy that is to play."""
    group: Group | None = None
    """Those that it should begin with."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    added_at: float = field(default_factory=time.monotonic)


class PendingCreates:
    """The creates that wait for their environment's name, oldest first."""

    def __init__(self) -> None:
        self._creates: OrderedDict[tuple[Owner, str], Pending] = OrderedDict()

    def add(self, owner: Owner, sid: str, pending: Pending) -> bool:
        """Keep *pending*; an identical one may be there already. False if another one is.

        Raises:
            PoolExhausted: too many wait.
        """
        self._drop_old()
        known = self._creates.get((owner, sid))
        if known is not None:
            return known.fingerprint == pending.fingerprint
        if len(self._creates) >= KEPT_MAX:
            raise PoolExhausted("too many sessions wait for the name of their environment")
        self._creates[owner, sid] = pending
        return True

    def get(self, owner: Owner, sid: str) -> Pending | None:
        """Look one up."""
        self._drop_old()
        return self._creates.get((owner, sid))

    def pop(self, owner: Owner, sid: str) -> Pending | None:
        """Take one away."""
        return self._creates.pop((owner, sid), None)

    def _drop_old(self) -> None:
        limit = time.monotonic() - KEPT_S
        while self._creates and next(iter(self._creates.values())).added_at < limit:
            self._creates.popitem(last=False)

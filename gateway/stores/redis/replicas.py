"""Keeps the addresses at which replicas reach each other, in one sorted set by the time of their last sign of life.

All times are Redis's: the clock of one replica may be wrong.
"""

from __future__ import annotations

import contextlib
from typing import Final

from gateway.core.errors import StoreUnavailable
from gateway.core.periodic import pause
from gateway.stores.redis.client import RedisClient
from gateway.stores.redis.records import packed, text

SIGN_S: Final = 10.0
"""Seconds between two signs of life of a replica."""
KEPT_S: Final = 60.0
"""Seconds after its last sign of life for which a replica counts as live."""


class RedisReplicas:
    """The addresses of all live replicas."""

    def __init__(self, url: str, *, prefix: str = "gateway") -> None:
        self._link = RedisClient(url, root=f"{{{prefix}}}", family="tasks")
        self._key = packed(f"{{{prefix}}}:peers")
        self._own = ""

    async def run(self, address: str) -> None:
        """Note every `SIGN_S` seconds that the replica at *address* lives, until cancelled."""
        while True:
            with contextlib.suppress(StoreUnavailable):  # the store's client has logged it
                await self.announce(address)
            await pause(SIGN_S)

    async def announce(self, address: str) -> None:
        """Note that the replica at *address* lives, until `aclose`. Raises ``StoreUnavailable``."""
        now, self._own = await self._now(), address
        await self._link.ask("ZADD", self._key, packed(now), packed(address))
        await self._link.ask("ZREMRANGEBYSCORE", self._key, b"-inf", packed(now - KEPT_S))

    async def live(self) -> list[str]:
        """Return the addresses of all live replicas. Raises ``StoreUnavailable``."""
        found = await self._link.ask("ZRANGEBYSCORE", self._key, packed(await self._now() - KEPT_S), b"+inf")
        return [text(address) for address in found]

    async def _now(self) -> int:
        seconds, _ = await self._link.ask("TIME")
        return int(seconds)

    async def aclose(self) -> None:
        """Note that this replica ends, and close the connections."""
        if self._own:
            with contextlib.suppress(StoreUnavailable):
                await self._link.ask("ZREM", self._key, packed(self._own))
        await self._link.aclose()

"""Runs the claims of one replica. Each claim takes a slot, or waits in Redis's queue until a script assigns it one.

A replica does not poll Redis for a slot. A script that frees a slot assigns it to the first ticket, and publishes the
ticket's lease to the waiting replica. The next check of a queue removes the tickets of a dead replica, one second after
their wait is over. `load` checks the queues each tick.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any

from gateway.core.errors import (
    EnvironmentUnavailable,
    PoolExhausted,
    SessionExists,
    StoreUnavailable,
)
from gateway.core.session import Session, SessionRequest
from gateway.stores.limits import reached
from gateway.stores.redis.client import DRAIN_S, RedisClient, cancelled, happened
from gateway.stores.redis.records import as_session, pairs, request_values, text
from gateway.stores.retry_after import retry_after

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between two checks for lost messages about the replica's waiting claims."""
GRACE_S = 1.0
"""Seconds that a ticket is valid after its claim's wait. A live replica leaves the queue itself, by its own clock."""
GIVE_BACK_S = 10.0
"""Seconds for which the replica retries to undo a claim whose caller is gone, while Redis does not answer."""
GIVE_BACK_PAUSE_S = 0.25


@dataclass(slots=True)
class _Wait:
    """A claim of this replica that has no slot yet."""

    opening: SessionRequest
    until: float
    """The time at which the wait ends, by the event loop's clock."""
    news: asyncio.Event
    queued: bool = False
    """True once Redis has the claim's ticket. From then on, a missing ticket means that it was settled or lost."""
    asking: asyncio.Task[Any] | None = None
    """The latest request for a slot. It runs to its end, even if the claim is cancelled."""


class RedisClaims:
    """The claims of this replica that have no slot yet."""

    def __init__(self, link: RedisClient, *, replica: str, queue_max: int) -> None:
        """*queue_max*: maximum number of openings that wait for one environment."""
        self._link = link
        self._replica = replica
        self._queue_max = queue_max
        self._waits: dict[str, _Wait] = {}
        self._none_waits = asyncio.Event()
        self._stopping = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to check for lost messages, in a separate task."""
        self._poller = asyncio.get_running_loop().create_task(self._poll())

    async def claim(self, opening: SessionRequest, *, wait_s: float) -> Session:
        """Take a slot for *opening*, as ``SessionStore.claim``."""
        wait = _Wait(opening, asyncio.get_running_loop().time() + wait_s, asyncio.Event())
        # Registered before the request, because the grant may be published before the answer is read.
        self._waits[opening.lease] = wait
        self._none_waits.clear()
        try:
            answer = await self._asked(wait, wait_s)
            if answer[0] == b"waiting":
                answer = await self._waited(wait)
        except BaseException:  # the trainer hung up, or an answer was lost: undo the claim in Redis
            await asyncio.shield(self._link.detach(self._give_back(wait)))
            raise
        finally:
            del self._waits[opening.lease]
            if not self._waits:
                self._none_waits.set()
        return _granted(opening, answer)

    def wake(self, lease: str) -> None:
        """Wake the claim of *lease*, which then queries its state in Redis."""
        if (wait := self._waits.get(lease)) is not None:
            wait.news.set()

    async def aclose(self) -> None:
        """Fail waiting claims with ``StoreUnavailable``."""
        self._stopping.set()
        for wait in self._waits.values():
            wait.news.set()
        if self._waits:
            await happened(self._none_waits, timeout_s=DRAIN_S)
        if self._poller is not None:
            await cancelled([self._poller])

    async def _asked(self, wait: _Wait, wait_s: float) -> list[Any]:
        """Request a slot, or a place in the queue for *wait_s* seconds, and return the answer of ``claim.lua``."""
        kept_s = wait_s + GRACE_S if wait_s > 0 else 0
        wait.asking = self._link.begin("claim", *request_values(wait.opening, self._replica), kept_s, self._queue_max)
        answer: list[Any] = await asyncio.shield(wait.asking)
        return answer

    async def _waited(self, wait: _Wait) -> list[Any]:
        """Wait until a ticket is settled or its time is over, and return the answer of ``settle.lua``.

        Redis may be unavailable in between. The poll wakes a claim once Redis is back. A claim whose ticket was lost
        enters the queue again, at the end.
        """
        opening = wait.opening
        wait.queued = True
        loop = asyncio.get_running_loop()
        while True:
            await happened(wait.news, timeout_s=wait.until - loop.time())
            # Cleared before the query, so that a message published from here on wakes the claim again.
            wait.news.clear()
            if self._stopping.is_set():
                raise StoreUnavailable("the store is closed")
            late = loop.time() >= wait.until
            try:
                answer: list[Any] = await self._link.run(
                    "settle", opening.id, opening.environment, opening.owner, opening.lease, int(late)
                )
                if answer[0] == b"unknown" and not late:
                    answer = await self._asked(wait, wait.until - loop.time())
            except StoreUnavailable:
                if late:
                    raise
                continue
            if answer[0] != b"waiting":
                return answer

    async def _give_back(self, wait: _Wait) -> None:
        """Undo a claim. The caller, which is gone or has its error, waits for the first attempt only.

        If Redis does not answer for `GIVE_BACK_S`, the deadline of the ticket or the session undoes the claim.
        """
        if wait.asking is not None:
            await asyncio.wait({wait.asking})
        if not await self._given_back(wait.opening):
            self._link.detach(self._give_back_later(wait.opening))

    async def _give_back_later(self, opening: SessionRequest) -> None:
        """Retry to undo a claim. A repetition is safe, because only the ticket or session of this lease is released."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + GIVE_BACK_S
        while loop.time() < deadline and not await happened(self._stopping, timeout_s=GIVE_BACK_PAUSE_S):
            if await self._given_back(opening):
                return
        logger.warning("claim_not_given_back session=%s setup_s=%.0f", opening.id, opening.setup_s)

    async def _given_back(self, opening: SessionRequest) -> bool:
        """Try once to undo a claim. Return False if Redis did not answer."""
        try:
            await self._link.run("give_back", opening.id, opening.environment, opening.owner, opening.lease)
        except StoreUnavailable:
            return False
        return True

    async def _poll(self) -> None:
        """Wake every claim whose ticket is gone, because its message may be lost."""
        while not await happened(self._stopping, timeout_s=POLL_S):
            queued = [(wait.opening.id, lease) for lease, wait in self._waits.items() if wait.queued]
            # Claims continue while Redis is unavailable, because their tickets may still exist when it is back.
            with contextlib.suppress(StoreUnavailable):
                for lease in await self._link.run_in_batches("not_waiting", items=queued):
                    self.wake(text(lease))


def _granted(opening: SessionRequest, answer: list[Any]) -> Session:
    """Return the session that claim.lua or settle.lua granted, or raise the error that its answer names."""
    kind, *rest = answer
    environment, need = opening.environment, 1
    match text(kind):
        case "granted":
            return as_session(pairs(rest[0]))
        case "exists":
            raise SessionExists(f"session {opening.id} exists")
        case "broken" | "failed":
            raise EnvironmentUnavailable(text(rest[1]), retry_after_s=int(rest[0]) / 1000)
        case "full":
            waiting, need, *rest = rest
            message = f"no slot of {environment} is free, and {int(waiting)} wait for one"
        case "lost":
            message = f"the slot of {environment} was lost before it could be used"
        case _:  # left, unknown
            message = f"no slot of {environment} became free in time"
    place, pace_ms, held, held_here = rest
    if kind != b"lost":
        message = reached(opening, int(held), int(held_here), need=int(need)) or message
    raise PoolExhausted(message, retry_after_s=retry_after(int(place), float(pace_ms) / 1000 if pace_ms else None))

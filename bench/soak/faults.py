"""The faults of a soak and their times: all kinds in turn, in a new random order each turn, one fault at a time.

In the first half, faults hit any replica. In the second half, they spare the first replica, so that the memory of one
process can be observed over a long time.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

from docker.errors import APIError, NotFound

from bench.soak.errors import Fault, Ledger
from bench.soak.world import Replica, World

REST_S = (3.0, 9.0)
"""Seconds between the end of a fault and the next fault."""
REDIS_PAUSE_S = 5.0
WORKER_PAUSE_S = (2.0, 8.0)
AWAY_S = (0.5, 3.0)
"""Seconds before an ended process is started again."""


class Faults:
    """Makes faults until it is stopped, and repairs each: it resumes paused processes and restarts ended ones."""

    def __init__(self, world: World, ledger: Ledger, *, seed: int) -> None:
        self._world = world
        self._ledger = ledger
        self._random = random.Random(seed)
        self.spares_first = False
        """True to spare the first replica."""

    async def run(self, stopping: asyncio.Event) -> None:
        """Make one fault after the other until *stopping* is set. Repair the current fault first.

        Raises:
            StartError: A replica or Redis does not start again.
        """
        while not stopping.is_set():
            for fault in self._random.sample(list(Fault), len(Fault)):
                await _wait(stopping, self._random.uniform(*REST_S))
                if stopping.is_set():
                    return
                self._ledger.add_fault(fault)
                if await self._make(fault):
                    self._ledger.faults[fault.value] += 1
                self._ledger.add_fault(fault)

    async def _make(self, fault: Fault) -> bool:
        """Make a fault and repair it. Return False if there was nothing to break."""
        if fault in (Fault.KILL_REPLICA, Fault.TERM_REPLICA):
            replica = self._replica()
            await (replica.kill() if fault is Fault.KILL_REPLICA else replica.stop())
            await asyncio.sleep(self._random.uniform(*AWAY_S))
            await replica.start()
        elif fault is Fault.RESTART_REDIS:
            await self._world.redis.stop()
            await asyncio.sleep(self._random.uniform(*AWAY_S))
            await self._world.redis.start()
        elif fault is Fault.PAUSE_REDIS:
            self._world.redis.pause()
            try:
                await asyncio.sleep(REDIS_PAUSE_S)
            finally:
                self._world.redis.go_on()
        else:
            return await self._break_worker(fault)
        return True

    async def _break_worker(self, fault: Fault) -> bool:
        workers = await self._world.containers(running=True)
        if not workers:
            return False
        worker = self._random.choice(sorted(workers, key=lambda each: str(each.id)))
        # A container that stopped or was paused in the meantime cannot be broken again.
        with suppress(NotFound, APIError):
            if fault is Fault.KILL_WORKER:
                await asyncio.to_thread(worker.kill)
                return True
            await asyncio.to_thread(worker.pause)
            try:
                await asyncio.sleep(self._random.uniform(*WORKER_PAUSE_S))
            finally:
                await asyncio.to_thread(_go_on, worker)
            return True
        return False

    def _replica(self) -> Replica:
        return self._random.choice(self._world.replicas[1:] if self.spares_first else self._world.replicas)


def _go_on(worker: Any) -> None:
    with suppress(NotFound, APIError):
        worker.unpause()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=seconds)
    finally:
        waiting.cancel()

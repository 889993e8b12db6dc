"""Deaths of an engine's workers, each with its reason: followed from the first reader on.

The reason is in the events, as a rule. Where it is not, the engine is asked for the container's state, for a moment
only: trainers wait for the announcement.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Final

from gateway.backends import calls
from gateway.backends.deaths import Deaths
from gateway.backends.engine import LOOK_S, Engine
from gateway.backends.events import DieEvents, Ended
from gateway.core.model import CloseReason, Death

LOOK_THREADS: Final = 2
"""Threads that look why a container ended: they must not wait for those that start others."""
REASON_S: Final = 0.05
"""How long a death may be kept back for its reason: a third of what trainers may wait for the error."""
CLOSE_S: Final = 10.0
"""How long ``aclose`` waits for the events thread."""


class Endings:
    """Announces the deaths of one instance's workers."""

    def __init__(self, url: str, instance: str, *, reason_s: float = REASON_S) -> None:
        """Make no connection yet. *reason_s*: how long a death may be kept back for its reason."""
        self._url = url
        self._instance = instance
        self._reason_s = reason_s
        self._looker = Engine(url, threads=LOOK_THREADS)
        self._deaths = Deaths()
        self._telling: set[asyncio.Task[None]] = set()
        self._events: DieEvents | None = None
        self._closed = False

    def follow(self) -> AsyncIterator[Death]:
        """Yield what dies from now on, until `aclose`."""
        if self._events is None and not self._closed:
            loop = asyncio.get_running_loop()

            def announce(ended: Ended) -> None:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._ended, ended)

            self._events = DieEvents(self._url, self._instance, announce=announce)
        return self._deaths.follow()

    async def aclose(self) -> None:
        """End the readers once they have read what was announced before."""
        self._closed = True
        if self._events is not None:
            await asyncio.to_thread(self._events.close, CLOSE_S)
        if self._telling:
            await asyncio.wait(set(self._telling), timeout=2 * self._reason_s)
        self._deaths.close()
        await self._looker.aclose(timeout_s=2 * self._reason_s)

    def _ended(self, ended: Ended) -> None:
        if ended.out_of_memory is not None:
            self._deaths.add(death(ended, ended.out_of_memory))
            return
        task = asyncio.create_task(self._look(ended))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _look(self, ended: Ended) -> None:
        state = partial(calls.state, container=ended.container)
        looking = asyncio.create_task(self._looker.call(state, silence_s=LOOK_S))
        await asyncio.wait({looking}, timeout=self._reason_s)
        looking.cancel()
        known = looking.done() and not looking.cancelled() and looking.exception() is None
        self._deaths.add(death(ended, known and bool(looking.result().get("OOMKilled"))))


def death(ended: Ended, out_of_memory: bool) -> Death:
    """Say how a worker died."""
    if out_of_memory:
        return Death(ended.id, CloseReason.OUT_OF_MEMORY, f"out of memory (exit status {ended.exit_status})")
    return Death(ended.id, CloseReason.WORKER_LOST, f"exit status {ended.exit_status}")

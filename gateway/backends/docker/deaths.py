"""Deaths of an engine's workers, each with its reason: followed from the first reader on.

The reason is in the events, as a rule. Where it is not, a late event is waited for, and the engine is asked for the
container's state; for a moment only, as trainers wait for the announcement, and what they were told can't be changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from gateway.backends.broadcast import DeathBroadcast
from gateway.backends.docker import calls
from gateway.backends.docker.engine import Engine, EngineError
from gateway.backends.docker.events import ContainerEnd, DieEvents
from gateway.core.ids import WorkerId
from gateway.core.session import CloseReason
from gateway.core.worker import Death

LOOK_THREADS: Final = 8
"""Threads that look why a container ended: they must not wait for those that start others, nor for each other, as each
look waits until the engine has tidied up after its container."""
REASON_S: Final = 1.0
"""How long a death may be kept back for its reason. A look takes 15 to 35 ms, so trainers hear of a worker's death
within 150 ms; where twenty die at once on a loaded machine it takes 120 to 240 ms, and more where many engines share
few processors. A wrong reason can't be taken back, and the calls that broke off wait for it longer (`verdicts`)."""
LATE_S: Final = 0.02
"""How long an ``oom`` event is waited for once the state knew of none: the engine handles it right after the death."""
SILENCE_S: Final = 2.0
"""The engine's longest within a look; nobody waits for its outcome any more, but the thread may be needed."""
CLOSE_S: Final = 10.0
"""How long ``aclose`` waits for the events thread."""


class DeathWatcher:
    """Announces the deaths of one gateway's workers."""

    def __init__(self, url: str, labels: Sequence[str], *, reason_s: float = REASON_S, late_s: float = LATE_S) -> None:
        """Make no connection yet.

        Args:
            url: The engine's socket.
            labels: Of the workers, ``name=value``.
            reason_s: How long a death may be kept back for its reason.
            late_s: How much of that an ``oom`` event may come later than a state that knows of none.
        """
        self._url = url
        self._labels = labels
        self._reason_s = reason_s
        self._late_s = late_s
        self._looker = Engine(url, threads=LOOK_THREADS, silence_s=SILENCE_S)
        self._deaths = DeathBroadcast()
        self._telling: set[asyncio.Task[None]] = set()
        self._ooms: dict[WorkerId, asyncio.Event] = {}
        """Of deaths that are kept back: set when an ``oom`` event came."""
        self._events: DieEvents | None = None
        self._closed = False

    def follow(self) -> AsyncIterator[Death]:
        """Yield what dies from now on, until `aclose`."""
        if self._events is None and not self._closed:
            loop = asyncio.get_running_loop()

            def announce(ended: ContainerEnd) -> None:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._ended, ended)

            def announce_oom(id: WorkerId) -> None:
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._heard_of_oom, id)

            def followed(tells_of_each_oom: bool) -> None:
                if not tells_of_each_oom:
                    self._looker.warm()

            self._events = DieEvents(
                self._url, self._labels, announce=announce, announce_oom=announce_oom, followed=followed
            )
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

    def _ended(self, ended: ContainerEnd) -> None:
        if ended.out_of_memory is not None:
            self._deaths.add(death(ended, ended.out_of_memory))
            return
        task = asyncio.create_task(self._tell_why(ended))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)
        self._ooms[ended.id] = asyncio.Event()

    def _heard_of_oom(self, id: WorkerId) -> None:
        if id in self._ooms:
            self._ooms[id].set()

    async def _tell_why(self, ended: ContainerEnd) -> None:
        """Announce a death with its reason, or without once the time for that is over."""
        oom = asyncio.create_task(self._ooms[ended.id].wait())
        looking = asyncio.create_task(self._look(ended.container))
        try:
            is_oom = await self._either(oom, looking)
        finally:
            del self._ooms[ended.id]
            oom.cancel()
            looking.cancel()
        self._deaths.add(death(ended, is_oom))
        await asyncio.wait({oom, looking})

    async def _either(self, oom: asyncio.Task[object], looking: asyncio.Task[bool]) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._reason_s
        await asyncio.wait({oom, looking}, timeout=self._reason_s, return_when=asyncio.FIRST_COMPLETED)
        if looking.done() and looking.result():
            return True
        await asyncio.wait({oom}, timeout=max(0.0, min(self._late_s, deadline - loop.time())))
        return oom.done()

    async def _look(self, container: str) -> bool:
        try:
            state = await self._looker.call(partial(calls.state, container=container))
        except EngineError:
            return False
        return bool(state.get("OOMKilled"))


def death(ended: ContainerEnd, out_of_memory: bool) -> Death:
    """Say how a worker died."""
    if out_of_memory:
        return Death(ended.id, CloseReason.OUT_OF_MEMORY, f"out of memory (exit status {ended.exit_status})")
    return Death(ended.id, CloseReason.WORKER_LOST, f"exit status {ended.exit_status}")

"""Lanes: threads with an event loop each, for authors' ``async def`` code.

A session stays on one lane, so that its code's locks, connections and subprocesses belong to one loop. Blocking code
delays only the sessions of its lane. With as many lanes as slots, that is only its own session.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop
from envserver.errors import NoThread

logger = logging.getLogger("envserver")
LINGER_S = 5.0
"""Seconds that an unused lane is kept, so that consecutive sessions need not start a thread each."""
FAREWELL_S = 2.0
"""Seconds for an author's remaining tasks to end when their lane ends."""


class Lane:
    """A thread, its loop, and the number of sessions that hold it."""

    def __init__(self) -> None:
        """
        Raises:
            NoThread: The thread could not start.
        """
        self.holders = 0
        self.closing: asyncio.TimerHandle | None = None
        self._loop = uvloop.new_event_loop()
        self._running: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._work, name="envserver-lane", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._loop.close()
            raise NoThread(str(error)) from error

    @property
    def is_alive(self) -> bool:
        """Whether the lane's thread still runs."""
        return self._thread.is_alive()

    def start(
        self, work: Callable[[], Coroutine[Any, Any, None]], *, on_cancelled: Callable[[], None]
    ) -> Callable[[], None]:
        """Run *work*'s coroutine, which raises nothing but a cancellation. Return a function that cancels it.

        Args:
            on_cancelled: Called on the lane after a cancellation, even before the coroutine's first line.
        """
        started: list[asyncio.Task[None]] = []

        def begin() -> None:
            task = self._loop.create_task(work())
            started.append(task)
            self._running.add(task)
            task.add_done_callback(end)

        def end(task: asyncio.Task[None]) -> None:
            self._running.discard(task)
            if task.cancelled():
                on_cancelled()

        def cancel() -> None:
            for task in started:
                task.cancel()

        self._loop.call_soon_threadsafe(begin)
        return lambda: self._call(cancel)

    def stop(self) -> None:
        """End the thread when its code allows it. Code that blocks forever keeps the thread until the process ends."""
        self._call(self._loop.stop)

    def _call(self, function: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_farewell())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()


async def _farewell() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=FAREWELL_S)
    await asyncio.get_running_loop().shutdown_asyncgens()


class Lanes:
    """The lanes of a server. Used from the server's thread only."""

    def __init__(self, most: int, *, linger_s: float = LINGER_S) -> None:
        self._most = most
        self._linger_s = linger_s
        self._lanes: list[Lane] = []
        self._kept: list[Lane] = []
        self._closed: list[Lane] = []

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def is_alive(self) -> bool:
        """Whether the thread of any lane still runs, including closed lanes."""
        return any(lane.is_alive for lane in (*self._lanes, *self._kept, *self._closed))

    def close(self) -> None:
        """End all lanes, including lanes in use. A lane with blocking code stays alive."""
        for lane in list(self._lanes):
            if lane.closing is not None:
                lane.closing.cancel()
            self._close(lane)
        for lane in self._kept:
            lane.stop()

    def keep(self) -> Lane:
        """Return a reserved lane that lives until ``close``. It does not count against the limit *most*.

        Raises:
            NoThread: No thread could start.
        """
        lane = Lane()
        self._kept.append(lane)
        return lane

    def hold(self) -> Lane:
        """Return the least loaded lane, or a new lane if all are in use and more are allowed. ``release`` it later.

        Raises:
            NoThread: There is no lane, and no thread could start.
        """
        lane = min(self._lanes, key=lambda lane: lane.holders, default=None)
        if lane is None or (lane.holders and len(self._lanes) < self._most):
            lane = self._grow() or lane
        if lane is None:
            raise NoThread("no thread could be started for asynchronous code")
        lane.holders += 1
        if lane.closing is not None:
            lane.closing.cancel()
            lane.closing = None
        return lane

    def release(self, lane: Lane) -> None:
        """Release a lane from ``hold``."""
        lane.holders -= 1
        if not lane.holders and lane in self._lanes:
            lane.closing = asyncio.get_running_loop().call_later(self._linger_s, self._close, lane)

    def _grow(self) -> Lane | None:
        try:
            lane = Lane()
        except NoThread:
            logger.warning("lane_refused lanes=%d", len(self._lanes))
            return None
        self._lanes.append(lane)
        return lane

    def _close(self, lane: Lane) -> None:
        self._lanes.remove(lane)
        self._closed = [one for one in self._closed if one.is_alive]
        self._closed.append(lane)
        lane.stop()

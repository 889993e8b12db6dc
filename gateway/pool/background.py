"""Holds the control loop's tasks that outlast a turn, and the event that starts the next turn early."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


class BackgroundTasks:
    """Background tasks of the control loop's parts. Use it from one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._woken = asyncio.Event()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run *work* in the background and log its failure."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def wake(self) -> None:
        """Start the next turn now, because its input changed."""
        self._woken.set()

    def begin_turn(self) -> None:
        """Forget earlier calls of `wake`. Call this before the turn reads its input, which may miss later changes."""
        self._woken.clear()

    async def woken(self, within_s: float) -> None:
        """Wait at most *within_s* seconds for `wake`."""
        try:
            async with asyncio.timeout(within_s):
                await self._woken.wait()
        except TimeoutError:
            pass

    async def aclose(self, timeout_s: float) -> None:
        """Cancel all tasks and wait at most *timeout_s* seconds for their end."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("pool_task_failed error=%r", error)

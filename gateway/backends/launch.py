"""Run the steps of a worker's launch, and undo them after a failure or a cancellation.

A step in a thread, or a process that is being forked, cannot be cancelled. So the steps run in a task of their own,
which is never cancelled. When the caller is cancelled, a token marks the launch as abandoned. The steps end at their
next check of the token, and then the undo runs. Both continue even if the caller is cancelled a second time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from gateway.core.errors import BackendError
from gateway.core.leader_lease import LeaderLease

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

UNDO_S = 20.0
"""Seconds that a cancelled caller waits for the undo. An idle engine kills and removes a container in 0.1 s."""
UNDO_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 64.0)
"""Seconds between retries of an undo while the engine does not answer: three minutes, plus the engine's timeouts."""


class LaunchCancelled(Exception):
    """The caller has abandoned the launch."""


class CancelToken:
    """A flag that ends an abandoned launch. The thread that sends a request calls `check` right before it."""

    def __init__(self, lease: LeaderLease | None = None) -> None:
        """Create a token; *lease* is the lease of the leader that requests the launch."""
        self._abandoned = threading.Event()
        self._lease = lease

    def abandon(self) -> None:
        """Make `check` raise from now on."""
        self._abandoned.set()

    def check(self) -> None:
        """Raise ``LaunchCancelled`` if the launch was abandoned, ``NotLeading`` if its leader's lease has ended."""
        if self._abandoned.is_set():
            raise LaunchCancelled
        if self._lease is not None:
            self._lease.check()

    def guarded(self, act: Callable[P, T]) -> Callable[P, T]:
        """Return a function that calls `check` right before *act*."""

        def checked(*args: P.args, **options: P.kwargs) -> T:
            self.check()
            return act(*args, **options)

        return checked


class Launches:
    """The launches in progress, and the undos of failed launches."""

    def __init__(self, *, undo_pauses_s: Sequence[float] = UNDO_PAUSES_S) -> None:
        """Create an empty set; *undo_pauses_s* are the seconds before each retry of a failed undo."""
        self._undo_pauses_s = undo_pauses_s
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ending = asyncio.Event()
        self._later: set[asyncio.Task[None]] = set()
        """Failed undos that are retried."""

    async def run(
        self,
        steps: Callable[[CancelToken], Coroutine[Any, Any, T]],
        undo: Callable[[], Awaitable[None]],
        lease: LeaderLease | None = None,
    ) -> T:
        """Run *steps*; if they fail or the caller is cancelled, run *undo* after they have ended."""
        wanted = CancelToken(lease)
        task = self._own(steps(wanted))
        try:
            return await asyncio.shield(task)
        except BaseException:  # also a cancellation, when the caller no longer waits for the worker
            wanted.abandon()
            cleaning = self._own(self._clean(task, undo))
            await asyncio.wait({cleaning}, timeout=UNDO_S)
            raise

    async def drain(self, timeout_s: float) -> None:
        """Wait at most *timeout_s* seconds for launches and undos to end; failed undos are not retried any more."""
        self._ending.set()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    async def _clean(self, steps: asyncio.Task[Any], undo: Callable[[], Awaitable[None]]) -> None:
        await asyncio.wait({steps})
        if not steps.cancelled():
            steps.exception()  # retrieved here, because a cancelled caller does not
        if not await self._undone(undo):
            later = self._own(self._undo_later(undo))
            self._later.add(later)
            later.add_done_callback(self._later.discard)

    async def _undo_later(self, undo: Callable[[], Awaitable[None]]) -> None:
        """Retry *undo* until an engine that hung answers again, or the pauses are used up."""
        for pause_s in self._undo_pauses_s:
            await asyncio.wait({ending := asyncio.ensure_future(self._ending.wait())}, timeout=pause_s)
            ending.cancel()
            if self._ending.is_set() or await self._undone(undo):
                return

    async def _undone(self, undo: Callable[[], Awaitable[None]]) -> bool:
        """Run *undo*; return False if a retry may succeed."""
        try:
            await undo()
        except BackendError as error:
            # Starts are retried each second while an engine is away: log one ERROR until no undo is pending.
            logger.log(logging.DEBUG if self._later else logging.ERROR, "launch_not_undone error=%s", error)
            return False
        except Exception:  # the launch's own failure is raised instead; `Backend.found` lists the remains
            logger.exception("launch_not_undone")
        return True

    def _own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def raise_first(outcomes: Iterable[object]) -> None:
    """Raise the first exception among *outcomes*, the results of ``asyncio.gather``."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome

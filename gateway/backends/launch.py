"""Launches that leave nothing behind: one undo at the top, for failures and for cancellations alike.

A step in a thread, or a process that is being forked, cannot be cancelled. So the steps of a launch run in a task of
their own which nobody cancels; a caller that is cancelled tells the steps that they are abandoned, they end at the
next opportunity, and then the undo runs. Both go on even if the caller is cancelled a second time.
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
"""How long a cancelled caller waits for the undo; to kill and remove a container takes 0.1 s on an idle engine."""
UNDO_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 64.0)
"""Between the tries to undo where the engine does not answer; three minutes in all, and the engine's silences."""


class LaunchCancelled(Exception):
    """Nobody wants what is being launched any more."""


class CancelToken:
    """Whether a launch is still wanted. `check` is called in the thread that makes a request, right before it."""

    def __init__(self, lease: LeaderLease | None = None) -> None:
        """*lease*: of the leader that wants it."""
        self._abandoned = threading.Event()
        self._lease = lease

    def abandon(self) -> None:
        """Let `check` raise from now on."""
        self._abandoned.set()

    def check(self) -> None:
        """Raise ``LaunchCancelled`` if the launch was given up, ``NotLeading`` if the lease of its leader has ended."""
        if self._abandoned.is_set():
            raise LaunchCancelled
        if self._lease is not None:
            self._lease.check()

    def guarded(self, act: Callable[P, T]) -> Callable[P, T]:
        """Return *act* with a `check` right before it."""

        def checked(*args: P.args, **options: P.kwargs) -> T:
            self.check()
            return act(*args, **options)

        return checked


class Launches:
    """The launches under way, and what is being undone of those that failed."""

    def __init__(self, *, undo_pauses_s: Sequence[float] = UNDO_PAUSES_S) -> None:
        """*undo_pauses_s*: before each further try of an undo that failed."""
        self._undo_pauses_s = undo_pauses_s
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ending = asyncio.Event()
        self._later: set[asyncio.Task[None]] = set()
        """Undos that failed and are tried again."""

    async def run(
        self,
        steps: Callable[[CancelToken], Coroutine[Any, Any, T]],
        undo: Callable[[], Awaitable[None]],
        lease: LeaderLease | None = None,
    ) -> T:
        """Run *steps*; if they fail, or the caller is cancelled, run *undo* once they have ended."""
        wanted = CancelToken(lease)
        task = self._own(steps(wanted))
        try:
            return await asyncio.shield(task)
        except BaseException:  # a cancellation too: whoever waited for the worker hung up
            wanted.abandon()
            cleaning = self._own(self._clean(task, undo))
            await asyncio.wait({cleaning}, timeout=UNDO_S)
            raise

    async def drain(self, timeout_s: float) -> None:
        """Wait, at most *timeout_s*, until nothing is under way; what could not be undone so far is not tried again."""
        self._ending.set()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    async def _clean(self, steps: asyncio.Task[Any], undo: Callable[[], Awaitable[None]]) -> None:
        await asyncio.wait({steps})
        if not steps.cancelled():
            steps.exception()  # looked at: its caller, which was cancelled, will not
        if not await self._undone(undo):
            later = self._own(self._undo_later(undo))
            self._later.add(later)
            later.add_done_callback(self._later.discard)

    async def _undo_later(self, undo: Callable[[], Awaitable[None]]) -> None:
        """Undo what an engine that hangs may have done, when it answers again."""
        for pause_s in self._undo_pauses_s:
            await asyncio.wait({ending := asyncio.ensure_future(self._ending.wait())}, timeout=pause_s)
            ending.cancel()
            if self._ending.is_set() or await self._undone(undo):
                return

    async def _undone(self, undo: Callable[[], Awaitable[None]]) -> bool:
        """Run *undo*; False if it is worth another try."""
        try:
            await undo()
        except BackendError as error:
            # A start is tried each second while an engine is away: one ERROR, until nothing is left to be undone.
            logger.log(logging.DEBUG if self._later else logging.ERROR, "launch_not_undone error=%s", error)
            return False
        except Exception:  # the failure that led here is the one to be raised; `Backend.found` shows what is left
            logger.exception("launch_not_undone")
        return True

    def _own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def raise_first(outcomes: Iterable[object]) -> None:
    """Raise the first exception among what ``asyncio.gather`` returned."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome

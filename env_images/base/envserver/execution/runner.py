"""Runs authors' code away from the server's loop, and brings back what became of it."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

from envserver.errors import AuthorCancelled, describe
from envserver.execution.loop_threads import Lane, Lanes
from envserver.execution.threads import Threads


class Place:
    """Where one session's (or one class's) code runs; it holds at most one lane."""

    __slots__ = ("cancel", "lane", "shared")

    def __init__(self, shared: "Place | None" = None) -> None:
        self.lane: Lane | None = None
        self.shared = shared
        """The place whose lane is used instead: all sessions of a class with ``lanes = "shared"`` have one."""
        self.cancel: Callable[[], None] | None = None
        """Cancels what runs here now and may be cancelled."""


class Runner:
    """Threads for plain code, lanes for asynchronous code. Used from the server's thread only."""

    def __init__(self, *, threads: Threads, lanes: Lanes) -> None:
        self._threads = threads
        self._lanes = lanes
        self._lodgers: dict[Place, int] = {}

    @property
    def busy(self) -> bool:
        """Whether a thread or a lane may still run authors' code."""
        return self._threads.busy or self._lanes.is_alive

    def close(self) -> None:
        """End the lanes; threads end by themselves."""
        self._lanes.close()

    async def run(self, place: Place, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run *function*, a ``def`` or an ``async def``, and return its result or raise its exception.

        Cancelling this does not cancel the code; ``place.cancel`` asks a coroutine to end.

        Raises:
            AuthorCancelled: the coroutine was cancelled.
            NoThread: no thread could be started.
        """
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        report = _Report(done)
        if not inspect.iscoroutinefunction(function):
            self._threads.submit(lambda: report.of(lambda: function(*args, **kwargs)))
            return await done
        lane = self._lane(place)
        cancel = lane.start(lambda: report.of_async(lambda: function(*args, **kwargs)), on_cancelled=report.cancelled)
        place.cancel = cancel
        try:
            return await done
        finally:
            if place.cancel is cancel:
                place.cancel = None

    def keep(self, place: Place) -> None:
        """Give *place* a lane of its own until ``close``: for what belongs to one loop as long as the server lives.

        Raises:
            NoThread: no thread could be started.
        """
        place.lane = self._lanes.keep()
        self._lodgers[place] = 1  # one that never leaves

    def leave(self, place: Place) -> None:
        """Give back *place*'s lane, if it holds one."""
        if place.lane is None:
            return
        held, place.lane = place.lane, None
        if place.shared is None:
            self._lanes.release(held)
            return
        self._lodgers[place.shared] -= 1
        if not self._lodgers[place.shared]:
            del self._lodgers[place.shared]
            self.leave(place.shared)

    def _lane(self, place: Place) -> Lane:
        if place.lane is None:
            if place.shared is None:
                place.lane = self._lanes.hold()
            else:
                place.lane = self._lane(place.shared)
                self._lodgers[place.shared] = self._lodgers.get(place.shared, 0) + 1
        return place.lane


class _Settled(Protocol):
    def __call__(self, future: asyncio.Future[Any], value: Any, /) -> None: ...


class _Report:
    """Carries a result from another thread to a future of the server's loop."""

    __slots__ = ("_done", "_loop")

    def __init__(self, done: asyncio.Future[Any]) -> None:
        self._done = done
        self._loop = done.get_loop()

    def of(self, work: Callable[[], Any]) -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  # SystemExit too: an author's code never ends the server
            self._tell(_fail, _portable(error))
        else:
            self._tell(_succeed, result)

    async def of_async(self, work: Callable[[], Awaitable[Any]]) -> None:
        try:
            result = await work()
        except asyncio.CancelledError:
            raise  # told by ``cancelled``, as one before the first line is
        except BaseException as error:  # noqa: BLE001  # as above
            self._tell(_fail, _portable(error))
        else:
            self._tell(_succeed, result)

    def cancelled(self) -> None:
        self._tell(_fail, AuthorCancelled("cancelled"))

    def _tell(self, settle: _Settled, value: Any) -> None:
        # A thread may outlive a server that was stopped, and then finds its loop closed.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(settle, self._done, value)


def _succeed(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _portable(error: BaseException) -> BaseException:
    """Bring *error* into a form that a future can carry without ending a loop or confusing it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    return RuntimeError(describe(error)).with_traceback(error.__traceback__)

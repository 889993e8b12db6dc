"""Runs authors' code outside the server's loop and returns its results to the loop."""

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Any

from envserver.errors import AuthorCancelled, NoThread, describe
from envserver.execution.loop_threads import Lane, Lanes

logger = logging.getLogger("envserver")
IDLE_S = 10.0
"""Seconds without work after which a thread ends. Starting a thread takes about 0.1 ms."""


class Threads:
    """Up to *most* daemon threads for plain ``def`` code, which may block. Used from the server's thread only.

    ``concurrent.futures`` does not fit: its threads never end and delay the interpreter's exit. If its thread cannot
    start, a job raises although it stays queued. Here an idle thread ends after a while. If the container allows no
    more threads, a job waits for an existing thread.
    """

    def __init__(self, most: int, *, idle_s: float = IDLE_S) -> None:
        self._most = most
        self._idle_s = idle_s
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._alive = 0
        self._pending = 0

    @property
    def alive(self) -> int:
        """Number of existing threads."""
        return self._alive

    @property
    def busy(self) -> bool:
        """Whether a job is queued or running."""
        return self._pending > 0

    def submit(self, job: Callable[[], Any]) -> None:
        """Run *job*, which must not raise, as soon as a thread is free.

        The queue has no limit of its own, because calls are limited per session.

        Raises:
            NoThread: There is no thread, and none could start.
        """
        with self._lock:
            self._pending += 1
            wanted = self._pending > self._alive and self._alive < self._most
            if wanted:
                self._alive += 1
        if wanted:
            self._start()
        self._jobs.put(job)

    def _start(self) -> None:
        try:
            threading.Thread(target=self._work, name="envserver-thread", daemon=True).start()
        except RuntimeError as error:
            with self._lock:
                self._alive -= 1
                if not self._alive:
                    self._pending -= 1
                    raise NoThread(str(error)) from error
            logger.warning("thread_refused alive=%d", self._alive)

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._idle_s)
            except Empty:
                with self._lock:
                    # A job submitted since the timeout counted this thread as free.
                    if self._pending < self._alive:
                        self._alive -= 1
                        return
                continue
            try:
                job()
            finally:
                del job  # it refers to the session's objects
                with self._lock:
                    self._pending -= 1


class Place:
    """Execution context of one session's (or one class's) code. It holds at most one lane."""

    __slots__ = ("cancel", "lane", "shared")

    def __init__(self, shared: "Place | None" = None) -> None:
        self.lane: Lane | None = None
        self.shared = shared
        """The place whose lane is used instead. All sessions of a class with ``lanes = "shared"`` have the same one."""
        self.cancel: Callable[[], None] | None = None
        """Cancels the running code if it is cancellable."""


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
        """End the lanes. Threads end by themselves."""
        self._lanes.close()

    async def run(self, place: Place, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run *function*, a ``def`` or an ``async def``, and return its result or raise its exception.

        Cancelling this call does not cancel the code. ``place.cancel`` requests a coroutine's end.

        Raises:
            AuthorCancelled: The coroutine was cancelled.
            NoThread: No thread could start.
        """
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        report = _Report(done)
        if not inspect.iscoroutinefunction(function):
            context = copy_context()  # a lane's loop copies it itself
            self._threads.submit(lambda: context.run(report.of, lambda: function(*args, **kwargs)))
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
        """Reserve a lane for *place* until ``close``, for objects that need one loop for the server's whole life.

        Raises:
            NoThread: No thread could start.
        """
        place.lane = self._lanes.keep()
        self._lodgers[place] = 1  # this holder never leaves

    def leave(self, place: Place) -> None:
        """Release *place*'s lane, if it holds one."""
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


class _Report:
    """Transfers a result from another thread to a future of the server's loop."""

    __slots__ = ("_done", "_loop")

    def __init__(self, done: asyncio.Future[Any]) -> None:
        self._done = done
        self._loop = done.get_loop()

    def of(self, work: Callable[[], Any]) -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  # SystemExit too: an author's code never ends the server
            self._tell(None, _portable(error))
        else:
            self._tell(result)

    async def of_async(self, work: Callable[[], Awaitable[Any]]) -> None:
        try:
            result = await work()
        except asyncio.CancelledError:
            raise  # ``cancelled`` reports it, as for a cancellation before the first line
        except BaseException as error:  # noqa: BLE001  # as above
            self._tell(None, _portable(error))
        else:
            self._tell(result)

    def cancelled(self) -> None:
        self._tell(None, AuthorCancelled("cancelled"))

    def _tell(self, result: Any, error: BaseException | None = None) -> None:
        # A thread may outlive a stopped server, whose loop is then closed.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._settle, result, error)

    def _settle(self, result: Any, error: BaseException | None) -> None:
        if self._done.done():
            return
        if error is None:
            self._done.set_result(result)
        else:
            self._done.set_exception(error)


def _portable(error: BaseException) -> BaseException:
    """Return *error* in a form that a future can carry without ending or confusing a loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    return RuntimeError(describe(error)).with_traceback(error.__traceback__)

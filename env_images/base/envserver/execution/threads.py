"""Threads for authors' plain ``def`` code, which may block.

Not ``concurrent.futures``: its threads never end, hold up the interpreter's exit, and a job whose thread could not be
started raises although it stays queued. Here a thread ends when it was idle for a while, and a job waits for one of
the others where the container allows no more threads.
"""

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from envserver.errors import NoThread

logger = logging.getLogger("envserver")
IDLE_S = 10.0
"""A thread without work for this long ends; starting one takes some 0.1 ms."""


class Threads:
    """Up to *most* daemon threads, started when there is work for them. Used from the server's thread only."""

    def __init__(self, most: int, *, idle_s: float = IDLE_S) -> None:
        self._most = most
        self._idle_s = idle_s
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._alive = 0
        self._pending = 0

    def __repr__(self) -> str:
        return f"<Threads {self._alive} alive, {self._pending} jobs>"

    @property
    def alive(self) -> int:
        """Threads that exist now."""
        return self._alive

    @property
    def busy(self) -> bool:
        """Whether a job is queued or running."""
        return self._pending > 0

    def submit(self, job: Callable[[], Any]) -> None:
        """Run *job*, which raises nothing, as soon as a thread is free.

        The queue is as long as there are calls; those are bounded per session.

        Raises:
            NoThread: not one thread could be started.
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
                    # A job that was submitted since the time-out counted this thread as free to take it.
                    if self._pending < self._alive:
                        self._alive -= 1
                        return
                continue
            try:
                job()
            finally:
                del job  # it holds the session's objects
                with self._lock:
                    self._pending -= 1

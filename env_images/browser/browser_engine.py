"""One warm Chromium and the single thread that controls it.

Playwright's synchronous interface belongs to the thread that started it. Some of its calls never end when a page does
not answer. Therefore that thread receives all work with a deadline, and the engine is killed if work misses it. The
engine kills the driver. The kernel kills Chromium, which was started to end with the driver (`browser_launch`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

logger = logging.getLogger("envserver")

LAUNCHER = Path(__file__).resolve().parent / "browser_launch.py"
START_S = 40.0
FLAGS = (
    "--no-sandbox",  # see browser_launch
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-features=OverlayScrollbars,ExtendedOverlayScrollbars",  # as BrowserGym: scrollbars are in screenshots
    "--js-flags=--max-old-space-size=384",  # a page that hoards memory loses its renderer, before the container its own
    "--renderer-process-limit=4",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
)
NOT_PLAYWRIGHTS = ("--hide-scrollbars", "--disable-popup-blocking")

_Value = TypeVar("_Value")


class BrowserLost(Exception):
    """The browser or its driver ended or did not answer in time, so its pages can no longer be judged."""


class Engine:
    """A browser and its thread. It starts when created and cannot be used again once it is lost."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="browser", daemon=True)
        self._playwright: Any = None
        self._browser: Any = None
        self._driver_pid = 0
        self._lost = ""
        self._when_lost: list[Callable[[], object]] = []
        """The functions that wake each waiting `run`."""
        self._thread.start()
        self._launched = self._submit(self._launch)

    def wait_ready(self) -> Engine:
        """Wait until the browser has started; blocks for half a second.

        Raises:
            BrowserLost: The browser does not start; the message has the first lines of its log.
        """
        try:
            self._launched.result(START_S)
        except Exception as error:
            self.kill(f"it did not start: {str(error)[:2000] or type(error).__name__}")
            raise BrowserLost(self._lost) from error
        return self

    def is_lost(self) -> bool:
        """Return True if the browser was killed or has ended."""
        return bool(self._lost)

    @property
    def browser(self) -> Any:
        """Playwright's Browser, for use on the engine's thread only."""
        return self._browser

    async def run(self, work: Callable[..., _Value], *arguments: Any, timeout_s: float) -> _Value:
        """Run *work* on the engine's thread, one at a time; raise its exception here while the browser lives.

        Raises:
            BrowserLost: The browser is gone, or *work* took longer than *timeout_s*, in which case the browser is
                killed.
        """
        if self.is_lost():
            raise BrowserLost(self._lost)
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        wake = partial(loop.call_soon_threadsafe, ended.set)
        self._when_lost.append(wake)
        pending = asyncio.wrap_future(self._submit(lambda: work(*arguments)))
        watch = asyncio.ensure_future(ended.wait())
        waited: set[asyncio.Future[Any]] = {pending, watch}
        try:
            await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not pending.done():
                self.kill(f"it did not answer within {timeout_s:g} s")
            elif self.is_gone():
                self.kill("it ended")
        finally:
            watch.cancel()
            self._when_lost.remove(wake)
        if self.is_lost():
            pending.cancel()
            raise BrowserLost(self._lost)
        return pending.result()

    def is_gone(self) -> bool:
        """Return True if Chromium or the driver has ended, without a call to either."""
        return self._browser is None or not self._browser.is_connected() or not _lives(self._driver_pid)

    def kill(self, reason: str) -> None:
        """Kill driver and browser immediately, from any thread; a second call does nothing.

        The engine's thread may stay in a call that never ends, for the short rest of the process's life.
        """
        if self._lost:
            return
        self._lost = f"the browser is lost: {reason}"
        logger.warning("browser_lost reason=%s", reason.splitlines()[0] if reason else "")
        if self._driver_pid and _lives(self._driver_pid):
            os.kill(self._driver_pid, signal.SIGKILL)
        self._work.put(None)
        for wake in list(self._when_lost):
            wake()

    def _submit(self, work: Callable[[], _Value]) -> Future[_Value]:
        pending: Future[_Value] = Future()
        self._work.put((work, pending))
        return pending

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            work, pending = item
            if not pending.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001  # the waiting caller gets it; the thread serves on
                pending.set_exception(error)
            else:
                pending.set_result(result)

    def _launch(self) -> None:
        api: Any = import_module("playwright.sync_api")
        self._playwright = api.sync_playwright().start()
        self._driver_pid = self._playwright._impl_obj._connection._transport._proc.pid
        self._playwright.selectors.set_test_id_attribute("bid")  # by which BrowserGym's actions name elements
        self._browser = self._playwright.chromium.launch(
            executable_path=str(LAUNCHER),
            headless=True,
            args=list(FLAGS),
            ignore_default_args=list(NOT_PLAYWRIGHTS),
            timeout=START_S * 1000,
        )
        self._browser.on("disconnected", lambda _: self.kill("it ended"))
        threading.Thread(target=self._watch_driver, name="browser-driver", daemon=True).start()

    def _watch_driver(self) -> None:
        # Calls to an ended driver never end, and no other code reads its exit status then.
        with suppress(ChildProcessError):
            os.waitpid(self._driver_pid, 0)
        self.kill("its driver ended")


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")

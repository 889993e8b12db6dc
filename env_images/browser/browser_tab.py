"""The activity of one tab, from the browser's own events: effects of an action that are not complete yet."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

_HANDLED = """
Promise.race([new Promise(done => requestAnimationFrame(() => setTimeout(done))),
              new Promise(done => setTimeout(done, 100))])
"""
"""Code that ends after the page's next frame, or within 100 ms in a background tab, which draws no frames."""
_ENDS = {
    "Page.frameStoppedLoading": "frameId",
    "Page.frameDetached": "frameId",
    "Network.responseReceived": "requestId",  # its content follows immediately, and its end may wait for the reader
    "Network.loadingFailed": "requestId",
}
"""Events that end an activity, and the field with its id."""


class Tab:
    """The activity of a tab, from the browser's own events."""

    def __init__(self, session: Any) -> None:
        """Follow the tab whose page *session* is connected to, by the DevTools protocol."""
        self.under_way: set[str] = set()
        """Ids of frames that navigate, and of script requests that an action started."""
        self.is_acted_on = False
        """True if a request that starts now counts. Later requests do not count: a page may poll all the time."""
        self.has_begun = False
        """True if something was under way since the tab last settled."""
        self._session = session
        session.on("Page.frameRequestedNavigation", self._requested)
        session.on("Page.frameStartedNavigating", self._started)
        session.on("Page.frameNavigated", self._navigated)
        session.on("Network.requestWillBeSent", self._sent)
        for event, key in _ENDS.items():
            session.on(event, partial(self._ended, key))
        info = session.send("Target.getTargetInfo")["targetInfo"]
        self.target: str = info["targetId"]
        """The tab's target id, which is also the main frame's id."""
        self.context: str = info["browserContextId"]
        session.send("Page.enable")
        session.send("Network.enable")

    async def handled(self) -> None:
        """Wait until the page has processed its input.

        The check runs in an isolated JavaScript world, which the page's scripts cannot change.
        """
        session = self._session._impl_obj  # Playwright's asynchronous session: see Window._run_until
        world = await session.send("Page.createIsolatedWorld", {"frameId": self.target, "worldName": "settle"})
        asked = {"contextId": world["executionContextId"], "expression": _HANDLED, "awaitPromise": True}
        await session.send("Runtime.evaluate", asked)

    def _requested(self, event: Any) -> None:
        if event["disposition"] == "currentTab":
            self._begin(event["frameId"])

    def _started(self, event: Any) -> None:
        if not event["navigationType"].lower().endswith("samedocument"):
            self._begin(event["frameId"])

    def _navigated(self, event: Any) -> None:
        if event["frame"]["id"] == self.target:
            self.under_way.clear()  # its frames and requests end with its document
        self.under_way.discard(event["frame"]["id"])

    def _sent(self, event: Any) -> None:
        if self.is_acted_on and event.get("type") in ("Fetch", "XHR"):
            self._begin(event["requestId"])

    def _begin(self, what: str) -> None:
        self.has_begun = True
        self.under_way.add(what)

    def _ended(self, key: str, event: Any) -> None:
        self.under_way.discard(event[key])


async def bounded(work: Coroutine[Any, Any, object], seconds: float) -> None:
    """Run *work* for at most *seconds*, and ignore its result."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task}, timeout=max(0, seconds))
    if not task.cancel() and not task.cancelled():
        task.exception()  # of a page that is gone or has another document: it has handled its input

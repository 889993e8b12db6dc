"""What goes on in one tab, as the browser's own events tell: what an action began and has not come yet."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

_HANDLED = """
Promise.race([new Promise(done => requestAnimationFrame(() => setTimeout(done))),
              new Promise(done => setTimeout(done, 100))])
"""
"""Ends after the page's next frame; soon as well in a tab that draws none, as it is in the background."""
_ENDS = {
    "Page.frameStoppedLoading": "frameId",
    "Page.frameDetached": "frameId",
    "Network.responseReceived": "requestId",  # what is in it follows at once, and its end may wait for who reads it
    "Network.loadingFailed": "requestId",
}
"""Events, and where they have the id of what has ended."""


class Tab:
    """What goes on in a tab, as the browser's own events tell."""

    def __init__(self, session: Any) -> None:
        """*session*: of the DevTools protocol, with the tab's page."""
        self.under_way: set[str] = set()
        """Frames that navigate, and requests of scripts that an action began; by their ids."""
        self.is_acted_on = False
        """Whether a request that begins now counts. Later ones do not: a page may ask for something all the time."""
        self.has_begun = False
        """Whether something was under way since it was last settled."""
        self._session = session
        session.on("Page.frameRequestedNavigation", self._requested)
        session.on("Page.frameStartedNavigating", self._started)
        session.on("Page.frameNavigated", self._navigated)
        session.on("Network.requestWillBeSent", self._sent)
        for event, key in _ENDS.items():
            session.on(event, partial(self._ended, key))
        info = session.send("Target.getTargetInfo")["targetInfo"]
        self.target: str = info["targetId"]
        """Also the main frame's id."""
        self.context: str = info["browserContextId"]
        session.send("Page.enable")
        session.send("Network.enable")

    async def handled(self) -> None:
        """Wait until the page has handled what it was told, in a world where no script of it has changed anything."""
        session = self._session._impl_obj  # Playwright's asynchronous one: see Window._run_until
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
            self.under_way.clear()  # with its document go its frames and requests
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
    """Run *work* for *seconds* at most, whatever comes of it."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task}, timeout=max(0, seconds))
    if not task.cancel() and not task.cancelled():
        task.exception()  # of a page that is gone, or has another document already: all was handled

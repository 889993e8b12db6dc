"""One session's window: its tabs, its agent's messages and its observation. Used on the engine's thread only.

Around an action it works as BrowserGym does (`browsergym.core.env`), without the chat window and the seconds of
waiting: it follows the active tab, lets pages settle, and extracts DOM and accessibility tree.

The state after `Window.settle` decides about a task. Therefore `settle` waits for the effects of an action as long as
they take, within bounds. On a busy machine a fixed time is too short, and the reward would be for the previous page.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from browser_actions import ActionError, Actions
from browser_site import Site
from browser_tab import Tab, bounded

MAX_TABS = 8
"""The maximum number of tabs; further tabs that a page opens are closed."""
ACTION_TIMEOUT_MS = 5_000
LOAD_TIMEOUT_MS = 10_000
BEGUN_S = 8.0
"""Seconds for all effects of an action; later the window is read as it is, even pages without their documents."""
PAUSE_S = 0.02
MAX_AXTREE_CHARS, MAX_HTML_CHARS = 20_000, 40_000
MAX_URL_CHARS, MAX_TITLE_CHARS, MAX_ERROR_CHARS, MAX_MESSAGE_CHARS = 2_000, 200, 1_000, 4_000
MAX_MESSAGES = 50
EXTRACTION_TRIES = 4
IGNORED_ROLES = ("LineBreak", "InlineTextBox")
"""BrowserGym's own list, and text boxes, which repeat the line above them."""
_PASSING = (
    "Frame was detached",
    "Frame with the given frameId is not found",
    "Execution context was destroyed",
    "Frame has been detached",
    "Cannot mark a child frame without a bid",
    "Cannot read properties of undefined",
)
"""Errors of pages that change while they are read (`browsergym.core.env`)."""
_NO_DOCUMENT = ("", ":")
"""URLs of a tab without a document so far, in newer and older browsers."""
_ATTEMPT = re.compile(r"(?:attempting|retrying) [a-z ]+ action")
_INPUT = re.compile(r"performing [a-z ]+ action(?!.*intercepts pointer events)", re.DOTALL)
"""Matches the last attempt in Playwright's log of a call that timed out if the browser was given its input."""
_FOLLOW = """
(() => {
  const tell = () => { window.browsergym_page_activated(); };
  tell();
  for (const name of ["focus", "focusin", "load", "pageshow", "mousemove", "mouseup", "mousedown", "wheel", "keyup",
                      "keydown", "input"])
    window.addEventListener(name, tell, {capture: true});
  document.addEventListener("visibilitychange", () => { if (document.visibilityState === "visible") tell(); },
                            {capture: true});
})();
"""


@dataclass(frozen=True, slots=True)
class View:
    """A task's settings of its window."""

    width: int = 1024
    height: int = 640
    settle_ms: int = 150
    """Milliseconds between an action and the observation of its effects."""
    accept_dialogs: bool = False
    """True to accept alert, confirm and prompt; by default they are dismissed, as by BrowserGym."""
    cookies: Sequence[Mapping[str, Any]] = ()
    local_storage: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Local storage by origin."""
    wants_screenshot: bool = True
    wants_pixels: bool = False
    """True to add the picture to the structured observation, as in BrowserGym's typed clients; takes megabytes."""


@dataclass(frozen=True, slots=True)
class Look:
    """An observation, with every text of bounded length."""

    url: str
    titles: tuple[str, ...]
    """The titles of the tabs, in their order."""
    active: int
    axtree: str
    html: str
    screenshot: str | None
    """A PNG in base64."""


class Window:
    """A separate browser context that shares no cookie, storage or cache with another context."""

    def __init__(self, browser: Any, *, site: Site, view: View, actions: Actions, crashed: Callable[[], None]) -> None:
        """Open a window; *crashed* is called when a page's renderer has ended."""
        self.site = site
        self.messages: list[str] = []
        """The agent's messages to the user, the newest last."""
        self.gave_up = False
        """True if the agent reported the task as infeasible."""
        self._crashed = crashed
        self.last_error = ""
        self._view = view
        self._actions = actions
        self._history: dict[Any, None] = {}
        self._browser: Any = browser.new_browser_cdp_session()
        self._tabs: dict[Any, Tab] = {}
        """The tabs by their pages."""
        self._given_up: set[str] = set()
        """Targets of tabs that never loaded."""
        self._unloaded: set[Any] = set()
        """Frames that no longer are waited for, until they have another document."""
        self._deadline = math.inf
        self.context: Any = browser.new_context(
            viewport={"width": view.width, "height": view.height},
            accept_downloads=False,
            service_workers="block",
            storage_state=_storage(view),
            locale="en-US",
            timezone_id="UTC",
        )
        self.context.set_default_timeout(ACTION_TIMEOUT_MS)
        self.context.set_default_navigation_timeout(LOAD_TIMEOUT_MS)
        self.context.expose_binding("browsergym_page_activated", lambda source: self._activate(source["page"]))
        self.context.add_init_script(_FOLLOW)
        self.context.on("page", self._opened)
        self.context.route("**/*", self.site.answer)
        self.page: Any = self.context.new_page()
        """The active tab."""
        self._acting: Any = self.page
        """The tab of the last action."""

    def close(self) -> None:
        self.context.close()
        self._browser.detach()

    def act(self, text: str, *, within_s: float) -> str:
        """Carry out an action and let the pages settle; return the action's fault, or an empty text.

        *within_s* is the maximum time in seconds that this call and the observation afterwards wait for pages.
        """
        self._deadline = time.monotonic() + within_s
        self._acting = self.page
        for tab in self._tabs.values():
            tab.is_acted_on = True
        self.last_error = code = ""
        try:
            code = self._actions.code_of(
                text, may_open=self.site.may_open, bid_of=self._bid_of, deadline=self._deadline
            )
            self._actions.execute(code, self.page, tell=self._tell, give_up=self._give_up)
        except ActionError as error:
            self.last_error = str(error)
        except Exception as error:  # noqa: BLE001  # errors of Playwright and of the functions: the agent reads them
            if not _was_carried_out(error, code):
                self.last_error = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        self.settle()
        return self.last_error

    def _bid_of(self, selector: str) -> str:
        try:
            found = self.page.query_selector(f"css={selector}")
        except _playwright_error() as error:
            raise ActionError(f"{selector!r:.100} is not a CSS selector: {str(error)[:200]}") from None
        bid = found.get_attribute("bid") if found is not None else None
        if bid is None or not (bid.isascii() and bid.isalnum()):  # a page's script may have written another value
            raise ActionError(f"there is no element {selector!r:.100} on the page that was last seen")
        return str(bid)

    def settle(self) -> None:
        """Let the effects of an action come to rest, within bounds, and find the active tab.

        This takes the view's ``settle_ms``, for effects without an event. It takes up to `BEGUN_S` more while something
        is under way: input that the page has not handled, a tab that is not loaded yet, a page without its document, or
        a script's request without its response.
        """
        now = time.monotonic()
        deadline = min(now + self._view.settle_ms / 1000 + BEGUN_S, self._deadline)
        rests_at = min(now + self._view.settle_ms / 1000, deadline)
        self._follow_tabs()
        self._let_handle(deadline)  # first, because afterwards the browser knows what the input started
        while (left := rests_at - time.monotonic()) > 0:
            self._run_until(deadline, asyncio.sleep(min(left, PAUSE_S)))
        for tab in self._tabs.values():
            tab.is_acted_on = False
        while self._has_more(deadline):
            if time.monotonic() >= deadline:
                self._give_up_waiting()
                break
            self._run_until(deadline, asyncio.sleep(PAUSE_S))
        for page in self.context.pages:
            for frame in page.frames:
                if frame.parent_frame is not None and not frame.is_detached() and is_refused(frame.url):
                    frame.frame_element().evaluate("frame => { frame.src = 'about:blank'; }")
        self._find_active()

    def _let_handle(self, deadline: float) -> None:
        """Wait until the tab of the last action has handled its input."""
        if (tab := self._tabs.get(self._acting)) is not None:
            self._run_until(deadline, tab.handled())

    def _has_more(self, deadline: float) -> bool:
        """Return True to keep waiting. When effects are complete, the tab must handle them too."""
        if self._is_under_way(deadline):
            return True
        if not any(tab.has_begun for tab in self._tabs.values()):
            return False
        for tab in self._tabs.values():
            tab.has_begun = False
        self._let_handle(deadline)
        return self._is_under_way(deadline)

    def _is_under_way(self, deadline: float) -> bool:
        """Return True if something is still under way, after the existing pages have their documents."""
        for page in self.context.pages[MAX_TABS:]:
            page.close()
        self._follow_tabs()
        for page in self.context.pages:
            for frame in page.frames:
                if frame not in self._unloaded and not _is_loaded(frame, deadline):
                    self._unloaded.add(frame)
        return bool(self._missing()) or any(tab.under_way for tab in self._tabs.values())

    def _missing(self) -> set[str]:
        """Return the targets of tabs that the browser has started and that never had a document.

        Playwright reports only some of these tabs, which depends on the time of its request to the browser.
        """
        infos = self._browser.send("Target.getTargets")["targetInfos"]
        contexts = {tab.context for tab in self._tabs.values()}
        begun = {info["targetId"] for info in infos if info["type"] == "page" and info["browserContextId"] in contexts}
        return begun - {tab.target for page, tab in self._tabs.items() if page.url not in _NO_DOCUMENT} - self._given_up

    def _give_up_waiting(self) -> None:
        """Forget late effects, and close tabs without a page, such as ``mailto:``, which never load."""
        missing = self._missing()
        self._given_up |= missing
        for page, tab in list(self._tabs.items()):
            if tab.target in missing:
                page.close()
        for target in missing - {tab.target for tab in self._tabs.values()}:
            self._browser.send("Target.closeTarget", {"targetId": target})
        for tab in self._tabs.values():
            tab.under_way.clear()
            tab.has_begun = False

    def _follow_tabs(self) -> None:
        pages = self.context.pages
        self._tabs = {page: tab for page, tab in self._tabs.items() if page in pages}
        for page in pages:
            if page not in self._tabs:
                with suppress(_playwright_error()):  # it was closed meanwhile
                    self._tabs[page] = Tab(self.context.new_cdp_session(page))

    def _run_until(self, deadline: float, work: Coroutine[Any, Any, object]) -> None:
        """Run *work* on Playwright's loop, which also handles events: routes, dialogs, new tabs.

        Playwright's own calls have no deadline if a page never answers. Work that is not done by *deadline* is
        abandoned.
        """
        self.context._sync(bounded(work, deadline - time.monotonic()))

    def look(self) -> Look:
        """Return the observation of the active tab for the agent."""
        dom, axtree, properties = self._extracted()
        written: Any = import_module("browsergym.utils.obs")
        pages = self.context.pages
        return Look(
            url=self.page.url[:MAX_URL_CHARS],
            titles=tuple(page.title()[:MAX_TITLE_CHARS] for page in pages[:MAX_TABS]),
            active=pages.index(self.page),
            axtree=clipped(
                written.flatten_axtree_to_str(axtree, properties, ignored_roles=list(IGNORED_ROLES)), MAX_AXTREE_CHARS
            ),
            html=clipped(written.prune_html(written.flatten_dom_to_str(dom, properties)), MAX_HTML_CHARS),
            screenshot=self._screenshot() if self._view.wants_screenshot else None,
        )

    def _extracted(self) -> tuple[Any, Any, Any]:
        observation: Any = import_module("browsergym.core.observation")
        scale = getattr(self.page, "_bgym_scale_factor", 1.0)
        for left in reversed(range(EXTRACTION_TRIES)):
            try:
                observation._pre_extract(self.page, tags_to_mark="standard_html", lenient=left == 0)
                dom = observation.extract_dom_snapshot(self.page)
                axtree = observation.extract_merged_axtree(self.page)
                properties = observation.extract_dom_extra_properties(dom, scale_factor=scale)
            except Exception as error:
                if left == 0 or not any(text in str(error) for text in _PASSING):
                    raise
                observation._post_extract(self.page)
                self.settle()
            else:
                break
        observation._post_extract(self.page)
        return dom, axtree, properties

    def _screenshot(self) -> str:
        """Take a picture in the scale of the actions' coordinates, as `browsergym.core.observation` does."""
        scale = getattr(self.page, "_bgym_scale_factor", 1.0)
        size = {"width": self._view.width, "height": self._view.height, "mobile": False}
        session = self.context.new_cdp_session(self.page)
        try:
            if scale != 1.0:
                session.send("Emulation.setDeviceMetricsOverride", {**size, "deviceScaleFactor": scale})
            taken = session.send("Page.captureScreenshot", {"format": "png", "optimizeForSpeed": False})
            if scale != 1.0:
                session.send("Emulation.setDeviceMetricsOverride", {**size, "deviceScaleFactor": 1.0})
        finally:
            session.detach()
        return str(taken["data"])

    def _tell(self, text: object) -> None:
        if not isinstance(text, str):
            raise ActionError("send_msg_to_user takes a text")
        self.messages = [*self.messages[1 - MAX_MESSAGES :], text[:MAX_MESSAGE_CHARS]]

    def _give_up(self, reason: object) -> None:
        self.gave_up = True

    def _opened(self, page: Any) -> None:
        page.on("crash", lambda _: self._crashed())
        page.on("dialog", self._answer)
        page.on("framenavigated", lambda frame: self._unloaded.discard(frame))  # Playwright marks its handlers

    def _answer(self, dialog: Any) -> None:
        finish: Callable[[], None] = dialog.accept if self._view.accept_dialogs else dialog.dismiss
        finish()

    def _activate(self, page: Any) -> None:
        self._history.pop(page, None)
        self._history[page] = None
        self.page = page

    def _find_active(self) -> None:
        if not self.context.pages:
            self.page = self.context.new_page()
        while self._history and (self.page.is_closed() or self.page not in self.context.pages):
            self._history.pop(self.page, None)
            self.page = next(reversed(self._history), self.context.pages[-1])
        if self.page not in self.context.pages:
            self.page = self.context.pages[-1]


def is_refused(url: str) -> bool:
    """Return True if a frame shows the browser's own error, as with ``file:``: reading such a frame never ends."""
    return not url or url.startswith("chrome-error:")


def clipped(text: str, most: int) -> str:
    """Cut *text* to *most* characters, with a note about the cut."""
    if len(text) <= most:
        return text
    note = f"\n[cut after {most} characters]"
    return text[: most - len(note)] + note


def _playwright_error() -> type[Exception]:
    api: Any = import_module("playwright.sync_api")
    error: type[Exception] = api.Error
    return error


def _is_loaded(frame: Any, deadline: float) -> bool:
    """Wait for a frame's document; a removed frame, or a failed first navigation, has no document to wait for."""
    if is_refused(frame.url) or frame.url == ":":
        return True
    try:
        frame.wait_for_load_state("domcontentloaded", timeout=max(1, (deadline - time.monotonic()) * 1000))
    except _playwright_error():
        return bool(frame.is_detached())
    return True


def _was_carried_out(error: Exception, code: str) -> bool:
    """Return True if *error* only concerns the effects of the last call of *code*, which `settle` waits for."""
    if type(error).__name__ != "TimeoutError":
        return False
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>"]
    return lines == [len(code.rstrip().splitlines())] and _INPUT.search(_ATTEMPT.split(str(error))[-1]) is not None


def _storage(view: View) -> dict[str, Any]:
    return {
        "cookies": [dict(cookie) for cookie in view.cookies],
        "origins": [
            {"origin": origin, "localStorage": [{"name": name, "value": value} for name, value in values.items()]}
            for origin, values in view.local_storage.items()
        ],
    }

"""One session's window: its tabs, what its agent said, and what can be seen. On the engine's thread only.

What it does around an action is BrowserGym's way (`browsergym.core.env`), without its chat window and its seconds of
waiting: follow which tab is active, let pages settle, extract DOM and accessibility tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from browser_actions import ActionError, Actions
from browser_site import Site

MAX_TABS = 8
"""What a page opens beyond is closed again."""
ACTION_TIMEOUT_MS = 5_000
LOAD_TIMEOUT_MS = 10_000
LOADED_MS = 1_500
"""A page or frame that has not its document by then is looked at as it is."""
MAX_AXTREE_CHARS, MAX_HTML_CHARS = 20_000, 40_000
MAX_URL_CHARS, MAX_TITLE_CHARS, MAX_ERROR_CHARS, MAX_MESSAGE_CHARS = 2_000, 200, 1_000, 4_000
MAX_MESSAGES = 50
EXTRACTION_TRIES = 4
IGNORED_ROLES = ("LineBreak", "InlineTextBox")
"""BrowserGym's own list, and boxes of text: they say again what the line above says."""
_PASSING = (
    "Frame was detached",
    "Frame with the given frameId is not found",
    "Execution context was destroyed",
    "Frame has been detached",
    "Cannot mark a child frame without a bid",
    "Cannot read properties of undefined",
)
"""Of pages that change while they are looked at (`browsergym.core.env`)."""
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
    """How a task wants its window."""

    width: int = 1024
    height: int = 640
    settle_ms: int = 150
    """From an action to the look at what came of it."""
    accept_dialogs: bool = False
    """What becomes of alert, confirm and prompt; they are dismissed by default, as by BrowserGym."""
    cookies: Sequence[Mapping[str, Any]] = ()
    local_storage: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By origin."""
    wants_screenshot: bool = True


@dataclass(frozen=True, slots=True)
class Look:
    """What is to be seen: every text of bounded length."""

    url: str
    titles: tuple[str, ...]
    """Of the tabs, in their order."""
    active: int
    axtree: str
    html: str
    screenshot: str | None
    """A PNG, as base64."""


class Window:
    """A browser context of its own: no cookie, storage or cache is shared with any other."""

    def __init__(self, browser: Any, *, site: Site, view: View, actions: Actions, crashed: Callable[[], None]) -> None:
        """*crashed* is called when a page's renderer has ended."""
        self.site = site
        self.messages: list[str] = []
        """What the agent sent to the user, the newest last."""
        self.gave_up = False
        """The agent reported the task as infeasible."""
        self._crashed = crashed
        self.last_error = ""
        self._view = view
        self._actions = actions
        self._history: dict[Any, None] = {}
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

    def close(self) -> None:
        self.context.close()

    def act(self, text: str) -> str:
        """Carry an action out and let the pages settle; gives what is wrong with it, or an empty text."""
        self.last_error = ""
        try:
            code = self._actions.code_of(text, may_open=self.site.may_open, bid_of=self._bid_of)
            self._actions.execute(code, self.page, tell=self._tell, give_up=self._give_up)
        except ActionError as error:
            self.last_error = str(error)
        except Exception as error:  # noqa: BLE001  # Playwright's and the functions' own: the agent reads it
            self.last_error = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        self.settle()
        return self.last_error

    def _bid_of(self, selector: str) -> str:
        api: Any = import_module("playwright.sync_api")
        try:
            found = self.page.query_selector(f"css={selector}")
        except api.Error as error:
            raise ActionError(f"{selector!r:.100} is no CSS selector: {str(error)[:200]}") from None
        bid = found.get_attribute("bid") if found is not None else None
        if bid is None or not (bid.isascii() and bid.isalnum()):  # a page's script may have written another one
            raise ActionError(f"there is no element {selector!r:.100} on the page that was last seen")
        return str(bid)

    def settle(self) -> None:
        """Let what was begun come to rest, within bounds, and see which tab is active now."""
        deadline = time.monotonic() + self._view.settle_ms / 1000
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))
            self.context.cookies()  # a call, so that Playwright handles what came in: routes, new tabs
        for page in list(self.context.pages):
            for frame in list(page.frames):
                _wait_loaded(frame)
                if frame.parent_frame is not None and not frame.is_detached() and is_refused(frame.url):
                    frame.frame_element().evaluate("frame => { frame.src = 'about:blank'; }")
        for page in self.context.pages[MAX_TABS:]:
            page.close()
        self._find_active()

    def look(self) -> Look:
        """Extract what the agent is shown of the active tab."""
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
        """Take a picture in the scale that coordinates of actions are in, as `browsergym.core.observation` does."""
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
    """Whether a frame has an error of the browser's own in it, as with ``file:``: a look into one never ends."""
    return not url or url.startswith("chrome-error:")


def clipped(text: str, most: int) -> str:
    """Cut *text* to *most* characters, and say so in it."""
    if len(text) <= most:
        return text
    note = f"\n[cut after {most} characters]"
    return text[: most - len(note)] + note


def _wait_loaded(frame: Any) -> None:
    api: Any = import_module("playwright.sync_api")
    try:
        frame.wait_for_load_state("domcontentloaded", timeout=LOADED_MS)
    except api.Error:
        return  # looked at as it is


def _storage(view: View) -> dict[str, Any]:
    return {
        "cookies": [dict(cookie) for cookie in view.cookies],
        "origins": [
            {"origin": origin, "localStorage": [{"name": name, "value": value} for name, value in values.items()]}
            for origin, values in view.local_storage.items()
        ],
    }

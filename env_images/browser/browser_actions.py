"""Actions: BrowserGym's strings, such as ``click('12')``, read strictly and turned into calls of its own functions.

Differences from BrowserGym: an element's bid may be replaced by a CSS selector, ``click('#login-button')``, which means
the first matching element. A call waits longer for its element, so a busy machine slows steps and does not reduce
rewards. The functions that give server files to a page (``upload_file``, ``mouse_upload_file``) are not offered. Calls
that would wait without end or leave the task's pages are refused before any call runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

MAX_ACTION_CHARS = 8_000
MAX_CALLS = 10
"""The maximum number of calls in an action; BrowserGym advises two or three."""
CALL_MS = 5_000
"""Milliseconds for a call to find its element ready and to give it the input, unless the step has less time left."""
MAX_WAIT_MS = 5_000
"""The maximum milliseconds of all ``noop`` calls in one action."""
MAX_TYPED_CHARS = 1_000
"""The maximum of all ``keyboard_type`` calls in one action: a key takes some milliseconds. ``fill`` is immediate."""
MAX_NUMBER = 1_000_000
"""The largest number in an action. Chromium does not answer for a click at 1e308, and the session would be lost."""
OFFERED = (
    *("noop", "click", "dblclick", "hover", "fill", "press", "focus", "clear", "select_option", "drag_and_drop"),
    *("scroll", "goto", "go_back", "go_forward", "new_tab", "tab_close", "tab_focus", "send_msg_to_user"),
    *("report_infeasible", "scroll_at", "mouse_move", "mouse_up", "mouse_down", "mouse_click", "mouse_dblclick"),
    *("mouse_drag_and_drop", "keyboard_down", "keyboard_up", "keyboard_press", "keyboard_type"),
    "keyboard_insert_text",
)
"""The names of the offered BrowserGym functions."""

_SELECTORS = ("#", ".", "[")
"""The first characters of CSS selectors; no bid starts with them."""
_BIDS: dict[str, tuple[str | int, ...]] = {
    **dict.fromkeys(("click", "dblclick", "hover", "fill", "press", "focus", "clear", "select_option"), (0, "bid")),
    "drag_and_drop": (0, 1, "from_bid", "to_bid"),
}
"""The arguments that are bids, by position and by name."""

_THEIR_TIMEOUT = "timeout=500"
"""The timeout in the source of BrowserGym's functions."""
_OUR_TIMEOUT = "timeout=milliseconds_left()"
_MILLISECONDS_LEFT = f"""
import time

def milliseconds_left():
    return max(1.0, min({CALL_MS}.0, (DEADLINE - time.monotonic()) * 1000))

"""
"""Code before BrowserGym's functions. Each action's own code defines `DEADLINE` before it."""

_FENCE = re.compile(r"\s*```[\w-]*[ \t]*\n(?P<code>.*?)\n?[ \t]*```\s*", re.DOTALL)


class ActionError(Exception):
    """An action that is not carried out; the agent reads the text."""


def unfenced(text: str) -> str:
    """Return an action without the code fence around it, if there is one."""
    if len(text) > 2 * MAX_ACTION_CHARS:  # too long with or without a fence, and the pattern's time is quadratic
        return text.strip()
    found = _FENCE.fullmatch(text)
    return (found["code"] if found else text).strip()


class Actions:
    """BrowserGym's high-level action set, restricted to the functions that this environment offers."""

    def __init__(self) -> None:
        action: Any = import_module("browsergym.core.action.base")
        functions: Any = import_module("browsergym.core.action.functions")
        highlevel: Any = import_module("browsergym.core.action.highlevel")
        self._execute: Callable[..., None] = action.execute_python_code
        self._parser: Any = import_module("browsergym.core.action.parsers").highlevel_action_parser
        self._set: Any = highlevel.HighLevelActionSet(
            subsets=["custom"],
            custom_actions=[getattr(functions, name) for name in OFFERED],
            multiaction=True,
            strict=True,
            demo_mode="off",
        )
        functions_code: str = self._set.python_includes
        if _THEIR_TIMEOUT not in functions_code:
            raise RuntimeError(f"BrowserGym's functions have no {_THEIR_TIMEOUT} any more")
        self._set.python_includes = _MILLISECONDS_LEFT + functions_code.replace(_THEIR_TIMEOUT, _OUR_TIMEOUT)

    def describe(self) -> str:
        """Return the signatures of the actions, one per line."""
        return "\n".join(action.signature.replace("typing.", "") for action in self._set.action_set.values())

    def code_of(
        self,
        text: str,
        *,
        may_open: Callable[[str], bool],
        bid_of: Callable[[str], str],
        deadline: float,
    ) -> str:
        """Return the Python code that BrowserGym makes from *text*: function definitions and calls of them.

        Args:
            may_open: Returns True if ``goto`` may open a URL.
            bid_of: Returns the bid of the element that a selector means; raises ``ActionError`` if there is no element.
            deadline: The time on the clock ``time.monotonic`` after which no call waits for its element.

        Raises:
            ActionError: The text is not an action, or the action is refused.
        """
        if not text or len(text) > MAX_ACTION_CHARS:
            raise ActionError(f"an action has 1 to {MAX_ACTION_CHARS} characters, and this one has {len(text)}")
        try:
            calls = self._parser.parse_string(text, parse_all=True).as_list()
        except Exception as error:  # noqa: BLE001  # pyparsing's errors, and errors of literals in the text
            raise ActionError(f"this is not an action: {str(error)[:300]}") from None
        if len(calls) > MAX_CALLS:
            raise ActionError(f"an action has at most {MAX_CALLS} calls")
        waited, typed = 0.0, 0
        for name, arguments in calls:
            if name not in self._set.action_set:
                raise ActionError(f"there is no action {name!r:.60}; there are {', '.join(self._set.action_set)}")
            values = {
                getattr(given, "name", place): getattr(given, "value", given) for place, given in enumerate(arguments)
            }
            for value in values.values():
                if isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
                    raise ActionError(f"numbers are from -{MAX_NUMBER} to {MAX_NUMBER}, not {value!r:.40}")
            if name == "noop":
                waited += _waiting_ms(values.get(0, values.get("wait_ms", 1000)))
            if name == "keyboard_type":
                typed += len(str(values.get(0, values.get("text", ""))))
            if name == "goto":
                _check_url(values.get(0, values.get("url")), may_open)
        if waited > MAX_WAIT_MS:
            raise ActionError(f"an action waits at most {MAX_WAIT_MS} ms")
        if typed > MAX_TYPED_CHARS:
            raise ActionError(f"an action types at most {MAX_TYPED_CHARS} characters; fill() takes more at once")
        return f"DEADLINE = {deadline!r}\n{self._set.to_python_code(_with_bids(text, calls, bid_of))}"

    def execute(self, code: str, page: Any, *, tell: Callable[[str], None], give_up: Callable[[str], None]) -> None:
        """Run the code from `code_of` on the engine's thread; raise the errors of the page and of Playwright."""
        self._execute(code, page, send_message_to_user=tell, report_infeasible_instructions=give_up)


def _with_bids(text: str, calls: list[Any], bid_of: Callable[[str], str]) -> str:
    """Return the action with bids instead of selectors, or unchanged if it has no selector."""
    written, has_selector = [], False
    for name, arguments in calls:
        parts = []
        for place, given in enumerate(arguments):
            key, value = getattr(given, "name", None), getattr(given, "value", given)
            if isinstance(value, str) and value.startswith(_SELECTORS) and (key or place) in _BIDS.get(name, ()):
                value, has_selector = bid_of(value), True
            parts.append(repr(value) if key is None else f"{key}={value!r}")
        written.append(f"{name}({', '.join(parts)})")
    return "\n".join(written) if has_selector else text


def _waiting_ms(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_WAIT_MS:
        raise ActionError(f"noop waits from 0 to {MAX_WAIT_MS} ms")
    return float(value)


def _check_url(url: object, may_open: Callable[[str], bool]) -> None:
    if not isinstance(url, str) or not may_open(url):
        raise ActionError(f"goto opens the pages of this task only, not {url!r:.200}")

"""The conditions of declarative tasks: named functions of a window's state, and combinations of them.

All values are read from the server's side: from the browser's own records, or by Playwright's selectors. These run in
their own world, which no script of a page reaches. A page is the truth about itself and cannot misreport its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from envserver.generic import REWARDS, RewardCall, parse_reward, reward_function

MAX_SELECTOR_CHARS = 500
MAX_CONDITIONS = 50
MAX_DEPTH = 5
READ_MS = 1_000
"""Milliseconds for one read of an element."""
TEXT_CHARS = 100_000


class InvalidCondition(ValueError):
    """A condition that cannot be judged; *path* names the place."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


def _check_selector(selector: str, *more: object, **named: object) -> None:
    if not selector.strip() or len(selector) > MAX_SELECTOR_CHARS:
        raise ValueError(f"a selector has 1 to {MAX_SELECTOR_CHARS} characters")


@reward_function("check_url_contains")
def check_url_contains(window: Any, part: str) -> float:
    """Return 1 if the path of the active tab's address contains *part*; see `_address_contains`."""
    return float(_address_contains(window, window.page.url, part))


@reward_function("check_url_equals")
def check_url_equals(window: Any, url: str) -> float:
    """Return 1 if the active tab's address is *url*; a path means a page of the task."""
    return float(window.page.url == window.site.url(url) and window.site.has_opened(window.page.url))


@reward_function("page_title_contains")
def page_title_contains(window: Any, part: str) -> float:
    """Return 1 if the active tab's title contains *part*."""
    return float(part in window.page.title())


@reward_function("tab_count")
def tab_count(window: Any, number: int) -> float:
    """Return 1 if there are *number* tabs."""
    return float(len(window.context.pages) == number)


@reward_function("tab_url_contains")
def tab_url_contains(window: Any, part: str) -> float:
    """Return 1 if the path of any tab's address contains *part*; see `_address_contains`."""
    return float(any(_address_contains(window, page.url, part) for page in window.context.pages))


@reward_function("element_present", check=_check_selector)
def element_present(window: Any, selector: str) -> float:
    """Return 1 if the active tab has a visible element that matches *selector* (CSS)."""
    return float(_elements(window, selector).locator("visible=true").count() > 0)


@reward_function("element_count", check=_check_selector)
def element_count(window: Any, selector: str, number: int) -> float:
    """Return 1 if the active tab has *number* elements that match *selector*."""
    return float(_elements(window, selector).count() == number)


@reward_function("element_text_equals", check=_check_selector)
def element_text_equals(window: Any, selector: str, text: str) -> float:
    """Return 1 if the first matching element's text is *text*; runs of white space count as one space."""
    return float(_text(window, selector) == " ".join(text.split()))


@reward_function("element_text_contains", check=_check_selector)
def element_text_contains(window: Any, selector: str, part: str) -> float:
    """Return 1 if the first matching element's text contains *part*."""
    found = _text(window, selector)
    return float(found is not None and " ".join(part.split()) in found)


@reward_function("input_value_equals", check=_check_selector)
def input_value_equals(window: Any, selector: str, value: str) -> float:
    """Return 1 if the first matching input, text area or select has *value*."""
    found = _elements(window, selector)
    return float(found.count() > 0 and found.first.input_value(timeout=READ_MS) == value)


@reward_function("checkbox_checked", check=_check_selector)
def checkbox_checked(window: Any, selector: str, checked: bool = True) -> float:
    """Return 1 if the first matching checkbox or radio button is checked, or is not checked."""
    found = _elements(window, selector)
    return float(found.count() > 0 and found.first.is_checked(timeout=READ_MS) is checked)


@reward_function("local_storage_equals")
def local_storage_equals(window: Any, key: str, value: str) -> float:
    """Return 1 if the local storage of the active tab's origin holds *value* under *key*."""
    session = window.context.new_cdp_session(window.page)
    try:
        frame = session.send("Page.getFrameTree")["frameTree"]["frame"]["id"]
        storage = session.send("Storage.getStorageKeyForFrame", {"frameId": frame})["storageKey"]
        of = {"storageId": {"storageKey": storage, "isLocalStorage": True}}
        entries = session.send("DOMStorage.getDOMStorageItems", of)["entries"]
    finally:
        session.detach()
    return float([key, value] in entries)


@reward_function("cookie_equals")
def cookie_equals(window: Any, name: str, value: str) -> float:
    """Return 1 if the active tab's address has the cookie *name* with *value*."""
    cookies = window.context.cookies([window.page.url]) if window.page.url.startswith("http") else []
    return float(any(cookie["name"] == name and cookie["value"] == value for cookie in cookies))


PAGE_REWARDS = frozenset(name for name, entry in REWARDS.items() if entry.function.__module__ == __name__)
"""The names of the functions above; all other functions judge the agent's last message to the user."""


def _address_contains(window: Any, url: str, part: str) -> bool:
    """Return True if the path of *url* contains *part*, and its page exists.

    An agent can open any address of the task's site. So the query counts only if *part* has a ``?``, the fragment only
    if it has a ``#``, and scheme and host only if it has a ``://``.
    """
    whole = urlsplit(url)
    counted = urlunsplit(
        (
            whole.scheme if "://" in part else "",
            whole.netloc if "://" in part else "",
            whole.path,
            whole.query if "?" in part else "",
            whole.fragment if "#" in part else "",
        )
    )
    return (part in counted or part in unquote(counted)) and bool(window.site.has_opened(url))


def _elements(window: Any, selector: str) -> Any:
    return window.page.locator(f"css={selector}")


def _text(window: Any, selector: str) -> str | None:
    found = _elements(window, selector)
    if found.count() == 0:
        return None
    return " ".join(found.first.inner_text(timeout=READ_MS)[:TEXT_CHARS].split())


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition on a window, or a combination of conditions, with its *weight* among its neighbors."""

    kind: Literal["call", "all", "any", "not"]
    call: RewardCall | None = None
    parts: tuple[Condition, ...] = ()
    is_partial: bool = False
    """For ``all``: True for the share of conditions that hold, instead of all or nothing."""
    weight: float = 1.0

    def score(self, window: Any) -> float:
        """Return the score of *window*, in [0, 1].

        Raises:
            RewardError: A function broke, so there is no score.
        """
        if self.call is not None:
            if self.call.name in PAGE_REWARDS:
                return self.call(window)
            return self.call(window.messages[-1]) if window.messages else 0.0
        scores = [part.score(window) for part in self.parts]
        if self.kind == "not":
            return 1.0 - scores[0]
        if self.kind == "any":
            return max(scores)
        if not self.is_partial:
            return min(scores)
        weights = [part.weight for part in self.parts]
        return sum(score * weight for score, weight in zip(scores, weights, strict=True)) / sum(weights)

    def asks_for_message(self) -> bool:
        """Return True if the score depends on the agent's messages."""
        if self.call is not None:
            return self.call.name not in PAGE_REWARDS
        return any(part.asks_for_message() for part in self.parts)


def read_condition(given: object, path: str, *, depth: int = 0) -> Condition:
    """Read a condition: a call as text, or an object with one of ``reward_function``, ``all``, ``any`` and ``not``.

    Raises:
        InvalidCondition: The value is something else; the error has the path of the fault.
    """
    if isinstance(given, str):
        return Condition("call", call=_read_call(given, path))
    if not isinstance(given, Mapping):
        raise InvalidCondition(path, "must be a text such as element_present('#done'), or an object")
    kinds = [key for key in ("reward_function", "all", "any", "not") if key in given]
    if len(kinds) != 1:
        raise InvalidCondition(path, "must have exactly one of reward_function, all, any and not")
    kind = kinds[0]
    weight = given.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 1_000:
        raise InvalidCondition(f"{path}.weight", "must be a number above 0, at most 1000")
    is_partial = given.get("partial", False)
    if not isinstance(is_partial, bool) or (is_partial and kind != "all"):
        raise InvalidCondition(f"{path}.partial", "must be true or false, and needs all beside it")
    if kind == "reward_function":
        named = {key: value for key, value in given.items() if key not in ("reward_function", "weight", "partial")}
        return Condition("call", call=_read_call(given[kind], f"{path}.{kind}", named), weight=weight)
    if further := given.keys() - {kind, "weight", "partial"}:
        raise InvalidCondition(f"{path}.{min(further)}", "no such key")
    if depth >= MAX_DEPTH:
        raise InvalidCondition(path, f"nested more than {MAX_DEPTH} deep")
    if kind == "not":
        return Condition("not", parts=(read_condition(given[kind], f"{path}.not", depth=depth + 1),), weight=weight)
    items = given[kind]
    if not isinstance(items, list | tuple) or not 1 <= len(items) <= MAX_CONDITIONS:
        raise InvalidCondition(f"{path}.{kind}", f"must be a list of 1 to {MAX_CONDITIONS} conditions")
    parts = tuple(read_condition(item, f"{path}.{kind}[{place}]", depth=depth + 1) for place, item in enumerate(items))
    return Condition("all" if kind == "all" else "any", parts=parts, is_partial=is_partial, weight=weight)


def _read_call(text: object, path: str, named: Mapping[str, Any] | None = None) -> RewardCall:
    try:
        call = parse_reward(text)
        whole = RewardCall(call.name, call.args, {**call.kwargs, **(named or {})})
        whole.check()
    except ValueError as error:
        raise InvalidCondition(path, str(error)) from None
    return whole

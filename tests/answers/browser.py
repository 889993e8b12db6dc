"""The groups of `browser`, by the condition that judges, on a stand-in for the window: scripts need Chromium.

A task of several conditions has an item for each, for which the other conditions hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from tests.answers import operators
from tests.answers.generic import NEAR_PARTS, WORDS
from tests.answers.groups import Group, Item, bundled, module
from tests.answers.operators import Operator

ADDRESSES: Final[Mapping[str, Operator]] = {
    "as it is": lambda url: url,
    "a query": lambda url: f"{url}?from=mail",
    "a fragment": lambda url: f"{url}#top",
    "both": lambda url: f"{url}?from=mail#top",
}
"""Other addresses of a page, by which its path does not change."""


def _of_site(change: Callable[[str, str], str]) -> Operator:
    """Return an operator that gets the origin and the path of an address."""

    def changed(url: str) -> str:
        origin, slashes, rest = url.partition("//")
        host, _, path = rest.partition("/")
        return change(f"{origin}{slashes}{host}", path)

    return changed


NEAR_ADDRESSES: Final[Mapping[str, Operator]] = {
    "as a fragment": _of_site(lambda origin, path: f"{origin}/#{path}"),
    "as a query": _of_site(lambda origin, path: f"{origin}/?{path}"),
    "as a host": _of_site(lambda origin, path: f"http://{path.replace('/', '.')}.test/"),
    "on another host": _of_site(lambda origin, path: f"http://other.test/{path}"),
    "a letter more": lambda url: f"{url}s",
    "a letter dropped": lambda url: url[:-1],
    "a page below": lambda url: f"{url}/more",
    "within another folder": _of_site(lambda origin, path: f"{origin}/my/{path}"),
}
"""Other addresses that have the text of a page's address, or nearly."""
SHARES: Final[Mapping[str, Operator]] = {
    name: lambda _, share=share: share  # type: ignore[misc]  # mypy infers no lambda with a default
    for name, share in {"almost all": "0.99", "a half": "0.5", "a tenth": "0.1", "the opposite": "-1.0"}.items()
}
COUNTS: Final[Mapping[str, Operator]] = {
    "one more": lambda text: str(int(text) + 1),
    "one less": lambda text: str(int(text) - 1) if int(text) else None,
    "ten times": lambda text: f"{text}0" if int(text) else None,
}
_PLAIN: Final[Mapping[str, Operator]] = {"as it is": lambda text: text}
_EXACT: Final = (operators.NEAR_TEXTS, operators.NEAR_WORDS)
CONDITIONS: Final[Mapping[str, Group]] = {
    "check_url_contains": Group("", [], (ADDRESSES,), (NEAR_ADDRESSES,)),
    "tab_url_contains": Group("", [], (ADDRESSES,), (NEAR_ADDRESSES,)),
    "check_url_equals": Group(
        "", [], (_PLAIN,), (NEAR_ADDRESSES, {n: ADDRESSES[n] for n in ("a query", "a fragment")})
    ),
    "element_text_equals": Group("", [], (operators.TEXTS, WORDS), _EXACT, (operators.NEAR_NUMBERS,)),
    "local_storage_equals": Group("", [], (_PLAIN,), _EXACT),
    "cookie_equals": Group("", [], (_PLAIN,), _EXACT),
    "element_count": Group("", [], (_PLAIN,), (COUNTS,)),
    "tab_count": Group("", [], (_PLAIN,), ({"one more": COUNTS["one more"]},)),
    "element_present": Group("", [], (_PLAIN,), ({"not there": lambda _: "0"},)),
    "numeric_match": Group(
        "", [], (operators.MARKS, operators.NUMBERS), (operators.NEAR_TEXTS,), (operators.NEAR_NUMBERS,)
    ),
    "iexact_match": Group("", [], (operators.TEXTS, operators.CASES), (operators.NEAR_TEXTS,)),
    "contains": Group(
        "",
        [],
        (operators.TEXTS, {"a sentence": lambda text: f"It is the {text}."}),
        (NEAR_PARTS, {"beside the other": lambda text: f"{text} or Swift", "the other": lambda _: "Swift"}),
    ),
}
"""The functions that bundled tasks name. An item's answer is what its page, address, storage or message has."""


MESSAGES: Final = ("numeric_match", "iexact_match", "contains", "not_contains")
"""The functions that judge a message to the user."""


@dataclass
class State:
    """What the conditions read of a window."""

    url: str
    others: list[str] = field(default_factory=list)
    """Addresses of further tabs."""
    texts: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    storage: dict[str, str] = field(default_factory=dict)
    cookies: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def put(self, call: Any, value: str) -> None:
        """Set what *call* reads to *value*; a count that is no number is a wrong one."""
        match call.name, *call.args:
            case "check_url_contains" | "check_url_equals", _:
                self.url = value
            case "tab_url_contains", _:
                self.others = [value]
            case "element_text_equals", selector, _:
                self.texts[selector] = value
            case "local_storage_equals", key, _:
                self.storage[key] = value
            case "cookie_equals", key, _:
                self.cookies[key] = value
            case "tab_count", number:
                self.others = [self.url] * (int(value) - 1 if value.isdecimal() else number)
            case "element_count", selector, number:
                self.counts[selector] = int(value) if value.isdecimal() else number + 1
            case "element_present", selector:
                self.counts[selector] = int(value) if value.isdecimal() else 0
            case _:
                self.messages = [value]

    def window(self, site: Any) -> Any:
        """Return a window of this state, whose tabs opened their addresses on *site*."""
        tabs = [SimpleNamespace(url=url, title=lambda: "", locator=self._elements) for url in (self.url, *self.others)]
        for tab in tabs:
            site.answer(_Route(tab.url))
        context = SimpleNamespace(
            pages=tabs,
            cookies=lambda _: [{"name": name, "value": value} for name, value in self.cookies.items()],
            new_cdp_session=lambda _: SimpleNamespace(send=self._sent, detach=lambda: None),
        )
        return SimpleNamespace(page=tabs[0], context=context, site=site, messages=self.messages, gave_up=False)

    def _elements(self, selector: str) -> Any:
        css = selector.removeprefix("css=")
        first = SimpleNamespace(inner_text=lambda timeout: self.texts.get(css, ""))
        found = SimpleNamespace(count=lambda: self.counts.get(css, 1), first=first)
        found.locator = lambda _: found
        return found

    def _sent(self, command: str, _: object = None) -> Any:
        return {
            "Page.getFrameTree": {"frameTree": {"frame": {"id": "1"}}},
            "Storage.getStorageKeyForFrame": {"storageKey": "1"},
            "DOMStorage.getDOMStorageItems": {"entries": [[key, value] for key, value in self.storage.items()]},
        }[command]


class _Route:
    """A request of the browser for a page; the answer does not matter here."""

    def __init__(self, url: str) -> None:
        self.request = SimpleNamespace(url=url, is_navigation_request=lambda: True)

    def fulfill(self, **_: object) -> None:
        pass

    def abort(self, _: str) -> None:
        pass


def browser_groups() -> dict[str, Group]:
    """Return the conditions of `browser`'s tasks, and its tasks of MiniWoB, whose pages report a share."""
    specs, plays = module("browser", "browser_spec"), module("browser", "browser_plays")
    items: defaultdict[str, list[Item]] = defaultdict(list)
    for task in bundled("browser"):
        spec = specs.read_spec(task, variables={})
        if spec.evaluation is None:
            name = "miniwob by distance" if spec.name in plays.SOLVED_AT else "miniwob"
            items[name].append(Item(task["id"], spec.name, "1.0", _share_judged(plays, spec)))
            continue
        for call in _calls(spec.evaluation.goal):
            if (reference := _reference(call, spec, plays)) is not None:
                score = _state_judged(plays, spec, call)
                items[call.name].append(Item(f"{task['id']}: {call.name}", spec.goal, reference, score))
    groups = {name: replace(CONDITIONS[name], name=name, items=of) for name, of in items.items() if name in CONDITIONS}
    groups["miniwob"] = Group("miniwob", items["miniwob"], (_PLAIN,), (SHARES,))
    apart = {name: share for name, share in SHARES.items() if name != "almost all"}
    groups["miniwob by distance"] = Group("miniwob by distance", items["miniwob by distance"], (_PLAIN,), (apart,))
    # The same number is the answer of several tasks, and a state that holds is no answer that a model writes.
    return {name: replace(group, takes_none=True, are_samples=True) for name, group in groups.items()}


def _calls(condition: Any) -> Iterator[Any]:
    if condition.call is not None:
        yield condition.call
    for part in condition.parts:
        yield from _calls(part)


def _reference(call: Any, spec: Any, plays: Any) -> str | None:
    """Return a value by which *call* holds; None if another call of its task has the same value."""
    site = plays.play_of(spec, seed=1).site
    match call.name, *call.args:
        case "check_url_contains" | "tab_url_contains", part:
            return next(str(site.url(address)) for address in spec.pages if part in address)
        case "check_url_equals", path:
            return str(site.url(path))
        case "element_present", _:
            return "1"
        case "not_contains", _:
            return None
    return str(call.args[-1])


def _state_judged(plays: Any, spec: Any, varied: Any) -> Callable[[str | None], float]:
    """Return the judge of a value for *varied*, while the task's other conditions hold; for None, none holds."""

    def score(value: str | None) -> float:
        play = plays.play_of(spec, seed=1)
        state = State(play.site.url(spec.start_url))
        for call in _calls(spec.evaluation.goal):
            given = value if call == varied else _reference(call, spec, plays)
            if value is None and "url" not in call.name and call.name not in MESSAGES:
                state.put(call, "")
            elif value is not None and given is not None:
                state.put(call, given)
        return _ended(play, state.window(play.site))

    return score


def _share_judged(plays: Any, spec: Any) -> Callable[[str | None], float]:
    """Return the judge of a share that a page of MiniWoB reports; a text that is no number leaves the page open."""

    def score(share: str | None) -> float:
        number = float(share) if share and share.lstrip("-").replace(".", "").isdecimal() else None

        class Official:
            url = "http://miniwob.test/page.html"
            viewport: Mapping[str, int] = {}

            def __init__(self, **_: object) -> None:
                pass

            def validate(self, *_: object) -> tuple[float, bool, str, dict[str, float]]:
                return 0.0, number is not None, "", {} if number is None else {"RAW_REWARD_GLOBAL": number}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plays, "miniwob_tasks", lambda: {spec.name: Official})
            patch.setattr(plays, "miniwob_pages", lambda: Path("/nowhere"))
            play = plays.play_of(spec, seed=1)
        window = SimpleNamespace(page=SimpleNamespace(url=Official.url), messages=[], gave_up=False)
        return _ended(play, window)

    return score


def _ended(play: Any, window: Any) -> float:
    """Return the reward of an episode that ends with *window*."""
    verdict = play.judge(window, "", "")
    return float(verdict.reward if verdict.is_done else play.at_the_end(window, verdict).reward)

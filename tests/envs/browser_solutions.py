"""Plays the browser environment's tasks by script: those written for it as their problems say, MiniWoB's by rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from tests.envs.browser_worker import BrowserWorker, observation
from tests.envs.workers import Session

_ELEMENT = re.compile(r"\{(?P<start>[^{}#]+?)(?:#(?P<number>\d+))?\}")
TRIES = 5


def bids(axtree: str, start: str) -> list[str]:
    """Find the elements whose lines go on with *start* after their bid."""
    return [line[1] for line in re.finditer(r"\[(\w+)\] (.*)", axtree) if line[2].startswith(start)]


def written(template: str, axtree: str) -> str:
    """Put the elements' bids into an action."""

    def bid(found: re.Match[str]) -> str:
        there = bids(axtree, found["start"])
        number = int(found["number"] or 1)
        assert len(there) >= number, f"no {found[0]} in:\n{axtree}"
        return repr(there[number - 1])

    return _ELEMENT.sub(bid, template)


def act(session: Session, action: str) -> dict[str, Any]:
    """Take a step that must succeed as a tool; gives its output."""
    output = session.tool("act", action_str=action)
    assert "data" in output, output
    return output


def follow(session: Session, templates: Sequence[str]) -> list[dict[str, Any]]:
    """Take a script's steps; gives their outputs. No step may have an error."""
    seen, outputs = observation(session), []
    for template in templates:
        output = taken(session, written(template, seen["axtree_txt"]))
        seen = output["data"]
        assert not is_wrong(seen["error"]), f"{template}: {seen['error']}"
        outputs.append(output)
    return outputs


def taken(session: Session, action: str) -> dict[str, Any]:
    """Take a step of one call, again where the machine was too busy for it; gives its output."""
    for _ in range(TRIES):
        output = act(session, action)
        if was_taken(output["data"]["error"]):
            break
    return output


def was_taken(error: str) -> bool:
    """Tell whether the page saw a call: a busy machine may need all of BrowserGym's 500 ms before that."""
    return not _is_late(error) or "performing" in error


def is_wrong(error: str) -> bool:
    """Tell whether an *error* is more than a click that was made, whose wait for what may follow it was too long."""
    return bool(error) and not (_is_late(error) and "click action done" in error)


def _is_late(error: str) -> bool:
    return error.startswith("TimeoutError: Locator.")


def played(worker: BrowserWorker, task: dict[str, Any], templates: Sequence[str]) -> dict[str, Any]:
    """Play *task* by script; gives the last output, which must be the only one that ends the episode."""
    with worker.session(task) as session:
        *before, last = follow(session, templates)
    assert not any(output["finished"] for output in before)
    return last


Rules = Callable[[str, str], str]
"""From a goal and an accessibility tree to some calls, a line each."""


def solved_miniwob(worker: BrowserWorker, task: dict[str, Any], rules: Rules, *, seed: int) -> dict[str, Any]:
    """Play an official task by its rules, a step for each call; gives the last output."""
    with worker.session(task, seed=seed) as session:
        seen = observation(session)
        for call in rules(seen["goal"], seen["axtree_txt"]).splitlines():
            output = taken(session, call)
        assert output["finished"], f"{seen['goal']}\n{seen['axtree_txt']}\n{output['data']['error']}"
        return output


def _click(start: str, axtree: str) -> str:
    return f"click({bids(axtree, start)[0]!r})"


def _all(*templates: str) -> Rules:
    return lambda goal, axtree: "\n".join(written(template, axtree) for template in templates)


def _quoted(goal: str) -> list[str]:
    return re.findall(r'"(.+?)"', goal)


def _typed(*fields: str) -> Rules:
    """Fill what the goal has in quotation marks into *fields*, the last of it into all that are left; then submit."""

    def rules(goal: str, axtree: str) -> str:
        words = _quoted(goal)
        fills = [
            f"fill({written(field, axtree)}, {words[min(place, len(words) - 1)]!r})"
            for place, field in enumerate(fields)
        ]
        return "\n".join([*fills, _click("button", axtree)])

    return rules


def _chosen(role: str) -> Rules:
    """Click what the goal lists between its first word and "and click Submit"; then submit."""

    def rules(goal: str, axtree: str) -> str:
        names = goal.removeprefix("Select ").removesuffix(" and click Submit.").split(", ")
        clicks = [_click(f"{role} '{name}'", axtree) for name in names if name != "nothing"]
        return "\n".join([*clicks, _click("button", axtree)])

    return rules


def _named_button(goal: str, axtree: str) -> str:
    return _click(f"button '{_quoted(goal)[0]}'", axtree)


def _from_list(goal: str, axtree: str) -> str:
    name = goal.removeprefix("Select ").removesuffix(" from the list and click Submit.")
    return written(f"select_option({{combobox}}, {name!r})\nclick({{button 'Submit'}})", axtree)


def _tab(goal: str, axtree: str) -> str:
    return _click(f"link 'Tab #{re.findall('#(.)', goal)[0]}'", axtree)


def _nth_textbox(goal: str, axtree: str) -> str:
    number = int(re.findall(r"(\d)(?:st|nd|rd|th)", goal)[0])
    return f"click({bids(axtree, 'textbox')[number - 1]!r})"


def _from_table(goal: str, axtree: str) -> str:
    asked = re.findall("value of (.+) into", goal)[0]
    cells = re.findall(r"cell '(.*)'", axtree)
    value = cells[cells.index(asked) + 1]
    return written(f"fill({{textbox}}, {value!r})\nclick({{button 'Submit'}})", axtree)


def _date(goal: str, axtree: str) -> str:
    month, day, year = re.findall(r"(\d\d)/(\d\d)/(\d{4})", goal)[0]
    return written(f"fill({{Date}}, '{year}-{month}-{day}')\nclick({{button 'Submit'}})", axtree)


def _nth_word(goal: str, axtree: str) -> str:
    number = int(re.findall(r"the (\d+)", goal)[0])
    words = re.findall(r"[A-Za-z]+", re.findall(r"StaticText '(.+)'", axtree)[0])
    return written(f"fill({{textbox}}, {words[number - 1]!r})\nclick({{button 'Submit'}})", axtree)


SOLVERS: dict[str, Rules] = {
    "click-test": _all("click({button 'Click Me!'})"),
    "click-test-2": _all("click({button 'ONE'})"),
    "click-button": _named_button,
    "click-button-sequence": _all("click({button 'ONE'})", "click({button 'TWO'})"),
    "click-option": _chosen("radio"),
    "click-checkboxes": _chosen("checkbox"),
    "click-dialog": _all("click({button 'Close'})"),
    "click-tab": _tab,
    "choose-list": _from_list,
    "enter-text": _typed("{textbox}"),
    "enter-text-dynamic": _typed("{textbox}"),
    "enter-password": _typed("{textbox}", "{textbox#2}"),
    "login-user": _typed("{textbox}", "{textbox#2}"),
    "focus-text": _all("click({textbox})"),
    "focus-text-2": _nth_textbox,
    "read-table": _from_table,
    "enter-date": _date,
    "find-word": _nth_word,
}

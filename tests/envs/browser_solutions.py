"""Plays the browser environment's tasks by script.

The project's own tasks follow their problems' solutions. MiniWoB's tasks follow rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any

from tests.envs.browser_worker import BrowserWorker, observation
from tests.envs.workers import Session

_ELEMENT = re.compile(r"\{(?P<start>[^{}#]+?)(?:#(?P<number>\d+))?\}")


def bids(axtree: str, start: str) -> list[str]:
    """Return the bids of the elements whose lines continue with *start* after the bid."""
    return [line[1] for line in re.finditer(r"\[(\w+)\] (.*)", axtree) if line[2].startswith(start)]


def written(template: str, axtree: str) -> str:
    """Replace the placeholders of an action by the elements' bids."""

    def bid(found: re.Match[str]) -> str:
        there = bids(axtree, found["start"])
        number = int(found["number"] or 1)
        assert len(there) >= number, f"no {found[0]} in:\n{axtree}"
        return repr(there[number - 1])

    return _ELEMENT.sub(bid, template)


def act(session: Session, action: str) -> dict[str, Any]:
    """Call the `act` tool, assert that the tool succeeds, and return its output."""
    output = session.tool("act", action_str=action)
    assert "data" in output, output
    return output


def follow(session: Session, templates: Sequence[str]) -> list[dict[str, Any]]:
    """Take a script's steps and return their outputs. No step may have an error."""
    seen, outputs = observation(session), []
    for template in templates:
        output = act(session, written(template, seen["axtree_txt"]))
        seen = output["data"]
        assert not seen["error"], f"{template}: {seen['error']}"
        outputs.append(output)
    return outputs


def played(worker: BrowserWorker, task: dict[str, Any], templates: Sequence[str]) -> dict[str, Any]:
    """Play *task* by script and return the last output, which must be the only output that ends the episode."""
    with worker.session(task) as session:
        *before, last = follow(session, templates)
    assert not any(output["finished"] for output in before)
    return last


Rules = Callable[[str, str], str | Generator[str, str, None]]
"""Maps a goal and an accessibility tree to calls.

The calls are a text with a call per line, or a generator that receives the tree after each call.
"""


def played_miniwob(worker: BrowserWorker, task: dict[str, Any], rules: Rules, *, seed: int) -> dict[str, Any]:
    """Play an official task by its rules, a step per call, and return the last output, which alone ends the episode."""
    with worker.session(task, seed=seed) as session:
        seen = observation(session)
        calls = rules(seen["goal"], seen["axtree_txt"])
        calls = _of_lines(calls) if isinstance(calls, str) else calls
        call = next(calls)
        with suppress(StopIteration):
            while True:
                output = act(session, call)
                assert not output["data"]["error"], f"{call}: {output['data']['error']}\n{output['data']['axtree_txt']}"
                call = calls.send(output["data"]["axtree_txt"])
        assert output["finished"], f"{seen['goal']}\n{seen['axtree_txt']}\n{output['data']['axtree_txt']}"
        return output


def _of_lines(calls: str) -> Generator[str, str, None]:
    for call in calls.splitlines():
        _ = yield call


def _click(start: str, axtree: str) -> str:
    return f"click({bids(axtree, start)[0]!r})"


def _all(*templates: str) -> Rules:
    return lambda goal, axtree: "\n".join(written(template, axtree) for template in templates)


def _calls(*calls: str) -> Rules:
    """Return calls that name elements by selectors; the page resolves each selector when its call runs."""
    return lambda goal, axtree: "\n".join(calls)


def _quoted(goal: str) -> list[str]:
    return re.findall(r'"(.+?)"', goal)


def _typed(*fields: str) -> Rules:
    """Fill the goal's quoted texts into *fields* and submit. The last text fills all remaining fields."""

    def rules(goal: str, axtree: str) -> str:
        words = _quoted(goal)
        fills = [
            f"fill({written(field, axtree)}, {words[min(place, len(words) - 1)]!r})"
            for place, field in enumerate(fields)
        ]
        return "\n".join([*fills, _click("button", axtree)])

    return rules


def _chosen(role: str) -> Rules:
    """Click the items that the goal lists between its first word and "and click Submit", then submit."""

    def rules(goal: str, axtree: str) -> str:
        names = goal.removeprefix("Select ").removesuffix(" and click Submit.").split(", ")
        clicks = [_click(f"{role} '{name}'", axtree) for name in names if name != "nothing"]
        return "\n".join([*clicks, _click("button", axtree)])

    return rules


def _other_boxes(goal: str, axtree: str) -> str:
    """Check all boxes that the goal does not name, because each right box counts, then submit."""
    names = [name for name in re.findall(r"\] checkbox '(.*?)'", axtree) if name not in goal]
    return "\n".join([*(_click(f"checkbox '{name}'", axtree) for name in names), _click("button", axtree)])


def _named_button(goal: str, axtree: str) -> str:
    return _click(f"button '{_quoted(goal)[0]}'", axtree)


def _other_button(goal: str, axtree: str) -> str:
    names = re.findall(r"\] button '(.*)'", axtree)
    return _click(f"button '{next(name for name in names if name != _quoted(goal)[0])}'", axtree)


def _from_list(goal: str, axtree: str) -> str:
    name = goal.removeprefix("Select ").removesuffix(" from the list and click Submit.")
    return written(f"select_option({{combobox}}, {name!r})\nclick({{button 'Submit'}})", axtree)


def _other_from_list(goal: str, axtree: str) -> str:
    name = goal.removeprefix("Select ").removesuffix(" from the list and click Submit.")
    other = next(option for option in re.findall(r"option '(.*?)'", axtree) if option != name)
    return written(f"select_option({{combobox}}, {other!r})\nclick({{button 'Submit'}})", axtree)


def _tab(goal: str, axtree: str) -> str:
    return _click(f"link 'Tab #{re.findall('#(.)', goal)[0]}'", axtree)


def _other_tab(goal: str, axtree: str) -> str:
    return _click(f"link 'Tab #{'1' if '#1' not in goal else '2'}'", axtree)


def _link(goal: str, axtree: str) -> str:
    return f"click('.alink:text-is({json.dumps(_quoted(goal)[0])})')"


def _other_link(goal: str, axtree: str) -> str:
    return f"click('.alink:not(:text-is({json.dumps(_quoted(goal)[0])}))')"


def _nth_textbox(goal: str, axtree: str) -> str:
    number = int(re.findall(r"(\d)(?:st|nd|rd|th)", goal)[0])
    return f"click({bids(axtree, 'textbox')[number - 1]!r})"


def _other_textbox(goal: str, axtree: str) -> str:
    number = int(re.findall(r"(\d)(?:st|nd|rd|th)", goal)[0])
    return f"click({bids(axtree, 'textbox')[number % 3]!r})"


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


def _in_tree(goal: str, axtree: str) -> Generator[str, str, None]:
    """Open one folder after the other until the name is visible, then click it."""
    (name,) = _quoted(goal)
    while f"'{name}'" not in axtree:
        axtree = yield "click('#tree li.expandable > .hitarea')"
    yield f"click('#tree span:text-is({json.dumps(name)}):visible')"


def _search(goal: str, axtree: str, *, wanted: int | None = None) -> str:
    """Search, go to the result's page (three results a page), and click the result."""
    place = (wanted or int(re.findall(r"the (\d+)", goal)[0])) - 1
    page = [f"click('#pagination a:text-is(\"{place // 3 + 1}\")')"] if place >= 3 else []
    result = f"click('#page-content > div:nth-child({place % 3 + 1}) a')"
    return "\n".join([f"fill('#search-text', {_quoted(goal)[0]!r})", "click('#search')", *page, result])


def _other_result(goal: str, axtree: str) -> str:
    return _search(goal, axtree, wanted=2 if "the 1st" in goal else 1)


def _started_and_ended(goal: str, axtree: str) -> str:
    """Enter a word with the start and end of the goal that no menu entry has: a menu would cover the button."""
    return f"fill('#tags', {'zz'.join([*_quoted(goal), ''][:2])!r})\nclick('#subbtn')"


def _email(goal: str, axtree: str) -> str:
    name = re.findall(r"email by (\w+)", goal)[0]
    thread = f".email-thread:has(.email-sender:text-is({json.dumps(name)}))"
    if "star icon" in goal or "trash icon" in goal:
        return f"click({thread + (' .star' if 'star icon' in goal else ' .trash')!r})"
    opened = f"click({thread + ' .email-sender'!r})"
    if "reply" in goal:
        text = _quoted(goal)[0]
        return f"{opened}\nclick('.email-reply')\nfill('#reply-text', {text!r})\nclick('#send-reply')"
    to = re.findall(r"to (\w+)\.", goal)[0]
    return f"{opened}\nclick('.email-forward')\nfill('.forward-sender', {to!r})\nclick('#send-forward')"


def _other_email(goal: str, axtree: str) -> str:
    """Reply or forward, whichever the goal does not request."""
    kind, button = ("reply", "#send-reply") if "reply" not in goal else ("forward", "#send-forward")
    return f"click('.email-thread .email-sender')\nclick('.email-{kind}')\nclick('{button}')"


SOLVERS: dict[str, Rules] = {
    "click-test": _all("click({button 'Click Me!'})"),
    "click-test-2": _all("click({button 'ONE'})"),
    "click-button": _named_button,
    "click-button-sequence": _all("click({button 'ONE'})", "click({button 'TWO'})"),
    "click-collapsible": _calls("click('#area h3')", "click('#subbtn')"),
    "click-link": _link,
    "click-option": _chosen("radio"),
    "click-checkboxes": _chosen("checkbox"),
    "click-dialog": _all("click({button 'Close'})"),
    "click-tab": _tab,
    "choose-list": _from_list,
    "drag-box": _calls("drag_and_drop('#draggableSmall', '#draggableLarge')", "click('#subbtn')"),
    "email-inbox": _email,
    "enter-text": _typed("{textbox}"),
    "enter-text-dynamic": _typed("{textbox}"),
    "enter-password": _typed("{textbox}", "{textbox#2}"),
    "login-user": _typed("{textbox}", "{textbox#2}"),
    "focus-text": _all("click({textbox})"),
    "focus-text-2": _nth_textbox,
    "navigate-tree": _in_tree,
    "read-table": _from_table,
    "enter-date": _date,
    "find-word": _nth_word,
    "search-engine": _search,
    "use-autocomplete": _started_and_ended,
}
"""The rules that win each official task of the task files."""
_TOO_SOON = _calls("click('#subbtn')")
_GIVEN_UP = _calls("report_infeasible('This cannot be done.')")
MISTAKES: dict[str, Rules] = {
    **dict.fromkeys(SOLVERS, _TOO_SOON),
    **dict.fromkeys(("click-test", "click-button-sequence", "click-dialog", "focus-text", "navigate-tree"), _GIVEN_UP),
    "click-test-2": _all("click({button 'TWO'})"),
    "click-button": _other_button,
    "click-checkboxes": _other_boxes,
    "click-link": _other_link,
    "click-tab": _other_tab,
    "choose-list": _other_from_list,
    "email-inbox": _other_email,
    "focus-text-2": _other_textbox,
    "search-engine": _other_result,
}
"""The rules that lose each official task. Some tasks can only be given up, because every other end is right."""

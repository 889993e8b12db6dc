"""The groups of `os`, by the form of their check, and commands near the right ones."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from tests.answers import operators
from tests.answers.groups import Group, Item, bundled, module
from tests.answers.operators import Operator

SAMPLES: Final = {
    "integer-match": ["0", "7", "31", "4096", "120000", "-12"],
    "size-match": ["5K", "5120", "1M", "17"],
    "string-match": ["/opt/atlas/willow", "amber", "www-data", "10.0.0.7", "Mon 3", "None"],
    "containing": ["amber", "None"],
    "in": ["amber", "None"],
}
"""Expected values for each matcher, also for a matcher without bundled tasks."""
FORMS: Final[Mapping[str, tuple[tuple[Mapping[str, Operator], ...], tuple[Mapping[str, Operator], ...]]]] = {
    "integer-match": ((operators.MARKS, operators.NUMBERS), (operators.NEAR_TEXTS,)),
    "size-match": ((operators.MARKS, operators.SIZES), (operators.NEAR_TEXTS, operators.NEAR_SIZES)),
    "string-match": ((operators.MARKS,), (operators.NEAR_TEXTS, operators.NEAR_WORDS)),
}
"""Notations and near misses of the matchers that compare the whole answer."""


class Box:
    """A sandbox that has one file."""

    def __init__(self, content: str) -> None:
        self._content = content

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        return self._content.encode()


def os_groups() -> dict[str, Group]:
    """Return the forms of check in `os` that compare an answer or a file.

    The expected value of a task with a matcher comes from a script in the box, and the tests of `os` prove that it is
    the reference. So the reference stands for it here.
    """
    judges = module("os", "os_judge")
    groups = dict(_sample_groups())
    forms: defaultdict[str, list[Item]] = defaultdict(list)
    for task in bundled("os"):
        evaluation = judges.Evaluation.read(task["evaluation"])
        reference = task["reference"]["answer"]
        score: Callable[[Any], float]
        match task["evaluation"]:
            case {"match": _}:
                form, score = "match", _judged(judges.Judge(evaluation, Box("")))
            case {"check": [None, {"matcher": form}]}:
                judge = judges.Judge(evaluation, Box(""))
                judge.expected = reference
                score = _judged(judge)
            case {"check": [{"read": _}, {"equals": reference}]}:
                form, score = "a file", _file_judged(evaluation)
            case _:
                continue  # a script looks at the box: see test_os_commands.py
        forms[form].append(Item(task["id"], task["instruction"], reference, score))
    for form, items in forms.items():
        notations, near = FORMS.get(form, ((operators.MARKS,), (operators.NEAR_TEXTS,)))
        groups[form] = Group(form, items, notations, near, (operators.NEAR_NUMBERS,), takes_none=form != "a file")
    groups["integer-match"] = replace(groups["integer-match"], guessable="most tasks count a few files, lines or users")
    groups["size-match"] = replace(groups["size-match"], guessable="the group has only four tasks")
    groups["a file"] = replace(
        groups["a file"], notations=(operators.FILES,), near=(operators.NEAR_TEXTS, operators.NEAR_FILES)
    )
    return groups


def _sample_groups() -> Iterator[tuple[str, Group]]:
    judges = module("os", "os_judge")
    for matcher, expected in SAMPLES.items():
        evaluation = judges.Evaluation.read({"check": [{"read": "/srv/expected"}, {"matcher": matcher}]})
        items = [Item(value, "What is it?", value, _judged(judges.Judge(evaluation, Box(value)))) for value in expected]
        notations, near = FORMS.get(matcher, ((), ()))
        name = f"{matcher} of samples"
        numbers = (operators.NEAR_NUMBERS,) if near else ()
        yield name, Group(name, items, notations, near, numbers, takes_none=True, are_samples=True)


def _judged(judge: Any) -> Callable[[str | None], float]:
    return lambda answer: float(asyncio.run(judge.judge(answer)))


def _file_judged(evaluation: Any) -> Callable[[str], float]:
    """Return the judge of a file's content; the episode ends without an answer."""
    judges = module("os", "os_judge")
    return lambda content: float(asyncio.run(judges.Judge(evaluation, Box(content)).judge(None)))


# -- commands


def _each(pattern: str, change: Callable[[re.Match[str]], str]) -> Callable[[str], Iterator[str]]:
    """Return an operator that changes each place that matches *pattern* in turn."""

    def changed(text: str) -> Iterator[str]:
        for found in re.finditer(pattern, text):
            if (made := text[: found.start()] + change(found) + text[found.end() :]) != text:
                yield made

    return changed


def _letters(text: str) -> Iterator[str]:
    for found in re.finditer(r"(?<= -)[a-zA-Z]+\b", text):
        for at in range(found.start(), found.end()):
            yield (text[:at] + text[at + 1 :]).replace(" - ", " ")


NEAR_COMMANDS: Final[Mapping[str, Callable[[str], Iterator[str]]]] = {
    "the last command dropped": lambda text: iter([":"]),
    "a number changed": _each(
        r"(?<![\w$.])\d+(?:\.\d+)*(?!\w)", lambda found: f"{found[0][:-1]}{(int(found[0][-1]) + 1) % 10}"
    ),
    "another path": _each(r"(?<=[\s|])/[\w./-]+", lambda found: f"{found[0]}x"),
    "an option dropped": _letters,
    "a part of a pipe dropped": _each(r" \| [^|'>]+(?= )", lambda found: ""),
    "another word": _each(r"(?<=[a-zG] )[a-z]{4,}$", lambda found: f"{found[0]}x"),
}
"""Operators on the last command of a solution."""

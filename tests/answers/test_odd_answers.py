"""Whatever a model may write gets a defined reward, and none of it wins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pytest

from tests.answers.groups import Group, bundled, module
from tests.answers.test_answers import GROUPS

LONG: Final = 10**7
ODD: Final[Mapping[str, str]] = {
    "ten million digits": "7" * LONG,
    "ten million letters": "word " * (LONG // 5),
    "ten million line ends": "\n" * LONG,
    "not a number": "NaN",
    "infinity": "-Infinity",
    "a huge exponent": "1e999999999",
    "a lone surrogate": "\ud800",
    "a NUL": "4\x002",
    "other digits": "\u0664\u0662 \uff14\uff12 \u00bd \u216b",
    "marks of direction": "\u202e24\u202c",
    "open brackets": "[" * 100_000,
    "open braces of JSON": '{"a":' * 100_000,
    "open boxes": "\\boxed{" * 100_000,
    "open tags": "<answer>" * 100_000,
    "open thoughts": "<think>" * 100_000,
    "fences": "```python\n" * 100_000,
    "an answer and its opposite": "yes and no, 42 and -42, True or False",
    "a row of blanks and a dot": f"{' ' * 1_000_000}.",
}
UNUSUAL: Final = ("browser: ", "coding: ", "generic: not_contains", "os: a file")
"""Groups that judge states and files, run code, or are won by any other text."""
TEXTS: Final = {name: group for name, group in GROUPS.items() if not name.startswith(UNUSUAL)}


@pytest.mark.parametrize(("name", "group"), [pytest.param(*named, id=named[0]) for named in sorted(TEXTS.items())])
def test_an_odd_answer_has_a_defined_reward_and_does_not_win(name: str, group: Group) -> None:
    item = group.items[0]
    read = group.read or str

    rewards = {odd: [item.score(read(text)) for _ in range(2)] for odd, text in ODD.items()}

    assert {odd for odd, (first, second) in rewards.items() if first != second} == set()
    assert {odd: first for odd, (first, _) in rewards.items() if not 0.0 <= first <= group.partial} == {}


def test_an_odd_solution_is_read_and_does_not_win() -> None:
    """A long one is only read: the limits of the sandbox end it."""
    group = GROUPS["coding: yes or no"]
    blocks = module("coding", "coding_blocks")
    tests = module("coding", "coding_tasks").read_evaluation(next(iter(bundled("coding"))))

    read = {odd: (blocks.solution_in(text, tests), blocks.submitted(text, tests)) for odd, text in ODD.items()}
    rewards = {odd: group.items[0].score(text) for odd, text in ODD.items() if len(text) <= 1_000}

    assert {odd for odd, found in read.items() if not all(isinstance(one, str) for one in found)} == set()
    assert {odd: reward for odd, reward in rewards.items() if reward != 0.0} == {}

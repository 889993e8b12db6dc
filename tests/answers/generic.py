"""The generic reward functions, which any environment's tasks may name, each with samples of calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from tests.answers import operators
from tests.answers.groups import Group, Item, module
from tests.answers.operators import Operator

PROMPT: Final = "Which one of them is it?"
TEXTS: Final = ["amber valley", "K\u00e4rnten", "x=1"]
PARTS: Final = ["amber", "k\u00e4rn"]
BEFORE: Final[Mapping[str, Operator]] = {
    "a sentence before": lambda text: f"It is {text}",
    "a word before": lambda text: f"xyz{text}",
}
BEHIND: Final[Mapping[str, Operator]] = {
    "a sentence behind": lambda text: f"{text}, I think.",
    "a word behind": lambda text: f"{text}xyz",
}
NEAR_PARTS: Final[Mapping[str, Operator]] = {
    "another case": str.upper,
    "a letter dropped": lambda text: text[:1] + text[2:],
    "a letter changed": lambda text: f"{text[:1]}q{text[2:]}",
    "two letters swapped": lambda text: f"{text[1]}{text[0]}{text[2:]}",
    "cut in two": lambda text: f"{text[:2]} {text[2:]}",
    "half of it": lambda text: text[: len(text) // 2],
}
"""Texts without a part, near the part."""
WORDS: Final[Mapping[str, Operator]] = {
    "line ends between": lambda text: text.replace(" ", "\n"),
    "tabs between": lambda text: text.replace(" ", "\t"),
    "three blanks between": lambda text: text.replace(" ", "   "),
}
NEAR_WORD_COUNTS: Final[Mapping[str, Operator]] = {
    "a word more": lambda text: f"{text} more",
    "a word dropped": lambda text: text.split(" ", 1)[1],
    "no blanks": lambda text: text.replace(" ", ""),
    "twice": lambda text: f"{text} {text}",
}


FORMULAS: Final[Mapping[str, Operator]] = {
    "as it is": lambda text: text,
    "blanks": lambda text: text.replace("+", " + ").replace(",", ", "),
    "growing brackets": lambda text: text.replace("(", r"\left(").replace("]", r"\right]"),
    "a larger fraction": lambda text: text.replace(r"\frac", r"\dfrac"),
    "no braces": lambda text: text.replace("{3}", "3"),
    "signs": lambda text: text.replace(r"\infty", "\u221e").replace(r"\pi", "\u03c0"),
}
"""Other notations of a formula in LaTeX."""
NEAR_FORMULAS: Final[Mapping[str, Operator]] = {
    "another number": lambda text: text.replace("3", "4") if "3" in text else None,
    "another operator": lambda text: text.replace("+", "-") if "+" in text else None,
    "another bracket": lambda text: text.replace("(", "[") if "(" in text else None,
    "another root": lambda text: text.replace(r"\sqrt", "") if r"\sqrt" in text else None,
    "the other part": lambda text: text.partition(",")[2].strip("]") or None,
}


def _near(*dropped: str) -> Mapping[str, Operator]:
    return {name: operator for name, operator in operators.NEAR_WORDS.items() if name not in dropped}


def _group(
    samples: Mapping[str, str],
    notations: tuple[Mapping[str, Operator], ...],
    near: tuple[Mapping[str, Operator], ...],
    *,
    has_numbers: bool = False,
    prompt: str = PROMPT,
) -> Group:
    """Return a group of *samples*: answers that earn 1, by the arguments of the function."""
    items = [Item(arguments, prompt, reference, float) for arguments, reference in samples.items()]
    numbers = (operators.NEAR_NUMBERS,) if has_numbers else ()
    return Group("", items, notations, near, numbers, are_samples=True)


_EXACT: Final = (operators.NEAR_TEXTS, operators.NEAR_WORDS)
_TEXTS: Final = {repr(text): text for text in TEXTS}
_PARTS: Final = {repr(part): part for part in PARTS}
_VALUES: Final = [{"name": "Dmitri", "ages": [25, 7]}, [1, 2.5, None], {"a": {"b": True, "c": "\u00fc"}}]
FUNCTIONS: Final[Mapping[str, Group]] = {
    "exact_match": _group(_TEXTS, (operators.TEXTS,), _EXACT, has_numbers=True),
    "iexact_match": _group(
        _TEXTS, (operators.TEXTS, operators.CASES), (operators.NEAR_TEXTS, _near("another case")), has_numbers=True
    ),
    "one_of": _group({f"['jade', {text!r}]": text for text in TEXTS}, (operators.TEXTS,), _EXACT, has_numbers=True),
    "contains": _group(_PARTS, (operators.TEXTS, BEFORE, BEHIND), (NEAR_PARTS,)),
    "starts_with": _group(_PARTS, (operators.TEXTS, BEHIND), (NEAR_PARTS, BEFORE)),
    "ends_with": _group(_PARTS, (operators.TEXTS, BEFORE), (NEAR_PARTS, BEHIND)),
    "not_contains": _group(
        {"'amber'": "A green hill."},
        (operators.TEXTS, operators.CASES, BEFORE, BEHIND),
        ({"the part behind": lambda text: f"{text} amber", "the part within": lambda text: f"xamber{text}"},),
        prompt="Describe it without the word amber.",
    ),
    "regex_match": _group(
        {r"'[0-9]{4}-[0-9]{2}-[0-9]{2}', whole=True": "2031-03-14", "'amber|jade', whole=True": "jade"},
        (operators.TEXTS,),
        (operators.NEAR_TEXTS, {"capitals and a digit": lambda text: f"{text.upper()}1"}),
    ),
    "numeric_match": _group(
        {repr(number): str(number) for number in (39.5, -1200, 7, "0.001")},
        (operators.MARKS, operators.NUMBERS),
        (operators.NEAR_TEXTS,),
        has_numbers=True,
    ),
    "math_match": _group(
        {repr(text): text for text in (r"(-\infty,3]", r"2\sqrt{3}+1", r"\frac{3\pi}{5}", "x^2+3x", "39.5", "-1200")},
        (operators.MARKS, operators.NUMBERS, FORMULAS),
        (operators.NEAR_TEXTS, NEAR_FORMULAS),
        has_numbers=True,
    ),
    "json_equals": _group(
        {repr(value): json.dumps(value, ensure_ascii=False) for value in _VALUES},
        (operators.JSON,),
        (operators.NEAR_TEXTS, operators.NEAR_JSON),
        has_numbers=True,
    ),
    "word_count_between": _group({"3, 3": "amber green hill"}, (operators.TEXTS, WORDS), (NEAR_WORD_COUNTS,)),
}
"""Samples of each function, with its notations and near misses."""


def generic_groups() -> dict[str, Group]:
    """Return the generic reward functions."""
    read = module("base", "envserver.generic").parse_reward
    return {
        name: replace(group, name=name, items=[replace(item, score=read(f"{name}({item.id})")) for item in group.items])
        for name, group in FUNCTIONS.items()
    }

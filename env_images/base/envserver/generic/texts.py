"""Reward functions for agents' texts. Each takes the text as its first argument and returns 1 or 0.

White space at both ends of a text and the kind of its line ends are ignored.
"""

import json
import math
from typing import Any

from envserver.generic.patterns import compiled, matches
from envserver.generic.rewards import reward_function

MAX_NUMBER_CHARS = 400
MAX_JSON_CHARS = 1_000_000
MAX_JSON_DEPTH = 100


@reward_function("exact_match")
def exact_match(text: str, expected: str) -> float:
    """Return 1 if the text equals *expected*."""
    return float(_plain(text) == _plain(expected))


@reward_function("iexact_match")
def iexact_match(text: str, expected: str) -> float:
    """Return 1 if the text equals *expected*, ignoring case."""
    return float(_plain(text).casefold() == _plain(expected).casefold())


@reward_function("contains")
def contains(text: str, part: str, case: bool = True) -> float:
    """Return 1 if the text contains *part*. ``case=False`` ignores case."""
    return float(_folded(part, case) in _folded(text, case))


@reward_function("not_contains")
def not_contains(text: str, part: str, case: bool = True) -> float:
    """Return 1 if the text is not empty and does not contain *part*. An empty text is not an answer."""
    return float(bool(text.strip()) and _folded(part, case) not in _folded(text, case))


@reward_function("starts_with")
def starts_with(text: str, part: str, case: bool = True) -> float:
    """Return 1 if the text starts with *part*."""
    return float(_folded(text, case).startswith(_folded(part, case)))


@reward_function("ends_with")
def ends_with(text: str, part: str, case: bool = True) -> float:
    """Return 1 if the text ends with *part*."""
    return float(_folded(text, case).endswith(_folded(part, case)))


def _check_pattern(pattern: str, whole: bool = False, case: bool = True) -> None:
    compiled(pattern, ignore_case=not case)


@reward_function("regex_match", check=_check_pattern)
def regex_match(text: str, pattern: str, whole: bool = False, case: bool = True) -> float:
    """Return 1 if the Python *pattern* occurs in the text, or matches the *whole* text, in bounded time."""
    return float(matches(compiled(pattern, ignore_case=not case), _plain(text), whole=whole))


def _check_number(expected: int | float | str, tol: float = 1e-6) -> None:
    if (isinstance(expected, str) and number(expected) is None) or not tol >= 0:
        raise ValueError(f"{expected!r:.60} within {tol!r:.60} is not a number and a distance")


@reward_function("numeric_match", check=_check_number)
def numeric_match(text: str, expected: int | float | str, tol: float = 1e-6) -> float:
    """Return 1 if the text is a number at most *tol* from *expected*. Commas are ignored."""
    given = number(text)
    wanted = number(str(expected))
    return float(given is not None and wanted is not None and abs(given - wanted) <= tol)


@reward_function("one_of")
def one_of(text: str, *choices: str | list, case: bool = True) -> float:  # type: ignore[type-arg]  # read at run time
    """Return 1 if the text is one of *choices*, given as several arguments or as one list."""
    flat = [choice for given in choices for choice in (given if isinstance(given, list) else [given])]
    return float(_folded(text, case) in {_folded(str(choice), case) for choice in flat})


@reward_function("json_equals")
def json_equals(text: str, expected: Any) -> float:
    """Return 1 if the text is JSON (alone, or within one ``` fence) that equals *expected*. 1 and 1.0 are equal."""
    try:
        given = json.loads(_unfenced(text)) if len(text) <= MAX_JSON_CHARS else None
    except (ValueError, RecursionError):
        return 0.0
    return float(_same(given, expected, 0))


@reward_function("word_count_between")
def word_count_between(text: str, least: int, most: int) -> float:
    """Return 1 if the text has *least* to *most* words, both inclusive. White space separates words."""
    return float(least <= len(text.split()) <= most)


def number(text: str) -> float | None:
    """Return the finite number that *text* consists of, else None."""
    plain = text.strip()
    if not plain or len(plain) > MAX_NUMBER_CHARS or "_" in plain:
        return None
    try:
        value = float(plain.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _plain(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()


def _folded(text: str, case: bool) -> str:
    return _plain(text) if case else _plain(text).casefold()


def _unfenced(text: str) -> str:
    plain = _plain(text)
    if plain.startswith("```") and plain.endswith("```") and "\n" in plain:
        return plain[plain.index("\n") : -3]
    return plain


def _same(given: Any, expected: Any, depth: int) -> bool:
    """Return True if two JSON values are equal. A bool does not equal a number."""
    if depth > MAX_JSON_DEPTH:
        return False
    if isinstance(given, dict) and isinstance(expected, dict):
        return given.keys() == expected.keys() and all(_same(given[key], expected[key], depth + 1) for key in given)
    if isinstance(given, list) and isinstance(expected, list):
        pairs = zip(given, expected, strict=False)
        return len(given) == len(expected) and all(_same(left, right, depth + 1) for left, right in pairs)
    if isinstance(given, bool) or isinstance(expected, bool):
        return given is expected
    return bool(given == expected)

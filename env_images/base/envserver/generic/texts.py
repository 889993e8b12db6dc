"""Reward functions for agents' texts. Each takes the text as its first argument and returns 1 or 0.

White space at both ends of a text, the kind of its line ends, and whether accents are letters of their own are ignored.
"""

import json
import math
import re
import unicodedata
from fractions import Fraction
from typing import Any

from envserver.answers import plain_number, read_number
from envserver.generic.patterns import compiled, matches
from envserver.generic.rewards import reward_function

MAX_JSON_CHARS = 1_000_000
MAX_JSON_DEPTH = 100
MAX_FORMULA_CHARS = 5_000
FLOAT_TOLERANCE = 1e-6
"""Relative difference of two floats that count as equal: programs compute the same value in other orders."""


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
    if (isinstance(expected, str) and read_number(expected) is None) or not 0 <= tol < math.inf:
        raise ValueError(f"{expected!r:.60} within {tol!r:.60} is not a number and a distance")


@reward_function("numeric_match", check=_check_number)
def numeric_match(text: str, expected: int | float | str, tol: float = 1e-6) -> float:
    """Return 1 if the text is a number, in any usual notation, at most *tol* from *expected*."""
    given, wanted = read_number(text), read_number(str(expected))
    return float(given is not None and wanted is not None and abs(given - wanted) <= Fraction(tol))


_FORMULA = tuple(
    (re.compile(pattern), written)
    for pattern, written in (
        (r"\\[dt]frac(?![a-z])", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"(?<![\w})\]])\\frac\s*\{-", r"-\\frac{"),
        (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
        (r"(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree(?![a-z])|\u00b0|\\?%)(?!\s*\d)", ""),
        (r"^\\?\$", ""),
        (r"\\(?:cdot|times)(?![a-z])|[\u00b7\u00d7]", "*"),
        (r"\\(le|ge)q(?![a-z])", r"\\\1"),
        (r"([_^])\{(\w)\}", r"\1\2"),
        (r"(?<![\w.}])(\d+)/(\d+)(?![\w.{])", r"\\frac{\1}{\2}"),
        (r"(?<!\d)\s+|\s+(?!\d)", ""),
    )
)
"""Other notations of a formula, and the notation in which formulas are compared."""
_SIGNS = {"\u221e": r"\infty", "\u03c0": r"\pi", "\u222a": r"\cup", "\u2264": r"\le", "\u2265": r"\ge"}


@reward_function("math_match")
def math_match(text: str, expected: str) -> float:
    """Return 1 if the text is the number *expected*, or the formula *expected* in LaTeX, in any usual notation.

    Formulas are compared as they are written, and never evaluated: ``x+1`` is not ``1+x``.
    """
    if len(text) > MAX_FORMULA_CHARS:
        return 0.0  # cut off, it could become the right answer
    given, wanted = _formula(text), _formula(expected)
    if (number := read_number(wanted)) is not None:
        return float(read_number(given) == number)
    return float(given == wanted != "")


def _formula(text: str) -> str:
    plain = plain_number(_plain(text))
    for sign, written in _SIGNS.items():
        plain = plain.replace(sign, written)
    for pattern, written in _FORMULA:
        plain = pattern.sub(written, plain)
    return plain


@reward_function("one_of")
def one_of(text: str, *choices: str | list, case: bool = True) -> float:  # type: ignore[type-arg]  # read at run time
    """Return 1 if the text is one of *choices*, given as several arguments or as one list."""
    flat = [choice for given in choices for choice in (given if isinstance(given, list) else [given])]
    return float(_folded(text, case) in {_folded(str(choice), case) for choice in flat})


@reward_function("json_equals")
def json_equals(text: str, expected: Any, exact: bool = False) -> float:
    """Return 1 if the text is JSON (alone, or within one ``` fence) that equals *expected*.

    1 and 1.0 are equal. Two floats are equal within a relative `FLOAT_TOLERANCE`, unless the comparison is *exact*.
    """
    try:
        given = json.loads(_unfenced(text)) if len(text) <= MAX_JSON_CHARS else None
    except (ValueError, RecursionError):
        return 0.0
    return float(_same(given, expected, 0.0 if exact else FLOAT_TOLERANCE, 0))


@reward_function("word_count_between")
def word_count_between(text: str, least: int, most: int) -> float:
    """Return 1 if the text has *least* to *most* words, both inclusive. White space separates words."""
    return float(least <= len(text.split()) <= most)


def _plain(text: str) -> str:
    return unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n").strip())


def _folded(text: str, case: bool) -> str:
    return _plain(text) if case else _plain(text).casefold()


def _unfenced(text: str) -> str:
    plain = _plain(text)
    if plain.startswith("```") and plain.endswith("```") and "\n" in plain:
        return plain[plain.index("\n") : -3]
    return plain


def _same(given: Any, expected: Any, tolerance: float, depth: int) -> bool:
    """Return True if two JSON values are equal. A bool does not equal a number."""
    if depth > MAX_JSON_DEPTH:
        return False
    if isinstance(given, dict) and isinstance(expected, dict):
        return given.keys() == expected.keys() and all(
            _same(given[key], expected[key], tolerance, depth + 1) for key in given
        )
    if isinstance(given, list) and isinstance(expected, list):
        pairs = zip(given, expected, strict=False)
        return len(given) == len(expected) and all(_same(one, other, tolerance, depth + 1) for one, other in pairs)
    if isinstance(given, bool) or isinstance(expected, bool):
        return given is expected
    if isinstance(given, float) and isinstance(expected, float):
        return math.isclose(given, expected, rel_tol=tolerance)
    return bool(given == expected)

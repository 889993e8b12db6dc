"""Compares answers with expected outputs, in the server and on plain JSON values only.

An answer arrives as text from a sandbox, so the solution's own methods (`__eq__`, `__hash__`) never take part.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

FLOAT_TOLERANCE = 1e-9
"""The relative and absolute tolerance, used only if the expected output is a float."""


PRINTED_TOLERANCE = 1e-6
"""The relative tolerance of floats that a program prints, in which the same value has other last digits."""

_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][+-]?[0-9]+)?")
"""A number with a decimal point or an exponent. Integers, of any length, are compared as texts."""


class NotAnAnswer(Exception):
    """The text is not a comparable JSON value."""


def parse(text: str) -> Any:
    """Read an answer.

    Raises:
        NotAnAnswer: The text is not JSON, is NaN or an infinity, has an integer of over 4,300 digits, or is nested too
            deep.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise NotAnAnswer(type(error).__name__) from None


def same(answer: Any, expected: Any) -> bool:
    """Return True if *answer* equals *expected*; the recursion goes only as deep as the expected value.

    Numbers are equal by value, so 2.0 equals 2. A boolean never equals a number, and a text equals only a text.
    """
    match expected:
        case bool() | None:
            return answer is expected
        case int():
            return _is_number(answer) and answer == expected
        case float():
            return _is_number(answer) and _near(answer, expected)
        case str():
            return isinstance(answer, str) and answer == expected
        case list():
            return (
                isinstance(answer, list)
                and len(answer) == len(expected)
                and all(same(one, other) for one, other in zip(answer, expected, strict=True))
            )
        case dict():
            return (
                isinstance(answer, dict)
                and answer.keys() == expected.keys()
                and all(same(answer[key], value) for key, value in expected.items())
            )
    return False


def same_text(answer: bytes, expected: str, *, exact: bool = False) -> bool:
    """Compare a program's output: blanks at line ends and empty lines at the end do not count.

    Two floats in the same place are equal within a relative `PRINTED_TOLERANCE`, unless the comparison is *exact*.
    """
    lines, wanted = _lines(answer.decode("utf-8", "replace")), _lines(expected)
    if exact or lines == wanted or len(lines) != len(wanted):
        return lines == wanted
    return all(one == other or _same_line(one, other) for one, other in zip(lines, wanted, strict=True))


def _same_line(line: str, wanted: str) -> bool:
    words, others = re.split(r"([\s,;:()\[\]{}]+)", line), re.split(r"([\s,;:()\[\]{}]+)", wanted)
    return len(words) == len(others) and all(map(_same_word, words, others))


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted or _FLOAT.fullmatch(word) is None or _FLOAT.fullmatch(wanted) is None:
        return word == wanted
    one, other = float(word), float(wanted)
    return math.isfinite(one) and math.isclose(one, other, rel_tol=PRINTED_TOLERANCE)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _near(answer: float, expected: float) -> bool:
    try:
        return math.isclose(answer, expected, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    except OverflowError:  # an integer beyond any float
        return False


def _refuse(constant: str) -> Any:
    raise ValueError(constant)

"""Compares answers with expected outputs, in the server and on plain JSON values only.

An answer comes as text out of a sandbox, so no method of the solution's own (`__eq__`, `__hash__`) ever takes part.
"""

from __future__ import annotations

import json
import math
from typing import Any

FLOAT_TOLERANCE = 1e-9
"""Relative and absolute; only where the expected output is itself a float."""


class NotAnAnswer(Exception):
    """The text is no JSON value that could be compared."""


def parse(text: str) -> Any:
    """Read an answer.

    Raises:
        NotAnAnswer: it is no JSON, NaN or an infinity, an integer of more than 4,300 digits, or nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise NotAnAnswer(type(error).__name__) from None


def same(answer: Any, expected: Any) -> bool:
    """Say whether *answer* is what was *expected*; the recursion goes no deeper than the expected value does.

    Numbers are equal by value, so 2.0 is 2; a boolean is never a number, and a text never anything else.
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


def same_text(answer: bytes, expected: str) -> bool:
    """Compare what a program printed: blanks at the ends of lines and empty lines at the end do not count."""
    return _lines(answer.decode("utf-8", "replace")) == _lines(expected)


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

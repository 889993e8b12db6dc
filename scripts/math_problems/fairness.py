"""Finds the drawn tasks that are unfair although their answers are right. The generator replaces them.

These rules are not part of `references.confirmed`, which decides what is drawn: a stricter rule there would give the
ids of most tasks to other tasks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from envserver.answers import read_number
from math_scorers import Evaluation, rounded

from scripts.math_problems.references import exact_value

MOST_BY_ONE_ANSWER: Final = 7
"""The maximum number of tasks of a family that one answer solves: a tenth of 72 tasks."""

_BARE_MINUS: Final = re.compile(r"(?<=Compute )(-[0-9.]+)(?=\^-?[0-9]*[02468]\b)")
_ROUNDED_DOWN: Final = " (rounding down when the 5th decimal place is 5 or greater)"


def clear_question(family: str, question: str) -> str:
    """Return *question* without what contradicts its reference answer.

    reasoning-gym writes the base -2 of a square as ``-2^2``, which is -4 by the usual rule, and asks to round the fifth
    place of a root down if it is 5 or more.
    """
    match family:
        case "power_function":
            return _BARE_MINUS.sub(r"(\1)", question)
        case "polynomial_equations":
            return question.replace(_ROUNDED_DOWN, "")
    return question


def is_exact(family: str, task: Mapping[str, Any]) -> bool:
    """Return False if the reference answer was rounded after each operation, and so misses the last digit asked for."""
    if family != "decimal_arithmetic":
        return True
    expression = task["instruction"].splitlines()[-1].removesuffix(" = ?")
    reference = read_number(task["evaluation"]["entry"]["answer"])
    return rounded(exact_value(expression), 12) == rounded(reference, 12)


class Guesses:
    """The answers of one family, and in how many of its tasks each is right."""

    def __init__(self) -> None:
        self._tasks: list[Evaluation] = []
        self._earned: dict[str, float] = {}

    def admit(self, evaluation: object) -> bool:
        """Add a task by its evaluation; return False if one answer would then solve too many tasks."""
        task = Evaluation.read(evaluation)
        before = {task.answer: sum(other.judge(task.answer).score for other in self._tasks)} | self._earned
        earned = {answer: before[answer] + task.judge(answer).score for answer in before}
        if any(MOST_BY_ONE_ANSWER < total > before[answer] for answer, total in earned.items()):
            return False
        self._earned = earned
        self._tasks.append(task)
        return True

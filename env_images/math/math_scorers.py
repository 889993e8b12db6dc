"""Scores answers with reasoning-gym's own scorers, one for each family of tasks.

Differences from direct calls of the scorers: the answer is stripped and bounded. An answer of nan or inf is refused
(`complex_arithmetic` would score "nan" 1.0). If an odd answer causes an exception in a scorer, the score is 0.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from math_families import MODULES, Dataset, import_families, make_dataset

logger = logging.getLogger("envserver.math")

SCORER_PARAMETERS: Mapping[str, Mapping[str, int]] = {
    "decimal_arithmetic": {"max_num_decimal_places": 10},  # its precision of 12 digits minus 2
    "time_intervals": {"max_time_difference_seconds": 86_400, "max_date_difference_days": 100_000},
}
"""The generator parameters that a family's scorer reads again, as a tolerance or a scale, with their largest values.

The smallest value is 1. The scorers of the other families read no parameters.
"""

MAX_ANSWER_CHARS = 2_000
"""Eight times the longest reference answer (a list of moves for `jugs`); below the 4,300 digits that `int` accepts."""

MAX_ENTRY_CHARS = 4_000
"""Twelve times the largest entry, written out: a trainer's own task must not slow the scorer for other sessions."""

CACHED_SCORERS = 256
"""The number of kept scorers. A family has one; those in `SCORER_PARAMETERS` have one per combination of parameters."""

PARTIAL_ABOVE = 0.05
"""Some scorers give up to this score for any answer in the right form; a higher score means a partly right answer."""

_NOT_FINITE = re.compile(r"nan|inf")

_ANSWER_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions of scorers for odd answers: `int("x")`, an int too large for a float, JSON nested a thousand deep."""


class InvalidEvaluation(ValueError):
    """The task's evaluation cannot be used: an infrastructure failure, never a reward of 0."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The scoring of one task; `Evaluation.read` creates and checks it."""

    family: str
    parameters: tuple[tuple[str, int], ...]
    entry: Mapping[str, Any]
    """`answer`, the reference as a string, and `metadata`, further data for the scorer."""

    @classmethod
    def read(cls, data: object) -> Evaluation:
        """Read and check the `evaluation` of a task line.

        Raises:
            InvalidEvaluation: The shape is wrong, or the family or a parameter is not offered.
        """
        match data:
            case {
                "reward_function": "reasoning_gym",
                "family": str(family),
                "entry": {"answer": str(), "metadata": dict()} as entry,
                **rest,
            } if family in MODULES and len(repr(entry)) <= MAX_ENTRY_CHARS:
                return cls(family, _parameters(family, rest.get("parameters", {})), entry)
        raise InvalidEvaluation(
            "evaluation must be {reward_function: 'reasoning_gym', family, entry: {answer, metadata}} "
            f"with an entry of at most {MAX_ENTRY_CHARS} characters and a family out of {', '.join(sorted(MODULES))}"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The score of an answer."""

    score: float
    """The score in [0, 1]; 1 is right."""
    text: str
    """One sentence for the model, without information about the reference answer."""


class Scorers:
    """The families' scorers, loaded on first use or all together by `load`; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, tuple[tuple[str, int], ...]], Dataset] = {}

    def load(self) -> None:
        """Import every family, so that no session waits for an import.

        Raises:
            ImportError: A family can be found neither by its module nor by its name.
        """
        with self._lock:
            import_families(MODULES)

    def judge(self, evaluation: Evaluation, answer: str) -> Verdict:
        """Score *answer*; `MAX_ANSWER_CHARS` bounds the time for any answer."""
        answer = answer.strip()
        if reason := refusal(answer):
            return Verdict(0.0, f"Incorrect: {reason}.")
        try:
            score = bounded(self._scorer(evaluation).score_answer(answer, dict(evaluation.entry)))
        except _ANSWER_ERRORS as error:
            # The entry itself is sound: `check` has scored its reference answer before any session acts on it.
            logger.info("answer_unreadable family=%s error=%s", evaluation.family, type(error).__name__)
            return Verdict(0.0, "Incorrect: the answer is not in the form that the question asks for.")
        return Verdict(score, describe(score))

    def check(self, evaluation: Evaluation) -> None:
        """Prove that the task can be solved: its reference answer must score 1.

        Raises:
            InvalidEvaluation: It does not, so a reward of this task would mean nothing.
        """
        if self.judge(evaluation, evaluation.entry["answer"]).score != 1.0:
            raise InvalidEvaluation(f"the reference answer does not score 1 in the family {evaluation.family}")

    def _scorer(self, evaluation: Evaluation) -> Dataset:
        key = (evaluation.family, evaluation.parameters)
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                return kept
            if len(self._kept) >= CACHED_SCORERS:
                self._kept.clear()
            scorer = make_dataset(evaluation.family, size=1, **dict(evaluation.parameters))
            self._kept[key] = scorer
            return scorer


def refusal(answer: str) -> str | None:
    """Return the reason why no scorer may see *answer* (already stripped), or None."""
    if not answer:
        return "the answer is empty"
    if len(answer) > MAX_ANSWER_CHARS:
        return f"the answer is longer than {MAX_ANSWER_CHARS} characters"
    # Scorers drop blanks and case themselves ("N a N" is a number to one of them), so the guard does as well.
    if _NOT_FINITE.search("".join(answer.lower().split())):
        return "the answer is not a finite number"
    return None


def bounded(score: float) -> float:
    """Return *score* within [0, 1]; a scorer's arithmetic may exceed it or end in nan."""
    return min(1.0, max(0.0, float(score))) if math.isfinite(score) else 0.0


def describe(score: float) -> str:
    """Return *score* as a sentence."""
    if score == 1.0:
        return "Correct."
    if score <= PARTIAL_ABOVE:
        return "Incorrect."
    # Rounded down: 0.999 must not read as 1.00.
    return f"Partly correct: the answer scores {math.floor(score * 100) / 100:.2f} of 1."


def _parameters(family: str, given: object) -> tuple[tuple[str, int], ...]:
    """Check a task's scorer parameters, which must be exactly the parameters in `SCORER_PARAMETERS`."""
    largest = SCORER_PARAMETERS.get(family, {})
    if not isinstance(given, Mapping) or set(given) != set(largest):
        raise InvalidEvaluation(
            f"the scorer of {family} takes these parameters: {', '.join(sorted(largest)) or 'none'}"
        )
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest[name]:
            raise InvalidEvaluation(f"parameter {name} must be an integer from 1 to {largest[name]}")
    return tuple(sorted(given.items()))


def main(paths: Iterable[str]) -> int:
    """Check all families and the tasks of *paths*, JSON lines; return 1 if a task cannot be solved."""
    scorers = Scorers()
    scorers.load()
    faults = tasks = 0
    for task in (json.loads(line) for path in paths for line in Path(path).read_text("utf-8").split("\n") if line):
        tasks += 1
        try:
            scorers.check(Evaluation.read(task["evaluation"]))
        except InvalidEvaluation as error:
            faults += 1
            print(f"{task['id']}: {error}")
    print(f"{len(MODULES)} families, {tasks} tasks, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

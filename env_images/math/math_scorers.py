# ruff: noqa: RUF001, RUF002 - prime_factorization requires the multiplication sign
"""Scores answers by their value: the right one in any usual notation is 1, and anything else is 0.

reasoning-gym makes the questions. Its scorers are not used, because they pay for a share of the right text, for a
number in the wrong unit and for a value near the right one, and refuse usual notations. Two families give partial
credit, because part of their answer can be right: `polynomial_equations` for each root, and `advanced_geometry` for a
close radius.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

from envserver.answers import plain_number, read_number, unmarked

MAX_ANSWER_CHARS = 2_000
"""Eight times the longest reference answer (a list of moves for `jugs`); below the 4,300 digits that `int` accepts."""

MAX_ENTRY_CHARS = 4_000
"""Twelve times the largest entry, written out: a trainer's own task must not slow the scorer for other sessions."""

CLOSE_RADIUS = 0.5
"""The reward of an incircle's radius that is right to two decimal places and not to the three that are asked for."""

DAYS = ("days", "day")
DEGREES = (r"^{\circ}", r"^\circ", r"\circ", "°", "degrees", "degree")
WEEKDAYS = ("weekday_offset", "weekday_of_date_from_first_date", "weekday_of_date")
"""The tasks of `calendar_arithmetic` whose answer is a day of the week; the others count days."""

Judge: TypeAlias = Callable[[str, str, Mapping[str, Any]], float]
"""Returns the score of an answer, beside the reference answer and the entry's metadata."""


class InvalidEvaluation(ValueError):
    """The task's evaluation cannot be used: an infrastructure failure, never a reward of 0."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The scoring of one task; `Evaluation.read` creates and checks it."""

    family: str
    answer: str
    """The reference answer."""
    metadata: Mapping[str, Any]
    """Further data for the scorer."""

    @classmethod
    def read(cls, data: object) -> Evaluation:
        """Read and check the `evaluation` of a task line.

        Raises:
            InvalidEvaluation: The shape is wrong, the family is not offered, or the reference answer does not score 1,
                so a reward of this task would mean nothing.
        """
        match data:
            case {
                "reward_function": "reasoning_gym",
                "family": str(family),
                "entry": {"answer": str(answer), "metadata": dict(metadata)} as entry,
            } if family in JUDGES and len(repr(entry)) <= MAX_ENTRY_CHARS:
                made = cls(family, answer, metadata)
                try:
                    is_sound = made.judge(answer).score == 1.0
                except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                    raise InvalidEvaluation(f"evaluation.entry does not fit the family {family}: {error!r}") from error
                if not is_sound:
                    raise InvalidEvaluation(f"the reference answer does not score 1 in the family {family}")
                return made
        raise InvalidEvaluation(
            "evaluation must be {reward_function: 'reasoning_gym', family, entry: {answer, metadata}} "
            f"with an entry of at most {MAX_ENTRY_CHARS} characters and a family out of {', '.join(sorted(JUDGES))}"
        )

    def judge(self, answer: str) -> Verdict:
        """Score *answer*; `MAX_ANSWER_CHARS` bounds the time for any answer."""
        answer = answer.strip()
        if not answer:
            return Verdict(0.0, "Incorrect: the answer is empty.")
        if len(answer) > MAX_ANSWER_CHARS:
            return Verdict(0.0, f"Incorrect: the answer is longer than {MAX_ANSWER_CHARS} characters.")
        score = JUDGES[self.family](answer, self.answer, self.metadata)
        return Verdict(score, describe(score))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The score of an answer."""

    score: float
    """The score in [0, 1]; 1 is right."""
    text: str
    """One sentence for the model, without information about the reference answer."""


def describe(score: float) -> str:
    """Return *score* as a sentence."""
    if score in (0.0, 1.0):
        return "Correct." if score else "Incorrect."
    return f"Partly correct: the answer scores {score:.2f} of 1."


# -- numbers


def _number(*units: str) -> Judge:
    """Return a judge of numbers that are equal, with or without one of *units*."""

    def judge(answer: str, reference: str, _: Mapping[str, Any]) -> float:
        value = read_number(answer, units=units)
        return float(value is not None and value == read_number(reference, units=units))

    return judge


def _to_figures(figures: int) -> Judge:
    """Return a judge of numbers that are equal when both are rounded to *figures* significant figures."""

    def judge(answer: str, reference: str, _: Mapping[str, Any]) -> float:
        value, wanted = read_number(answer), read_number(reference)
        return float(None not in (value, wanted) and rounded(value, figures) == rounded(wanted, figures))

    return judge


def rounded(value: Fraction | None, figures: int) -> Fraction:
    """Round *value* to significant *figures*, half away from zero."""
    if not value:
        return Fraction(0)
    unit = Fraction(10) ** (len(str(abs(value.numerator))) - len(str(value.denominator)) - figures)
    while abs(value) / unit >= 10**figures:  # the estimate of the first figure's place may be one too low
        unit *= 10
    return (abs(value) / unit + Fraction(1, 2)).__floor__() * unit * (1 if value > 0 else -1)


def _is_near(answer: str, reference: str, distance: Fraction, *, units: Collection[str] = ()) -> bool:
    value, wanted = read_number(answer, units=units), read_number(reference, units=units)
    return value is not None and wanted is not None and abs(value - wanted) <= distance


def _fraction(answer: str, reference: str, _: Mapping[str, Any]) -> float:
    """Judge a fraction in lowest terms. Its value as a decimal number is not what these families ask for."""
    value, wanted = read_number(answer), read_number(reference)
    is_written = wanted is not None and (wanted.denominator == 1 or "/" in answer or "frac" in answer)
    return float(is_written and value == wanted)


def _complex(answer: str, _: str, metadata: Mapping[str, Any]) -> float:
    real, imaginary = metadata["result"]
    return float(_read_complex(answer) == (Fraction(repr(real)), Fraction(repr(imaginary))))


_REAL = r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]*)?"
_COMPLEX = re.compile(rf"(?P<real>{_REAL})(?P<sign>[+-])(?P<imaginary>{_REAL})[ij]|(?P<only>{_REAL})(?P<unit>[ij]?)")
_UNIT = re.compile(r"\s*(?:\*|·|\\cdot|\\times)?\s*([ij])\b", re.IGNORECASE)


def _read_complex(text: str) -> tuple[Fraction, Fraction] | None:
    """Read ``a + bi``, ``a`` or ``bi``, with i or j."""
    plain = re.sub(r"\s*([+-])\s*", r"\1", _UNIT.sub(lambda found: found[1].lower(), plain_number(text)))
    plain = plain.removeprefix("(").removesuffix(")") if plain.startswith("(") and plain.endswith(")") else plain
    if (found := _COMPLEX.fullmatch(plain)) is None:
        return None
    if found["sign"]:
        real = _coefficient(found["real"]) if found["real"] else Fraction(0)
        return _pair(real, _coefficient(found["sign"] + found["imaginary"], is_unit=True))
    if found["unit"]:
        return _pair(Fraction(0), _coefficient(found["only"], is_unit=True))
    return _pair(_coefficient(found["only"]), Fraction(0))


def _coefficient(text: str, *, is_unit: bool = False) -> Fraction | None:
    return Fraction(f"{text}1") if is_unit and text in ("", "+", "-") else read_number(text)


def _pair(real: Fraction | None, imaginary: Fraction | None) -> tuple[Fraction, Fraction] | None:
    return None if real is None or imaginary is None else (real, imaginary)


ROOT_DISTANCE = Fraction(1, 20_000)
"""Half a unit of the fourth decimal place, to which the questions round."""


def _roots(answer: str, reference: str, _: Mapping[str, Any]) -> float:
    """Return the share of the roots that are in the answer, less one for each number that is no root."""
    wanted = [read_number(root) for root in reference.split(",")]
    left, wrong = list(wanted), 0
    for value in _listed(answer):
        near = [root for root in left if root is not None and value is not None and abs(root - value) <= ROOT_DISTANCE]
        if near:
            left.remove(near[0])
        else:
            wrong += 1
    return max(0, len(wanted) - len(left) - wrong) / len(wanted)


_NAMED = re.compile(r"[A-Za-z](?:_?\{?[0-9]\}?)?\s*(?:=|\\in\b|≈|\\approx\b)\s*")


def _listed(text: str) -> list[Fraction | None]:
    """Return the numbers of a list that is separated by commas, semicolons or words; None stands for another text."""
    plain = unmarked(text).replace("\\{", "{").replace("\\}", "}")
    if plain[:1] + plain[-1:] in ("[]", "{}", "()"):
        plain = plain[1:-1]
    values: list[Fraction | None] = []
    for item in re.split(r"[,;\n]|\band\b|\bor\b|\\text\s*\{\s*(?:and|or)\s*\}", plain):
        item = _NAMED.sub("", unmarked(item), count=1)
        if item.startswith(("±", "\\pm")):
            both = read_number(item.removeprefix("±").removeprefix("\\pm"))
            values += [both, None if both is None else -both]
        elif item.strip():
            values.append(read_number(item))
    return values


def _factors(answer: str, reference: str, _: Mapping[str, Any]) -> float:
    found = _read_factors(answer)
    return float(found is not None and found == _read_factors(reference))


def _read_factors(text: str) -> Counter[int] | None:
    """Read ``2 × 2 × 3`` or ``2^2 · 3``, in any order."""
    factors = Counter[int]()
    for item in re.split(r"\s*(?:[×x*·,]|\\times\b|\\cdot\b)\s*", plain_number(text).replace("**", "^")):
        found = re.fullmatch(r"([0-9]{1,20})(?:\s*\^\s*[{(]?([0-9]{1,2})[)}]?)?", item)
        if found is None:
            return None
        factors[int(found[1])] += int(found[2] or 1)
    return factors


def _base(answer: str, reference: str, _: Mapping[str, Any]) -> float:
    """Judge digits in another base: their value is in the reference's digits."""
    digits = plain_number(answer).lower().removeprefix("+")
    digits = re.sub(r"_\{?[0-9]{1,2}\}?$", "", digits).strip("() ") if "_" in digits else digits
    if re.fullmatch(r"[0-9a-z]{1,3}(,[0-9a-z]{3})+", digits):
        digits = digits.replace(",", "")
    plain = digits.lstrip("0") or "0"
    return float(plain == reference or digits in (f"0b{reference}", f"0o{reference}", f"0x{reference}"))


# -- other forms


def _geometry(answer: str, reference: str, metadata: Mapping[str, Any]) -> float:
    match metadata["task_type"]:
        case "angle_measure":  # the reference has two decimal places, the question asks for three
            return float(_is_near(answer, reference, Fraction(1, 200), units=DEGREES))
        case "incircle_radius":
            if _is_near(answer, reference, Fraction(1, 2_000)):
                return 1.0
            return CLOSE_RADIUS * _is_near(answer, reference, Fraction(1, 200))
    places = [part.strip("()[] ") for part in re.sub(r"\\(?:left|right)\b", "", unmarked(answer)).split(",")]
    wanted = [part.strip("() ") for part in reference.split(",")]
    return float(
        len(places) == len(wanted) == 2
        and all(_is_near(place, other, Fraction(1, 2_000)) for place, other in zip(places, wanted, strict=True))
    )


def _calendar(answer: str, reference: str, metadata: Mapping[str, Any]) -> float:
    if metadata["task"] in WEEKDAYS:
        return float(unmarked(answer).casefold() == reference.casefold())
    return _number("business days", *DAYS)(answer, reference, metadata)


def _interval(answer: str, reference: str, metadata: Mapping[str, Any]) -> float:
    if metadata["task_type"] == "date":
        return _number(*DAYS)(answer, reference, metadata)
    seconds = _clock_s(answer)
    return float(seconds is not None and seconds == _clock_s(reference))


def _clock_s(text: str) -> int | None:
    """Return the seconds of ``HH:MM`` or ``HH:MM:SS``."""
    found = re.fullmatch(r"\+?([0-9]{1,4}):([0-5][0-9])(?::([0-5][0-9]))?", plain_number(text))
    return None if found is None else int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3] or 0)


_MOVE = re.compile(r"(fill|empty) ([A-J])|pour ([A-J])\s*->\s*(?!\3)([A-J])")


def _moves(answer: str, _: str, metadata: Mapping[str, Any]) -> float:
    """Judge a list of moves for jugs by pouring: any list that reaches the target is right."""
    text = re.sub(r"\A```(?:json)?\s*|\s*```\Z", "", answer.strip())
    try:
        moves = json.loads(text)
    except (ValueError, RecursionError):
        return 0.0
    capacities, target = metadata["puzzle"]["jug_capacities"], metadata["puzzle"]["target"]
    names = "ABCDEFGHIJ"[: len(capacities)]
    filled = dict.fromkeys(names, 0)
    capacity = dict(zip(names, capacities, strict=True))
    for move in moves if isinstance(moves, list) else [None]:
        found = _MOVE.fullmatch(move) if isinstance(move, str) else None
        if found is None or not {jug for jug in found.groups()[1:] if jug} <= set(names):
            return 0.0
        if found[1]:
            filled[found[2]] = capacity[found[2]] if found[1] == "fill" else 0
        else:
            poured = min(filled[found[3]], capacity[found[4]] - filled[found[4]])
            filled[found[3]] -= poured
            filled[found[4]] += poured
    return float(target in filled.values())


JUDGES: Mapping[str, Judge] = {
    **dict.fromkeys(
        ("chain_sum", "basic_arithmetic", "products", "simple_equations", "gcd", "lcm", "number_sequence"), _number()
    ),
    "advanced_geometry": _geometry,
    "base_conversion": _base,
    "calendar_arithmetic": _calendar,
    "complex_arithmetic": _complex,
    "count_primes": _number("prime numbers", "primes", "prime number", "prime"),
    "decimal_arithmetic": _to_figures(12),
    "dice": _fraction,
    "fraction_simplification": _fraction,
    "jugs": _moves,
    "leg_counting": _number("legs", "leg"),
    "polynomial_equations": _roots,
    "power_function": _to_figures(3),
    "prime_factorization": _factors,
    "simple_geometry": _number(*DEGREES),
    "time_intervals": _interval,
}
"""The judge of each offered family, by reasoning-gym's name."""


def main(paths: Iterable[str]) -> int:
    """Check the tasks of *paths*, JSON lines; return 1 if a task cannot be solved."""
    faults = tasks = 0
    for task in (json.loads(line) for path in paths for line in Path(path).read_text("utf-8").split("\n") if line):
        tasks += 1
        try:
            Evaluation.read(task["evaluation"])
        except InvalidEvaluation as error:
            faults += 1
            print(f"{task['id']}: {error}")
    print(f"{len(JUDGES)} families, {tasks} tasks, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

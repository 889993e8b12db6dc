"""Computes the answers a second time, without reasoning-gym, from a generated entry's data about its problem.

A wrong reference answer teaches a model the wrong thing, and no scorer notices it. Therefore the generator keeps only
entries for which `confirmed` returns True. reasoning-gym 0.1.25 needs this check. For example, it takes floors of
inexact divisions as results (`basic_arithmetic`), loses real roots (`polynomial_equations`), and asks for angles of 257
degrees in convex polygons (`simple_geometry`). It counts business days up to a date of the next year although the
question names the current year (`calendar_arithmetic`). Problems with two right answers, such as 03/04/2031, are
refused too. So are problems whose answer a guess finds, such as a greatest common divisor of 1.
"""

from __future__ import annotations

import ast
import calendar
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import date, timedelta
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

Metadata = Mapping[str, Any]

_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}

WEEKDAYS = list(calendar.day_name)

TIMES = "\N{MULTIPLICATION SIGN}"

_AMBIGUOUS_DATE = re.compile(r"\b\d\d/(0\d|1[012])/\d{4}")
"""A date in reasoning-gym's order, month first, that half of the world reads day first."""


def confirmed(family: str, question: str, answer: str, metadata: Metadata) -> bool:
    """Return True if *answer* is the only right answer to the problem that *question* and *metadata* state.

    *metadata* is the generator's own, before it is stored. False also means that the problem must be omitted.
    """
    try:
        return not _AMBIGUOUS_DATE.search(question) and _CHECKS[family](question, answer, metadata)
    except (ArithmeticError, SyntaxError):  # 1 / (3 - 3)
        return False


def exact_value(expression: str) -> Fraction:
    """Evaluate an arithmetic *expression* of numbers, + - * / and parentheses without rounding."""

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int() | float()):
                return Fraction(ast.unparse(node))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return _OPERATORS[type(op)](value(left), value(right))
        raise SyntaxError(f"not arithmetic: {ast.unparse(node)}")

    return value(ast.parse(expression.strip(), mode="eval").body)


def _expression(_: str, answer: str, metadata: Metadata) -> bool:
    return exact_value(metadata["expression"]) == Fraction(answer)


def _product(_: str, answer: str, metadata: Metadata) -> bool:
    return exact_value(metadata["expression"]) == Fraction(answer) != 0


def _decimal(question: str, answer: str, _: Metadata) -> bool:
    expression = question.splitlines()[-1].removesuffix(" = ?")
    exact = exact_value(expression)
    with localcontext() as context:
        context.prec = 12
        rounded = Decimal(exact.numerator) / Decimal(exact.denominator)
    # The scorer allows one unit of the operands' last place, up to 0.1, so a guess could find a small result. Each
    # operation of the reference was rounded to 12 digits, so its last digits may differ from these.
    return abs(rounded) >= 1 and abs(Decimal(answer) - rounded) <= Decimal("1e-9") * max(Decimal(1), abs(rounded))


def _fraction(_: str, answer: str, metadata: Metadata) -> bool:
    simplest = Fraction(metadata["numerator"], metadata["denominator"])
    found = [int(number) for number in re.findall(r"\d+", answer)]
    return found == [simplest.numerator, simplest.denominator]


def _power(_: str, answer: str, metadata: Metadata) -> bool:
    exact = Fraction(repr(metadata["base"])) ** metadata["exponent"]
    return math.isclose(float(exact), float(answer), rel_tol=1e-9)


def _linear_equation(_: str, answer: str, metadata: Metadata) -> bool:
    left, right = metadata["equation"].split("=")

    def left_at(x: Fraction) -> Fraction:
        return exact_value(re.sub(rf"\b{metadata['variable']}\b", f"({x})", left))

    # Linear by construction, so two values give the slope. With a slope of 0, every x would be a solution.
    slope = left_at(Fraction(1)) - left_at(Fraction(0))
    return slope != 0 and (exact_value(right) - left_at(Fraction(0))) / slope == Fraction(answer)


def _polynomial(_: str, answer: str, metadata: Metadata) -> bool:
    # The generator has loaded sympy by now; the other families do not need it.
    from sympy import Poly, parse_expr  # type: ignore[import-untyped]  # sympy has no stubs

    roots = Poly(parse_expr(metadata["polynomial_expr"])).real_roots(multiple=False)
    expected = sorted({round(float(root.evalf(20)), 4) for root, _ in roots})
    # Zero alone is the answer to every question of one term.
    return expected == [float(root) for root in answer.split(",") if root] and expected not in ([], [0.0])


def _complex(_: str, __: str, metadata: Metadata) -> bool:
    a, b, result = (complex(*metadata[key]) for key in ("num1", "num2", "result"))
    match metadata["operation"]:
        case "+":
            return a + b == result
        case "-":
            return a - b == result
        case "*":
            return a * b == result
    return result * b == a


def _gcd(_: str, answer: str, metadata: Metadata) -> bool:
    # 1 is omitted: it is the answer for three of five random pairs, so a guess would earn a reward.
    return math.gcd(*metadata["numbers"]) == int(answer) > 1


def _lcm(_: str, answer: str, metadata: Metadata) -> bool:
    return math.lcm(*metadata["numbers"]) == int(answer)


def _factors(_: str, answer: str, metadata: Metadata) -> bool:
    factors = [int(factor) for factor in answer.split(TIMES)]
    return math.prod(factors) == int(metadata["number"]) and all(map(_is_prime, factors)) and len(factors) > 1


def _primes(_: str, answer: str, metadata: Metadata) -> bool:
    return sum(map(_is_prime, range(metadata["start"], metadata["end"] + 1))) == int(answer) > 1


def _base(_: str, answer: str, metadata: Metadata) -> bool:
    value = int(metadata["source_repr"], metadata["source_base"])
    return value == int(answer, metadata["target_base"]) and answer == answer.lstrip("0").lower()


def _polygon(_: str, answer: str, metadata: Metadata) -> bool:
    angle = 180 * (int(metadata["n_sides"]) - 2) - sum(map(Fraction, metadata["known_angles"]))
    return angle == Fraction(answer) and 0 < angle < 180


def _triangle(_: str, answer: str, metadata: Metadata) -> bool:
    a, b, c = ([int(x) for x in metadata[vertex]] for vertex in "ABC")
    sides = [math.dist(b, c), math.dist(c, a), math.dist(a, b)]
    area = abs((b[0] - a[0]) * (c[1] - a[1]) - (c[0] - a[0]) * (b[1] - a[1])) / 2
    numbers = [float(number) for number in re.findall(r"-?\d+\.\d+", answer)]
    match metadata["task_type"]:
        case "angle_measure":
            opposite, after, before = sides[1], sides[0], sides[2]
            cosine = (after**2 + before**2 - opposite**2) / (2 * after * before)
            expected, places = [math.degrees(math.acos(max(-1.0, min(1.0, cosine))))], 2
            # The question asks for 3 decimals and the scorer rounds them to 2: omit angles for which that makes a
            # difference.
            if abs(100 * expected[0] % 1 - 0.5) < 0.06:
                return False
        case "incircle_radius":
            expected, places = [2 * area / sum(sides)], 3
            if answer.endswith("0"):  # compared as a string, so 0.5 would be wrong for 0.500
                return False
        case _:
            expected, places = _orthocenter(a, b, c), 3
    # Half a unit of the last place, and a margin for this module's own floats.
    return len(numbers) == len(expected) and all(
        abs(number - value) <= 0.51 * 10**-places for number, value in zip(numbers, expected, strict=True)
    )


def _orthocenter(a: list[int], b: list[int], c: list[int]) -> list[float]:
    """Solve (h - a)·(b - c) = 0 and (h - b)·(c - a) = 0 by Cramer's rule."""
    (p, q), (r, s) = (b[0] - c[0], b[1] - c[1]), (c[0] - a[0], c[1] - a[1])
    first, second = p * a[0] + q * a[1], r * b[0] + s * b[1]
    determinant = p * s - q * r
    return [
        float(Fraction(first * s - q * second, determinant)),
        float(Fraction(p * second - first * r, determinant)),
    ]


def _dice(_: str, answer: str, metadata: Metadata) -> bool:
    totals = Counter({0: 1})
    for die in metadata["puzzle"]["dice_str"].split(", "):
        rolled: Counter[int] = Counter()
        for total, ways in totals.items():
            for face in range(1, int(die.removeprefix("1d")) + 1):
                rolled[total + face] += ways
        totals = rolled
    enough = sum(ways for total, ways in totals.items() if total >= metadata["puzzle"]["target"])
    odds = Fraction(enough, totals.total())
    return f"{odds.numerator}/{odds.denominator}" == answer


def _sequence(question: str, answer: str, metadata: Metadata) -> bool:
    shown = [int(term) for term in question.removesuffix(", ?").split(",")]
    # "3, 1, 0, 0, 0, ?" reveals too little of its rule.
    return [*shown, int(answer)] == list(metadata["sequence"]) and len(set(shown)) >= 4


def _calendar(question: str, answer: str, metadata: Metadata) -> bool:
    days = {key: date.fromisoformat(metadata[key]) for key in metadata if key.endswith("_date")}
    match metadata["task"]:
        case "weekday_offset":
            day = days["start_date"] + timedelta(days=metadata["offset_days"])
            return WEEKDAYS[day.weekday()] == answer
        case "weekday_of_date":
            return WEEKDAYS[days["target_date"].weekday()] == answer
        case "weekday_of_date_from_first_date":
            # The question names no year, so a date after February would have two answers.
            first, day = WEEKDAYS.index(metadata["first_day"]), days["target_date"]
            return day.month <= 2 and WEEKDAYS[(first + day.timetuple().tm_yday - 1) % 7] == answer
        case "recurring_event_day":
            month = [week[WEEKDAYS.index(metadata["weekday"])] for week in _weeks(metadata["year"], metadata["month"])]
            place = {"first": 0, "second": 1, "third": 2, "fourth": 3, "last": -1}[metadata["ordinal"]]
            return [day for day in month if day][place] == int(answer)
    start, end = days["start_date"], days["end_date"]
    span = [start + timedelta(days=n) for n in range((end - start).days + 1)]
    if metadata["task"] == "count_business_days":
        # The question writes the year of the start behind both dates.
        return start.year == end.year and sum(day.weekday() < 5 for day in span) == int(answer)
    wanted = re.search(r"many (\w+day)s|of (\w+day) from|does (\w+day) occur", question)
    name = next(filter(None, wanted.groups())) if wanted else ""
    return sum(WEEKDAYS[day.weekday()] == name for day in span) == int(answer) > 0


def _weeks(year: int, month: int) -> list[list[int]]:
    return calendar.Calendar().monthdayscalendar(year, month)


def _interval(question: str, answer: str, metadata: Metadata) -> bool:
    if metadata["task_type"] == "date":
        start, end = (date.fromisoformat(metadata[key].split()[0]) for key in ("start_time", "end_time"))
        return end > start and answer == f"{(end - start).days} days"
    start_s, end_s = (_clock_s(clock) for clock in re.findall(r"\d\d:\d\d(?::\d\d)?", question)[:2])
    return end_s > start_s and _clock_s(answer) == end_s - start_s


def _clock_s(clock: str) -> int:
    hours, minutes, *seconds = (int(part) for part in clock.split(":"))
    return 3600 * hours + 60 * minutes + sum(seconds)


def _legs(_: str, answer: str, metadata: Metadata) -> bool:
    from reasoning_gym.arithmetic.leg_counting import ANIMALS  # the question omits the number of a beetle's legs

    animals: Mapping[str, int] = metadata["animals"]
    return int(answer) == sum(count * int(ANIMALS[animal]) for animal, count in animals.items())


def _jugs(_: str, answer: str, metadata: Metadata) -> bool:
    capacities: list[int] = metadata["puzzle"]["jug_capacities"]
    held = [0] * len(capacities)
    for move in json.loads(answer):
        verb, jugs = move.split()
        first, *rest = (ord(jug) - ord("A") for jug in jugs.split("->"))
        match verb:
            case "fill":
                held[first] = capacities[first]
            case "empty":
                held[first] = 0
            case _:
                poured = min(held[first], capacities[rest[0]] - held[rest[0]])
                held[first] -= poured
                held[rest[0]] += poured
    return int(metadata["puzzle"]["target"]) in held


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


_CHECKS: Mapping[str, Callable[[str, str, Metadata], bool]] = {
    "advanced_geometry": _triangle,
    "base_conversion": _base,
    "basic_arithmetic": _expression,
    "calendar_arithmetic": _calendar,
    "chain_sum": _expression,
    "complex_arithmetic": _complex,
    "count_primes": _primes,
    "decimal_arithmetic": _decimal,
    "dice": _dice,
    "fraction_simplification": _fraction,
    "gcd": _gcd,
    "jugs": _jugs,
    "lcm": _lcm,
    "leg_counting": _legs,
    "number_sequence": _sequence,
    "polynomial_equations": _polynomial,
    "power_function": _power,
    "prime_factorization": _factors,
    "products": _product,
    "simple_equations": _linear_equation,
    "simple_geometry": _polygon,
    "time_intervals": _interval,
}

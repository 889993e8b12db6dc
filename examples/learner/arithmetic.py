"""Reading and reducing arithmetic: what the policy sees of a `math` task, and what it can do about it.

The text is cut into numbers, operators and brackets. A decision reduces two neighbouring numbers to one: which two, and
by which procedure. The policy is not told what an operator means, what binds tighter, or in which order equals are
taken: it sees the operator, what stands beside it, and how long the numbers are. An expression of *n* operators takes
*n* decisions which all have to be right, so long ones have no signal before short ones are known.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal
from fractions import Fraction
from typing import Final

from examples.learner.policy import Decision, Features, Policy

TAGS: Final = ("chain_sum", "basic_arithmetic", "decimal_arithmetic")
"""Families whose questions are expressions."""
MOST_TOKENS: Final = 200
DIGITS: Final = 12
"""Significant ones of an answer that is no whole number: what the questions ask for."""

Token = Fraction | str

_TOKENS = re.compile(r"\d+(?:\.\d+)?|[-+*/()]")
_EXPRESSION = re.compile(r"[-+*/(). \d]*\d[-+*/(). \d]*")
_KINDS: Final[Mapping[str, str]] = {"+": "sum", "-": "sum", "*": "product", "/": "product", "(": "open", ")": "close"}


def _ratio(left: Fraction, right: Fraction) -> Fraction:
    return left / right if right else Fraction(0)


PROCEDURES: Final[Mapping[str, Callable[[Fraction, Fraction], Fraction]]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "subtract_from": lambda left, right: right - left,
    "multiply": operator.mul,
    "divide": _ratio,
    "divide_into": lambda left, right: _ratio(right, left),
    "first": lambda left, _: left,
    "second": lambda _, right: right,
    "larger": max,
    "smaller": min,
    "distance": lambda left, right: abs(left - right),
    "middle": lambda left, right: (left + right) / 2,
    "remainder": lambda left, right: left % right if right else Fraction(0),
    "negated": lambda left, right: -left - right,
}
"""What can be done with two numbers, for the policy to choose from."""


def read(question: str) -> list[Token]:
    """Cut the longest expression out of *question*. A minus before a bracket becomes ``-1 *``.

    Raises:
        ValueError: there is none, or it is longer than `MOST_TOKENS`.
    """
    found = max(_EXPRESSION.findall(question), key=lambda text: len(text.strip(" .")), default="")
    tokens: list[Token] = []
    sign = 1
    for text in _TOKENS.findall(found):
        begins = not tokens or (isinstance(tokens[-1], str) and tokens[-1] != ")")
        if text == "-" and begins:
            sign = -sign
        elif text == "(" and sign < 0:
            tokens += [Fraction(-1), "*", "("]
            sign = 1
        elif text[0].isdigit():
            tokens.append(sign * Fraction(text))
            sign = 1
        else:
            tokens.append(text)
    if not tokens or len(tokens) > MOST_TOKENS:
        raise ValueError(f"no expression of 1 to {MOST_TOKENS} parts in {question!r}")
    return _unwrapped(tokens)


def solve(question: str, policy: Policy, chance: random.Random) -> tuple[str, tuple[Decision, ...]]:
    """An answer to *question* as *policy* works it out, and what it decided on the way. Raises ``ValueError``."""
    tokens = read(question)
    decisions = []
    while places := reducible(tokens):
        choices = [(place, procedure) for place in places for procedure in PROCEDURES]
        decision = policy.decide([features(tokens, *choice) for choice in choices], chance)
        tokens = reduced(tokens, *choices[decision.taken])
        decisions.append(decision)
    return written(tokens[0]), tuple(decisions)


def reducible(tokens: Sequence[Token]) -> list[int]:
    """The places of operators that stand between two numbers."""
    return [
        at
        for at in range(1, len(tokens) - 1)
        if isinstance(tokens[at - 1], Fraction) and isinstance(tokens[at + 1], Fraction)
    ]


def reduced(tokens: Sequence[Token], at: int, procedure: str) -> list[Token]:
    """*tokens* with the operator at *at* carried out, by *procedure*, whatever it is."""
    left, right = tokens[at - 1], tokens[at + 1]
    assert isinstance(left, Fraction)
    assert isinstance(right, Fraction)
    return _unwrapped([*tokens[: at - 1], PROCEDURES[procedure](left, right), *tokens[at + 2 :]])


def features(tokens: Sequence[Token], at: int, procedure: str) -> Features:
    """What is seen of carrying out the operator at *at* by *procedure*."""
    sign, left, right = tokens[at], tokens[at - 1], tokens[at + 1]
    assert isinstance(left, Fraction)
    assert isinstance(right, Fraction)
    before, after = _kind(tokens, at - 2), _kind(tokens, at + 2)
    size = _size(max(abs(left), abs(right)))
    return (
        f"{sign} {procedure}",
        f"{sign} {procedure} {size}",
        f"{_KINDS[str(sign)]} after {before}",
        f"{_KINDS[str(sign)]} before {after}",
    )


def written(value: Token) -> str:
    """A number as an answer: whole, or with as many digits as are asked for."""
    if not isinstance(value, Fraction):
        return str(value)
    if value.denominator == 1:
        return str(value.numerator)
    context = Context(prec=DIGITS, rounding=ROUND_HALF_UP)
    return format(context.divide(Decimal(value.numerator), Decimal(value.denominator)), "f")


def _unwrapped(tokens: list[Token]) -> list[Token]:
    """Take away brackets round one number."""
    at = 0
    while at + 2 < len(tokens):
        if tokens[at] == "(" and isinstance(tokens[at + 1], Fraction) and tokens[at + 2] == ")":
            tokens[at : at + 3] = [tokens[at + 1]]
            at = max(0, at - 1)
        else:
            at += 1
    return tokens


def _kind(tokens: Sequence[Token], at: int) -> str:
    if not 0 <= at < len(tokens):
        return "end"
    token = tokens[at]
    return _KINDS[token] if isinstance(token, str) else "number"


def _size(value: Fraction) -> str:
    """How long a number is, and whether it is whole."""
    digits = len(str(int(value)))
    return f"{min(digits, 8)}{'' if value.denominator == 1 else 'd'}"

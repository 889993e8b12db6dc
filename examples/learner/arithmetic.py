"""Reading and reducing arithmetic: the policy's view of a `math` task, and its moves.

The text is split into numbers, operators and brackets. A decision reduces two neighbouring numbers to one. It chooses
the pair and the procedure. The policy does not know the meaning of an operator, the precedence, or the order of equal
operators. It sees the operator, the tokens next to the pair, and the length of the numbers. An expression of *n*
operators takes *n* decisions, which must all be right. So long expressions have no signal before short ones are learnt.
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
"""Number of significant digits of an answer that is not a whole number, as the questions require."""

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
"""Operations on two numbers, for the policy to choose from."""


def read(question: str) -> list[Token]:
    """Extract the longest expression in *question*. A minus before a bracket becomes ``-1 *``.

    Raises:
        ValueError: There is no expression, or it is longer than `MOST_TOKENS`.
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
    """Return the policy's answer to *question*, and its decisions. Raises ``ValueError``."""
    tokens = read(question)
    decisions = []
    while places := reducible(tokens):
        choices = [(place, procedure) for place in places for procedure in PROCEDURES]
        decision = policy.decide([features(tokens, *choice) for choice in choices], chance)
        tokens = reduced(tokens, *choices[decision.taken])
        decisions.append(decision)
    return written(tokens[0]), tuple(decisions)


def reducible(tokens: Sequence[Token]) -> list[int]:
    """Return the positions of operators between two numbers."""
    return [
        at
        for at in range(1, len(tokens) - 1)
        if isinstance(tokens[at - 1], Fraction) and isinstance(tokens[at + 1], Fraction)
    ]


def reduced(tokens: Sequence[Token], at: int, procedure: str) -> list[Token]:
    """Return *tokens* with the operator at *at* replaced by the result of *procedure*, even a wrong one."""
    left, right = tokens[at - 1], tokens[at + 1]
    assert isinstance(left, Fraction)
    assert isinstance(right, Fraction)
    return _unwrapped([*tokens[: at - 1], PROCEDURES[procedure](left, right), *tokens[at + 2 :]])


def features(tokens: Sequence[Token], at: int, procedure: str) -> Features:
    """Return the features of applying *procedure* to the operator at *at*."""
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
    """Return a number as an answer: whole, or with the required number of digits."""
    if not isinstance(value, Fraction):
        return str(value)
    if value.denominator == 1:
        return str(value.numerator)
    context = Context(prec=DIGITS, rounding=ROUND_HALF_UP)
    return format(context.divide(Decimal(value.numerator), Decimal(value.denominator)), "f")


def _unwrapped(tokens: list[Token]) -> list[Token]:
    """Remove brackets around one number."""
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
    """Return the number of digits, and whether the number is whole."""
    digits = len(str(int(value)))
    return f"{min(digits, 8)}{'' if value.denominator == 1 else 'd'}"

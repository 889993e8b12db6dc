"""Reads what a case says about the value of a call, such as `answer == {2}`, and judges a value by it.

The value arrives from a sandbox in the form of `coding_driver.encoded`. It becomes no Python object of the solution's
choice here, so none of the solution's methods and no hash table of its values takes part. Equality is Python's own:
`True == 1 == 1.0`, a list never equals a tuple, and NaN equals nothing.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from coding_compare import NotAnAnswer
from coding_driver import encoded

MAX_TEXT_CHARS = 100_000
MAX_RATIO_CHARS = 10_000
"""The maximum length of the parts of a fraction, whose reduction takes quadratic time."""
LONGER = 16
"""An answer that is this many times as long as the expected value does not equal it: as long as the longest number (a
complex one) is in comparison with the shortest."""


class InvalidCheck(ValueError):
    """The text is not a statement about an answer that the server can judge."""


@dataclass(frozen=True, slots=True)
class Check:
    """A statement about the value of a call."""

    is_truth: bool
    """True if only the value's truth counts. Then the driver sends only this."""
    holds: Callable[[Any], bool]
    """Takes the value in the form of `encoded`. It raises `NotAnAnswer` for any other form."""
    shown: str
    """The statement with the call in the place of `answer`."""


def read_check(text: object, *, call: object) -> Check:
    """Read a statement about the value of *call* in one of the forms in the table of tasks/coding/README.md.

    Raises:
        InvalidCheck: The text has no such form, or *call* is not the text of an expression.
    """
    for name, given in (("call", call), ("test", text)):
        if not isinstance(given, str) or len(given) > MAX_TEXT_CHARS:
            raise InvalidCheck(f"{name} must be a text of at most {MAX_TEXT_CHARS} characters")
    try:
        node, expression = ast.parse(str(text), mode="eval").body, ast.parse(str(call), mode="eval").body
        found = _read(node)
        shown = ast.unparse(_Filled(expression).visit(node))
    except (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise InvalidCheck(f"call {call!r:.100} with test {text!r:.100} cannot be read: {error}") from None
    if found is None:
        forms = "answer, not answer, answer == VALUE, answer is None, abs(answer - NUMBER) < NUMBER or math.isclose(…)"
        raise InvalidCheck(f"test {text!r:.100} must have one of the forms {forms}")
    is_truth, holds = found
    return Check(is_truth, holds, shown)


def _read(node: ast.expr) -> tuple[bool, Callable[[Any], bool]] | None:
    """Return whether only the truth counts, and the judging function."""
    match node:
        case ast.Name("answer"):
            return True, lambda tree: tree is True
        case ast.UnaryOp(ast.Not(), ast.Name("answer")):
            return True, lambda tree: tree is False
        case ast.Compare(
            ast.Name("answer"), [ast.Is() | ast.IsNot() as operator], [ast.Constant(None | bool() as one)]
        ):
            is_one = isinstance(operator, ast.Is)
            return False, lambda tree: (tree is one) is is_one
        case ast.Compare(ast.Name("answer"), [ast.Eq() | ast.NotEq() as operator], [value]):
            return False, _equality(ast.literal_eval(value), isinstance(operator, ast.Eq))
        case ast.Compare(
            ast.Call(ast.Name("abs"), [ast.BinOp(ast.Name("answer"), ast.Sub(), value)], []),
            [ast.Lt() | ast.LtE() as operator],
            [limit],
        ):
            return False, _nearness(_number(value), _number(limit), isinstance(operator, ast.Lt))
        case ast.Call(ast.Attribute(ast.Name("math"), "isclose"), [ast.Name("answer"), value], keywords):
            return False, _closeness(_number(value), keywords)
    return None


def _number(node: ast.expr) -> int | float:
    value = ast.literal_eval(node)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{value!r:.60} is not a number")
    return value


def _equality(expected: object, is_equal: bool) -> Callable[[Any], bool]:
    tree = encoded(expected)
    wanted, longest = key(tree), LONGER * len(json.dumps(tree)) + LONGER

    def holds(tree: Any) -> bool:
        return (_is_shorter(tree, longest) and _key(tree) == wanted) is is_equal

    return holds


def _is_shorter(tree: Any, longest: int) -> bool:
    try:
        return len(json.dumps(tree)) <= longest
    except RecursionError:
        return False


def _nearness(expected: int | float, limit: int | float, is_below: bool) -> Callable[[Any], bool]:
    def holds(tree: Any) -> bool:
        try:
            distance: float = abs(_value(tree) - expected)
        except OverflowError:  # an integer beyond any float
            return False
        return distance < limit if is_below else distance <= limit

    return holds


def _closeness(expected: int | float, keywords: Sequence[ast.keyword]) -> Callable[[Any], bool]:
    tolerances = {str(keyword.arg): _number(keyword.value) for keyword in keywords}
    math.isclose(expected, expected, **tolerances)  # raises for other names and for negative values

    def holds(tree: Any) -> bool:
        value = _value(tree)
        try:
            return not isinstance(value, complex) and math.isclose(value, expected, **tolerances)
        except OverflowError:
            return False

    return holds


def _value(tree: Any) -> Any:
    """Return the number that *tree* stands for; NaN, which is near nothing, for anything else."""
    _key(tree)
    match tree:
        case bool():
            return int(tree)
        case ["int", str(digits)]:
            return int(digits, 16)
        case ["float", str(digits)]:
            return float.fromhex(digits)
        case ["complex", str(real), str(imaginary)]:
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case ["ratio", str(above), str(below)]:
            return Fraction(int(above, 16), int(below, 16))
    return math.nan


def _key(tree: Any) -> bytes:
    """Return the `key` of a value from a sandbox.

    Raises:
        NotAnAnswer: It does not have the form of an encoded value.
    """
    try:
        return key(tree)
    except (ValueError, TypeError, OverflowError, RecursionError, ZeroDivisionError) as error:
        raise NotAnAnswer(type(error).__name__) from None


def key(tree: Any) -> bytes:
    """Return a digest of an encoded value; two values have the same digest if and only if they are equal.

    Raises:
        ValueError, TypeError, OverflowError, RecursionError, ZeroDivisionError: It does not have that form.
    """
    match tree:
        case None:
            return _digest(b"none")
        case bool():
            return _ratio_key(int(tree), 1)
        case str():
            return _digest(b"text", tree.encode("utf-8", "surrogatepass"))
        case ["int", str(digits)]:
            return _ratio_key(int(digits, 16), 1)
        case ["float", str(digits)]:
            return _float_key(float.fromhex(digits))
        case ["complex", str(real), str(imaginary)]:
            parts = float.fromhex(real), float.fromhex(imaginary)
            return _digest(b"complex", *map(_float_key, parts)) if parts[1] else _float_key(parts[0])
        case ["ratio" | "decimal", str(above), str(below)] if len(above) + len(below) <= MAX_RATIO_CHARS:
            return _ratio_key(*Fraction(int(above, 16), int(below, 16)).as_integer_ratio())
        case ["bytes", str(digits)]:
            return _digest(b"bytes", bytes.fromhex(digits))
        case ["list" | "tuple" as kind, list(items)]:
            return _digest(kind.encode(), *map(key, items))
        case ["set", list(items)]:
            return _digest(b"set", *sorted(set(map(key, items))))
        case ["dict", list(items)]:
            return _digest(b"dict", *sorted(key(name) + key(value) for name, value in items))
        case ["other"]:
            return os.urandom(32)
    raise ValueError("no such form")


def _ratio_key(above: int, below: int) -> bytes:
    return _digest(b"number", f"{above:x}/{below:x}".encode())


def _float_key(value: float) -> bytes:
    if math.isnan(value):
        return os.urandom(32)
    return _digest(b"infinity", str(value).encode()) if math.isinf(value) else _ratio_key(*value.as_integer_ratio())


def _digest(kind: bytes, *parts: bytes) -> bytes:
    digest = hashlib.sha256(kind)
    for part in parts:
        digest.update(b"%d:" % len(part) + part)
    return digest.digest()


class _Filled(ast.NodeTransformer):
    """Puts an expression in the place of `answer`."""

    def __init__(self, call: ast.expr) -> None:
        self._call = call

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._call if node.id == "answer" else node

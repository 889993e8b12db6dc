"""Named reward functions: ``contains('x', case=False)`` is a name and literals, read as such and never evaluated.

The environment has the functions and decides what a name means; here is only found out whether it is one.
"""

from __future__ import annotations

import ast
import keyword
import math
import re
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_CHARS = 4_096
"""The longest call; larger values belong beside it, as further keys of ``evaluation``."""
MAX_DEPTH = 16
"""How deep lists and mappings may stand in one another."""
_WANTED = "a name with literal arguments is wanted, as in contains('done')"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_filters = threading.Lock()
"""``catch_warnings`` swaps the process's filters: two at once would leave the wrong ones."""


@dataclass(frozen=True, slots=True)
class RewardCall:
    """A reward function's name and its arguments: JSON's kinds of values only, tuples as lists."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def parse_reward(text: str) -> RewardCall:
    """Read ``name`` or ``name(literal, …, key=literal, …)``.

    Raises:
        ValueError: it is something else; the message says what.
    """
    if len(text) > MAX_CHARS:
        raise ValueError(f"longer than {MAX_CHARS} characters")
    if _NAME.fullmatch(text.strip()) and not keyword.iskeyword(text.strip()):
        return RewardCall(text.strip())
    try:
        # People write '\\d' in a pattern, of which Python warns.
        with _filters, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last three are the parser's own bounds
        raise ValueError(_WANTED) from None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(_WANTED)
    kwargs: dict[str, Any] = {}
    for named in node.keywords:
        if named.arg is None:
            raise ValueError("** is not taken")
        if named.arg in kwargs:
            raise ValueError(f"{named.arg} is given twice; one is wanted")
        kwargs[named.arg] = _literal(named.value, named.arg, 0)
    args = tuple(_literal(value, f"argument {number}", 0) for number, value in enumerate(node.args, 1))
    return RewardCall(node.func.id, args, kwargs)


def _literal(node: ast.expr, where: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"{where}: nested deeper than {MAX_DEPTH}")
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return _finite(value, where)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as number)):
            if not isinstance(number, bool):
                return -_finite(number, where) if isinstance(sign, ast.USub) else _finite(number, where)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item, where, depth + 1) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise ValueError(f"{where}: a mapping's keys are texts")
            return {str(name): _literal(value, where, depth + 1) for name, value in zip(names, values, strict=True)}
    raise ValueError(
        f"{where}: a literal is wanted (a text, a number, true or false, None, a list or mapping of these)"
    )


def _finite(value: Any, where: str) -> Any:
    if isinstance(value, float) and math.isinf(value):
        raise ValueError(f"{where}: a number is too large")
    return value

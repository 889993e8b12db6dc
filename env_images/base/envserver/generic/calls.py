"""Calls of reward functions as text: a name and literal arguments, ``contains('x', case=False)``; read, never run."""

import ast
import threading
import warnings
from collections.abc import Mapping
from typing import Any

MAX_CALL_CHARS = 4_096
"""Larger values belong beside the call, as further keys of ``evaluation``. It also bounds the depth of a parse."""
MAX_LITERAL_DEPTH = 16

_filters = threading.Lock()
"""``catch_warnings`` swaps the process's filters: two at once would leave the wrong ones."""


def parse_call(text: object) -> tuple[str, tuple[Any, ...], Mapping[str, Any]]:
    """Read a call: the function's name, positional and named arguments. A name alone is a call without arguments.

    Raises:
        ValueError: *text* is something else, or too long; the message says what was found.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError("a reward function is a text such as contains('x')")
    if len(text) > MAX_CALL_CHARS:
        raise ValueError(f"a call has at most {MAX_CALL_CHARS} characters; larger values go beside it in evaluation")
    try:
        # '\d' in a pattern is what people write, and what Python only warns of.
        with _filters, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f"{text!r:.80} is no call of a function: {reason}") from None
    if isinstance(node, ast.Name):
        return node.id, (), {}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"{text!r:.80} is no call of a function by its name")
    named: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in named:
            raise ValueError("each named argument of a reward function is given once, and by its name")
        named[keyword.arg] = _literal(keyword.value, text.strip())
    return node.func.id, tuple(_literal(argument, text.strip()) for argument in node.args), named


def _literal(node: ast.expr, text: str, depth: int = 0) -> Any:
    """Give the value of a literal in *text*: a JSON value, as Python writes it."""
    if depth > MAX_LITERAL_DEPTH:
        raise ValueError(f"a literal is nested more than {MAX_LITERAL_DEPTH} deep")
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return _finite(value)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if value is not True:
            return -_finite(value)
        case ast.UnaryOp(op=ast.UAdd(), operand=ast.Constant(value=int() | float() as value)) if value is not True:
            return _finite(value)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item, text, depth + 1) for item in items]
        case ast.Dict(keys=keys, values=values):
            read = [_literal(key, text, depth + 1) if key is not None else None for key in keys]
            if not all(isinstance(key, str) for key in read):
                raise ValueError("the keys of an object must be texts")
            return dict(zip(read, (_literal(value, text, depth + 1) for value in values), strict=True))
    raise ValueError(f"the arguments of a reward function are literals, not {ast.get_source_segment(text, node)!r:.60}")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        raise ValueError("a number is too large")
    return value

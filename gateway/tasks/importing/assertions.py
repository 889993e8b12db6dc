"""Turns assertions of Python tests into cases that the coding environment judges outside the solution's process.

An assertion about one call, such as ``assert f(1) == [2]``, becomes ``{"call": "f(1)", "test": "answer == [2]"}``. The
environment evaluates the call in a sandbox and judges its value elsewhere, so no object of the solution can pass for
the expected value. An assertion is left as it is if its meaning could change.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

MAX_CONSTANT_BITS = 20_000
"""Maximum size of a computed integer, such as ``2**10`` in an expected value."""
MAX_TEXT_CHARS = 100_000
"""Maximum length of a case's texts, which is the environment's limit."""
MAX_ROUNDS = 200
"""Maximum number of rounds of a loop, which is the environment's limit for a task's tests."""
BUILTINS = frozenset(dir(builtins))
WRAPPERS = frozenset(
    ("abs", "bool", "dict", "float", "frozenset", "int", "len", "list", "round", "set", "sorted", "str", "sum", "tuple")
)
"""Built-in functions whose value of a call may be compared. They run with the call in the sandbox."""
TYPES: Mapping[str, Callable[..., Any]] = {
    kind.__name__: kind for kind in (bool, dict, float, frozenset, int, list, set, str, tuple)
}
"""Types whose call with a constant is a constant, such as ``set([1, 2])``."""
OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
REVERSED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    kind: kind for kind in (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)
} | {ast.Gt: ast.Lt, ast.GtE: ast.LtE}

Case = dict[str, str]
"""A case of the environment: ``call`` and ``test``."""


class _NotConstant(ValueError):
    """An expression is not a constant that a case can hold."""


@dataclass(frozen=True, slots=True)
class Names:
    """The meaning of names in a test.

    Args:
        bound: Names that the test itself binds. Their values may differ from those of built-in functions.
        is_tested: Returns True for the name of a tested function.
        is_known_outside: Returns True for a name that also has its meaning where a case's call runs.
    """

    bound: frozenset[str]
    is_tested: Callable[[str], bool]
    is_known_outside: Callable[[str], bool]

    def is_builtin(self, node: ast.expr, names: frozenset[str] = BUILTINS) -> bool:
        """Return True if *node* is one of the built-in functions *names*."""
        return isinstance(node, ast.Name) and node.id in names and node.id not in self.bound


def parsed(code: str) -> ast.Module | None:
    """Parse *code*. Return None if it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def bound_names(tree: ast.AST) -> frozenset[str]:
    """Return all names that *tree* binds anywhere."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(name, ast.Store() | ast.Del()):
                found.add(name)
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.arg(arg=name)
            ):
                found.add(name)
            case ast.alias(name, alias):
                found.add(alias or name.partition(".")[0])
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                found.add(name)
            case ast.MatchMapping(rest=str(name)):
                found.add(name)
    return frozenset(found)


def cases_of(statements: Sequence[ast.stmt], names: Names) -> tuple[list[Case], bool]:
    """Return the cases that *statements* contain, and True if these are all that the statements check.

    The search ends at a statement that may leave out the statements after it.
    """
    cases: list[Case] = []
    is_complete = True
    for statement in statements:
        found = _cases(statement, names)
        if found is None:
            is_complete = False
            if any(
                isinstance(node, ast.Return | ast.Raise | ast.Yield | ast.YieldFrom) for node in ast.walk(statement)
            ):
                break
        else:
            cases += found
    return cases, is_complete


def _cases(statement: ast.stmt, names: Names) -> list[Case] | None:
    match statement:
        case ast.Pass() | ast.Expr(ast.Constant()) | ast.Import() | ast.ImportFrom():
            return []
        case ast.Assert(ast.Constant(value)) if value:
            return []
        case ast.Assert(test):
            case = case_of(test, names)
            return None if case is None else [case]
        case ast.For(target, iterated, body, []):
            return _of_loop(target, iterated, body, names)
    return None


def _of_loop(target: ast.expr, iterated: ast.expr, body: Sequence[ast.stmt], names: Names) -> list[Case] | None:
    """Return the cases of a loop over constants, whose body only asserts."""
    try:
        rounds = _rounds(iterated, names)
        filled = [Renamed(dict(_assigned(target, value))) for value in rounds]
    except (ValueError, RecursionError):
        return None
    targets = bound_names(target)
    inner = Names(names.bound - targets, names.is_tested, names.is_known_outside)  # the loop's names are replaced
    cases: list[Case] = []
    for one in filled:
        for statement in body:
            if not isinstance(statement, ast.Assert) or bound_names(statement) & targets:
                return None
            case = case_of(statement.test, inner, one)
            if case is None:
                return None
            cases.append(case)
    return cases if len(cases) <= MAX_ROUNDS else None


def _rounds(iterated: ast.expr, names: Names) -> Sequence[Any]:
    if (
        isinstance(iterated, ast.Call)
        and names.is_builtin(iterated.func, frozenset({"range"}))
        and not iterated.keywords
    ):
        bounds = [constant(argument, names) for argument in iterated.args]
        if (
            all(type(bound) is int and abs(bound) < 10**9 for bound in bounds)
            and 1 <= len(bounds) <= 3
            and bounds[2:] != [0]
        ):
            return _limited(range(*bounds))
        raise _NotConstant
    values = constant(iterated, names)
    if not isinstance(values, list | tuple):
        raise _NotConstant
    return _limited(values)


def _limited(values: Sequence[Any]) -> Sequence[Any]:
    if len(values) > MAX_ROUNDS:
        raise _NotConstant
    return values


def _assigned(target: ast.expr, value: Any) -> Iterator[tuple[str, ast.expr]]:
    match target:
        case ast.Name(name):
            yield name, ast.parse(written(value), mode="eval").body
        case ast.Tuple(targets) | ast.List(targets) if isinstance(value, list | tuple) and len(value) == len(targets):
            for inner, one in zip(targets, value, strict=True):
                yield from _assigned(inner, one)
        case _:
            raise _NotConstant


class Renamed(ast.NodeTransformer):
    """Puts expressions in the place of names."""

    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._values.get(node.id, node) if isinstance(node.ctx, ast.Load) else node


def case_of(test: ast.expr, names: Names, renamed: Renamed | None = None) -> Case | None:
    """Return the case that means the same as ``assert test``, or None if there is none."""
    try:
        if renamed is not None:
            test = renamed.visit(deepcopy(test))
        match test:
            case ast.Compare(left, [kind], [right]):
                if case := _compared(left, type(kind), right, names):
                    return case
                if type(kind) in REVERSED:
                    return _compared(right, REVERSED[type(kind)], left, names)
            case ast.UnaryOp(ast.Not(), value) if is_answer(value, names):
                return _case(value, "not answer")
            case ast.Call(function, [value, other], keywords) if _is_close(function) and is_answer(value, names):
                limits = "".join(f", {word.arg}={_real(word.value, names)}" for word in keywords)
                return _case(value, f"math.isclose(answer, {_real(other, names)}{limits})")
            case _ if is_answer(test, names):
                return _case(test, "answer")
    except (ValueError, RecursionError):  # no constant, or an expression that cannot be written
        return None
    return None


def _case(call: ast.expr, test: str) -> Case:
    case = {"call": ast.unparse(call), "test": test}
    if any(len(text) > MAX_TEXT_CHARS for text in case.values()):
        raise _NotConstant
    return case


def _compared(left: ast.expr, kind: type[ast.cmpop], right: ast.expr, names: Names) -> Case | None:
    if is_answer(left, names):
        if kind in (ast.Is, ast.IsNot):
            if not (isinstance(right, ast.Constant) and (right.value is None or isinstance(right.value, bool))):
                return None
            return _case(left, f"answer {'is' if kind is ast.Is else 'is not'} {right.value}")
        if kind in (ast.Eq, ast.NotEq):
            return _case(left, f"answer {'==' if kind is ast.Eq else '!='} {written(constant(right, names))}")
        return None
    if kind not in (ast.Lt, ast.LtE) or (found := _distance(left, names)) is None:
        return None
    value, other = found
    return _case(value, f"abs(answer - {_real(other, names)}) {'<' if kind is ast.Lt else '<='} {_real(right, names)}")


def _distance(node: ast.expr, names: Names) -> tuple[ast.expr, ast.expr] | None:
    """Return the answer and the constant of ``abs(answer - constant)``, in either order."""
    match node:
        case ast.Call(function, [ast.BinOp(left, ast.Sub(), right)], []):
            is_abs = names.is_builtin(function, frozenset({"abs"})) or ast.unparse(function) == "math.fabs"
            if is_abs and is_answer(left, names):
                return left, right
            if is_abs and is_answer(right, names):
                return right, left
    return None


def _is_close(function: ast.expr) -> bool:
    return ast.unparse(function) == "math.isclose"


def _real(node: ast.expr, names: Names) -> str:
    value = constant(node, names)
    if type(value) not in (int, float):
        raise _NotConstant
    return f"({text})" if (text := written(value)).startswith("-") else text


def is_answer(node: ast.expr, names: Names) -> bool:
    """Return True if *node* is a call of a tested function, perhaps within a built-in function or with an index."""
    while True:
        match node:
            case ast.Call(function, [inner, *_], _) if names.is_builtin(function, WRAPPERS) and _is_known(node, names):
                node = inner
            case ast.Subscript(inner) if _is_known(node, names):
                node = inner
            case ast.Call(ast.Name(name)):
                return names.is_tested(name) and _is_known(node, names)
            case _:
                return False


def _is_known(node: ast.expr, names: Names) -> bool:
    """Return True if all names in *node* have the same meaning where a case's call runs."""
    inner = bound_names(node)  # by a comprehension or a lambda
    used = (one.id for one in ast.walk(node) if isinstance(one, ast.Name))
    return all(name in inner or names.is_tested(name) or names.is_known_outside(name) for name in used)


def constant(node: ast.expr, names: Names) -> Any:
    """Return the value of an expression of literals.

    Raises:
        _NotConstant: It is something else, or too large.
    """
    try:
        return _constant(node, names)
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise _NotConstant from error


def _constant(node: ast.expr, names: Names) -> Any:
    match node:
        case ast.Constant(value) if value is not Ellipsis:
            return value
        case ast.List(items):
            return [_constant(item, names) for item in items]
        case ast.Tuple(items):
            return tuple(_constant(item, names) for item in items)
        case ast.Set(items):
            return {_constant(item, names) for item in items}
        case ast.Dict(keys, values):
            pairs = zip((key for key in keys if key is not None), values, strict=True)  # None stands for **
            return {_constant(key, names): _constant(value, names) for key, value in pairs}
        case ast.UnaryOp(ast.USub(), inner):
            return -_constant(inner, names)
        case ast.UnaryOp(ast.UAdd(), inner):
            return +_constant(inner, names)
        case ast.BinOp(left, kind, right):
            return _computed(_constant(left, names), type(kind), _constant(right, names))
        case ast.Call(ast.Name(name) as function, [*arguments], []) if len(arguments) < 2 and name in TYPES:
            given = [_constant(argument, names) for argument in arguments]
            # The order of a set differs between processes.
            is_ordered = name in ("list", "tuple", "str") and any(isinstance(one, set | frozenset) for one in given)
            if names.is_builtin(function) and not is_ordered:
                return TYPES[name](*given)
    raise _NotConstant


def _computed(left: Any, kind: type[ast.operator], right: Any) -> Any:
    if not all(type(side) in (int, float, complex) for side in (left, right)) or kind not in OPERATORS:
        raise _NotConstant
    if kind is ast.Pow and type(left) is int and type(right) is int and left.bit_length() * right > MAX_CONSTANT_BITS:
        raise _NotConstant
    return OPERATORS[kind](left, right)


def written(value: Any) -> str:
    """Return a literal of *value*, the same in every process.

    Raises:
        _NotConstant: There is no such literal.
    """
    try:
        text = _written(value)
        is_same = ast.literal_eval(text) == value
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise _NotConstant from error
    if not is_same:  # NaN
        raise _NotConstant
    return text


def _written(value: Any) -> str:
    if isinstance(value, float) and math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_written, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_written, value)))}}}" if value else "set()"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_written(key)}: {_written(one)}' for key, one in value.items())}}}"
    return repr(value)

"""Rewards by name: the functions that a task may name, and how a call is parsed and run.

A task's ``evaluation.reward_function`` is a name with literal arguments, such as ``contains('dashboard')``. Further
keys of ``evaluation`` are also arguments. The environment supplies the function's first argument, the judged value.
"""

import ast
import inspect
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

MAX_CALL_CHARS = 4_096
"""Maximum length of a call. Larger values belong in further keys of ``evaluation``. The limit also bounds the parser's
depth."""
MAX_LITERAL_DEPTH = 16

_filters = threading.Lock()
"""Lock around ``catch_warnings``, which swaps the process's filters. Two concurrent uses would leave the wrong
filters."""
_Function = TypeVar("_Function", bound=Callable[..., float])


class RewardError(RuntimeError):
    """A reward function failed, or returned an invalid reward. This is a failure, and never a reward of 0."""


class RewardFunction:
    """A function that tasks may name. It takes the judged value and the task's arguments, and returns a reward."""

    def __init__(
        self, name: str, function: Callable[..., float], *, check: Callable[..., object] | None = None
    ) -> None:
        """*check* takes the task's arguments once they match the signature, and raises ValueError for bad arguments."""
        self.name = name
        self.function = function
        self._check = check
        self._signature = _signature(function)

    def __repr__(self) -> str:
        return f"<RewardFunction {self.name}{self._signature}>"

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Check the task's arguments: their number and names, and their types where the function has annotations.

        Raises:
            ValueError: The arguments do not match the function.
        """
        try:
            bound = self._signature.bind(None, *args, **kwargs)
        except TypeError as error:
            raise ValueError(f"{self.name}: {error}") from None
        judged = next(iter(self._signature.parameters))
        for name, given in bound.arguments.items():
            parameter = self._signature.parameters[name]
            if name == judged or parameter.annotation is parameter.empty:
                continue
            is_named = parameter.kind is parameter.VAR_KEYWORD
            many = given.values() if is_named else given if parameter.kind is parameter.VAR_POSITIONAL else (given,)
            for value in many:
                if not _fits(value, parameter.annotation):
                    raise ValueError(f"{self.name}: {name} must be {_written(parameter.annotation)}, not {value!r:.60}")
        if self._check is not None:
            try:
                self._check(*args, **kwargs)
            except ValueError as error:
                raise ValueError(f"{self.name}: {error}") from None

    def __call__(self, subject: Any, *args: Any, **kwargs: Any) -> float:
        """Judge *subject* and return a reward from 0 to 1.

        Raises:
            RewardError: The function raised, or its result is not a number from 0 to 1.
        """
        try:
            reward = float(self.function(subject, *args, **kwargs))
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(f"{self.name}: {type(error).__name__}: {error}") from error
        if math.isnan(reward) or not 0.0 <= reward <= 1.0:
            raise RewardError(f"{self.name} gave {reward}, which is not a reward from 0 to 1")
        return reward


REWARDS: dict[str, RewardFunction] = {}
"""Reward functions by name. It is module state on purpose, like the registry of tasks."""


def reward_function(name: str, *, check: Callable[..., object] | None = None) -> Callable[[_Function], _Function]:
    """Let tasks name the decorated function. Only the same module may register a name again.

    Args:
        check: Takes the arguments of a task's call before a session starts, and raises ValueError for bad arguments.

    Raises:
        ValueError: The name is not an identifier, or another module has registered it.
    """
    if not name.isidentifier():
        raise ValueError(f"{name!r:.80} cannot be the name of a reward function: it must be an identifier")

    def register(function: _Function) -> _Function:
        taken = REWARDS.get(name)
        if taken is not None and taken.function.__module__ != function.__module__:
            raise ValueError(f"the reward function {name} is already defined by {taken.function.__module__}")
        REWARDS[name] = RewardFunction(name, function, check=check)
        return function

    return register


@dataclass(frozen=True, slots=True)
class RewardCall:
    """A named function with its arguments. The function must exist to call it, but not to parse it."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """
        Raises:
            ValueError: There is no such function here, or the arguments do not match it.
        """
        self._function().check(*self.args, **self.kwargs)

    def __call__(self, subject: Any) -> float:
        """Judge *subject* and return a reward from 0 to 1.

        Raises:
            ValueError: See ``check``.
            RewardError: The function failed.
        """
        return self._function()(subject, *self.args, **self.kwargs)

    def _function(self) -> RewardFunction:
        if self.name not in REWARDS:
            raise ValueError(f"no reward function {self.name!r:.80}; there are {', '.join(sorted(REWARDS))}")
        return REWARDS[self.name]


@contextmanager
def without_warnings() -> Iterator[None]:
    """Ignore warnings about a task's own text, for which the server has no reader."""
    with _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def parse_reward(text: object) -> RewardCall:
    """Parse ``name`` or ``name(literal, key=literal)`` without evaluating it. A name alone is a call without arguments.

    Raises:
        ValueError: *text* is malformed or too long. The message states the problem.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError("a reward function is a text such as contains('x')")
    if len(text) > MAX_CALL_CHARS:
        raise ValueError(f"a call has at most {MAX_CALL_CHARS} characters; larger values go beside it in evaluation")
    try:
        with without_warnings():  # patterns often contain '\d' unescaped, which causes only a warning in Python
            node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f"{text!r:.80} is not a call of a function: {reason}") from None
    if isinstance(node, ast.Name):
        return RewardCall(node.id)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"{text!r:.80} is not a call of a function by its name")
    named: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in named:
            raise ValueError("each named argument of a reward function is given once, and by its name")
        named[keyword.arg] = _literal(keyword.value, text.strip())
    arguments = tuple(_literal(argument, text.strip()) for argument in node.args)
    return RewardCall(node.func.id, arguments, named)


def read_reward(evaluation: object) -> RewardCall:
    """Parse and check a task's ``evaluation`` with a reward function. Its further keys are named arguments.

    Raises:
        ValueError: The shape is wrong, there is no such function, or the arguments do not match it.
    """
    if not isinstance(evaluation, Mapping) or "reward_function" not in evaluation:
        raise ValueError("evaluation must be an object with reward_function")
    call = parse_reward(evaluation["reward_function"])
    further = {key: value for key, value in evaluation.items() if key != "reward_function"}
    for key in further:
        if key in call.kwargs:
            raise ValueError(f"the call already has the argument {key}: remove evaluation.{key}")
    whole = RewardCall(call.name, call.args, {**call.kwargs, **further})
    whole.check()
    return whole


def _literal(node: ast.expr, text: str, depth: int = 0) -> Any:
    """Return the value of a literal in *text*: a JSON value in Python's notation."""
    if depth > MAX_LITERAL_DEPTH:
        raise ValueError(f"a literal is nested more than {MAX_LITERAL_DEPTH} deep")
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return _finite(value)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as value)) if (
            not isinstance(value, bool)
        ):
            return -_finite(value) if isinstance(sign, ast.USub) else _finite(value)
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


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError:  # an annotation that exists only for type checkers
        signature = inspect.signature(function)
    if not signature.parameters:
        raise ValueError("the first argument of a reward function must be the judged output")
    return signature


def _fits(value: object, annotation: Any) -> bool:
    """Return True if *value* has the type, or if this is undecidable. A bool is not a number, an int is a float."""
    try:
        if isinstance(value, bool):
            return annotation in (Any, object) or bool in (annotation, *getattr(annotation, "__args__", ()))
        return isinstance(value, annotation) or (isinstance(value, int) and isinstance(0.0, annotation))
    except TypeError:
        return True


def _written(annotation: Any) -> str:
    return getattr(annotation, "__name__", None) or str(annotation)

"""The generic task: one schema for all environments, in JSON, YAML and plain data.

`parse` tells everything that is wrong with a task at once, each with its path. It refuses code where data is expected:
a task from outside names a reward function, which the environment has, or brings scripts, which run in a sandbox.

Named reward functions: ``contains('x', case=False)`` is a name and literals, read as such and never evaluated.

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
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gateway.core.environment import Isolation
from gateway.core.errors import TaskInvalid
from gateway.core.ports.tasks import MAX_PER_S, MAX_STARTS, MAX_TASK_BYTES
from gateway.tasks.documents import MAX_PROBLEMS, compact, joined, not_data

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$"
"""``custom/login-test``, ``miniwob/click-test``, ``train-001-count-suffix-00000``."""
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
"""Names of splits and environments."""
TAG_PATTERN = r"^\S(?:.*\S)?$"
TEXT_PATTERN = r"\S"
_PATTERNS = {
    ID_PATTERN: "a text of at most 200 letters, digits and ._/- that begins with a letter or digit",
    NAME_PATTERN: "a text of at most 100 letters, digits and ._- that begins with a letter or digit",
    TAG_PATTERN: "a text without white space at its ends, in one line,",
    TEXT_PATTERN: "a text that is not empty",
}
CODE_KEYS = frozenset(
    ("module", "modules", "class", "class_name", "class_path", "task_class", "python", "code_ref", "callable")
) | frozenset(("import", "entry_point", "entrypoint", "pickle", "eval", "exec"))
"""Keys that name or hold code of the server's: task classes come in images and mounts, never in a request."""
SCRIPT_KEYS = frozenset(("script", "scripts", "test_scripts", "command"))
"""Keys of ``evaluation`` whose values are run."""
MAX_INLINE_BYTES = 4 * 2**20
"""A task that is given for one session only, as compact JSON; what environments take, too."""
_SHORT = frozenset(("goal", "reward_fn"))
"""Keys of a task's short form, as RFC 005 has it in its registry's example."""
_LONG = frozenset(("instruction", "config", "evaluation"))
_Line = Annotated[str, Field(max_length=200)]
_Tag = Annotated[str, Field(pattern=TAG_PATTERN, max_length=100)]
_Id = Annotated[str, Field(pattern=ID_PATTERN)]


class RateLimit(BaseModel):
    """How often a task may be begun, by all trainers together."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    starts: int = Field(ge=1, le=MAX_STARTS)
    """Sessions that may begin in any time of `per_s`."""
    per_s: float = Field(gt=0, le=MAX_PER_S)
    """Seconds."""


class Evaluation(BaseModel):
    """How the task is judged. Nothing of it reaches the agent, but what the environment shows on purpose."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, use_attribute_docstrings=True)

    reward_function: str | None = Field(default=None, examples=["exact_match", "contains('dashboard', case=False)"])
    """A function of the environment by its name, with literal arguments or without. It is never evaluated."""
    script: str | None = Field(default=None, pattern=TEXT_PATTERN, max_length=262_144)
    """A script that judges; only where the environment runs code in a sandbox."""

    @model_validator(mode="after")
    def _has_one_judge(self) -> Self:
        if self.reward_function is not None and self.script is not None:
            raise ValueError("either reward_function or script, not both")
        return self

    @field_validator("reward_function")
    @classmethod
    def _is_a_name_with_literals(cls, value: str | None) -> str | None:
        if value is not None:
            parse_reward(value)
        return value


class GenericTask(BaseModel):
    """One problem of an environment. Further keys are free: the environment may read them, the gateway does not."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, use_attribute_docstrings=True, title="Task")

    id: _Id | None = None
    """How the task is called: unique in its environment. Tasks that are registered need one."""
    env_type: Annotated[str, Field(pattern=NAME_PATTERN)] | None = None
    """The environment that it is for: its name, or one of its other names."""
    name: _Line | None = None
    """For people."""
    description: str | None = Field(default=None, max_length=10_000)
    """For people."""
    version: _Line | int | Annotated[float, Field(allow_inf_nan=False)] | None = None
    """For people: which state of the task this is."""
    tags: list[_Tag] = Field(default=[], max_length=64)
    """What listings can be narrowed down by."""
    aliases: list[_Id] = Field(default=[], max_length=64)
    """Other ids."""
    difficulty: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """For people and trainers."""
    split: str | None = Field(default=None, pattern=NAME_PATTERN)
    """The split that it is added to when it is registered; ``custom`` if nobody says another."""
    instruction: str = Field(default="", max_length=262_144)
    """What the agent is to do; the environment adds how to act."""
    config: dict[str, Any] = {}
    """The environment's own settings for the session: a start URL, files, a level."""
    evaluation: Evaluation = Evaluation()
    rate_limit: RateLimit | None = None
    """The gateway refuses to begin the task more often than this."""

    def to_dict(self) -> dict[str, Any]:
        """The task as plain data, with the keys that it was given."""
        return self.model_dump(exclude_unset=True)


_METADATA = frozenset(GenericTask.model_fields) - _LONG
"""Keys that stay beside ``config`` when the short form is written out."""


def parse(
    document: object, *, where: str = "", isolation: Isolation | None = None, is_registered: bool = False
) -> GenericTask:
    """Check *document* (plain data) and return the task that it is.

    Args:
        where: the place that the error names: a file, ``tasks[3]``.
        isolation: of the task's environment; scripts are refused where it is not ``SANDBOX``. None: it is not known.
        is_registered: the task is to be kept, so it needs an ``id`` and an ``env_type``.

    Raises:
        TaskInvalid: with every problem and its path.
    """
    if not isinstance(document, Mapping):
        raise TaskInvalid([("", f"a task is an object, not {_kind(document)}")], where=where)
    problems = not_data(document)
    if problems:  # the rest takes plain data for granted
        raise TaskInvalid(problems, where=where)
    whole = _spelled_out(document)
    problems = _code(whole, isolation)
    if is_registered:
        problems += [(key, "a task that is registered needs one") for key in ("id", "env_type") if not whole.get(key)]
    task = None
    try:
        task = GenericTask.model_validate(whole)
    except ValidationError as error:
        problems += _problems(error)
    limit = MAX_TASK_BYTES if is_registered else MAX_INLINE_BYTES
    if len(compact(whole)) > limit:
        problems.append(("", f"larger than {limit} bytes"))
    if problems or task is None:
        raise TaskInvalid(sorted(set(problems))[:MAX_PROBLEMS], where=where)
    return task


def from_config(task_id: str, env_type: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The task that ``register(task_id, env_type, config)`` means, as plain data that `parse` checks.

    *config* is a whole task, or the short form: ``goal``, ``reward_fn``, and all other keys the environment's.
    """
    task = dict(config) if _LONG & set(config) else _lengthened(config, kept=frozenset())
    return {**task, "id": task_id, "env_type": env_type}


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a task."""
    schema = GenericTask.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _spelled_out(document: Mapping[str, Any]) -> dict[str, Any]:
    """The task in the long form. ``{"task_id", "env_type", "config"}`` are the arguments of a registration."""
    config = document.get("config")
    if set(document) == {"task_id", "env_type", "config"} and isinstance(config, Mapping):
        return from_config(document["task_id"], document["env_type"], config)
    if _SHORT & set(document) and not _LONG & set(document):
        return _lengthened(document, kept=_METADATA)
    return dict(document)


def _lengthened(short: Mapping[str, Any], *, kept: frozenset[str]) -> dict[str, Any]:
    task = {key: value for key, value in short.items() if key in kept}
    if "goal" in short:
        task["instruction"] = short["goal"]
    task["config"] = {key: value for key, value in short.items() if key not in kept | _SHORT}
    if "reward_fn" in short:
        task["evaluation"] = {"reward_function": short["reward_fn"]}
    return task


def _code(task: Mapping[str, Any], isolation: Isolation | None) -> list[tuple[str, str]]:
    """Code where data is expected: in the task itself, and in how it is judged."""
    evaluation = task.get("evaluation")
    inner: Mapping[str, Any] = evaluation if isinstance(evaluation, Mapping) else {}
    problems = [
        (joined(path, key), "code is not taken from outside: task classes come in images or mounted folders")
        for path, some in (("", task), ("evaluation", inner))
        for key in some
        if key.lower() in CODE_KEYS
    ]
    if isolation not in (None, Isolation.SANDBOX):
        problems += [
            (f"evaluation.{key}", "scripts are only for environments that run code in sandboxes")
            for key in inner
            if key in SCRIPT_KEYS
        ]
    return problems


def _problems(error: ValidationError) -> list[tuple[str, str]]:
    """What the model refuses; the members of a union are one problem."""
    found: dict[str, list[str]] = {}
    for entry in error.errors(include_url=False):
        found.setdefault(_path(entry["loc"]), []).append(
            _message(entry["type"], entry["msg"], entry.get("ctx", {}).get("pattern", ""))
        )
    return [(path, ", or: ".join(dict.fromkeys(messages))) for path, messages in found.items()]


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step not in (
            "str",
            "int",
            "float",
            "constrained-str",
            "constrained-int",
            "constrained-float",
        ):  # members of a union
            path = joined(path, step)
    return path


def _message(kind: str, message: str, pattern: str) -> str:
    if kind == "string_pattern_mismatch":
        return f"{_PATTERNS[pattern]} is wanted"
    return message.removeprefix("Value error, ")


def _kind(value: object) -> str:
    return {dict: "an object", list: "a list", str: "a text", type(None): "null"}.get(type(value), type(value).__name__)


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

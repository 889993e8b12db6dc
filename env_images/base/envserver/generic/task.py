"""A generic task: metadata, an instruction, the environment's configuration, and the rule that judges the outcome.

The environment defines the meaning of ``config`` and ``evaluation``. This module only checks that they are JSON within
limits. ``task.schema.json`` in this folder is the schema that workers and the gateway use. `_faults` implements only
the keywords that the schema uses, because a worker stays small without a library for them.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from envserver.generic.rewards import parse_reward

MAX_TASK_BYTES = 4 * 1024 * 1024
"""Maximum size of a task in bytes as compact JSON. The largest task of the project has 115 KiB."""
MAX_DEPTH = 32
MAX_PROBLEMS = 100
"""Maximum number of reported problems per task. The check stops there."""

with open(os.path.join(os.path.dirname(__file__), "task.schema.json"), encoding="utf-8") as _file:
    SCHEMA: Mapping[str, Any] = json.load(_file)
_KEYS: Mapping[str, Any] = SCHEMA["properties"]
_PLAIN_KEY = re.compile(r"[\w-]{1,80}")
_OWN = frozenset({"id", "env_type", "name", "description", "version", "tags", "instruction", "config", "evaluation"})
_SHORT = frozenset({"goal", "reward_fn"})
_LONG = frozenset({"instruction", "config", "evaluation"})
_METADATA = frozenset(_KEYS) - _LONG
_TYPES: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "object": (Mapping, "an object"),
    "array": ((list, tuple), "a list"),
    "string": (str, "a text"),
    "integer": (int, "a whole number"),
    "number": ((int, float), "a number"),
    "null": (type(None), ""),
}
"""The types of JSON Schema as Python types and in words. A bool does not count as a number."""

Problem = tuple[str, str]
"""Path in a task, such as ``config.files``, and the problem there. The path of the task itself is empty."""


class TaskError(ValueError):
    """A task does not match the schema. *problems* lists the reasons with their paths."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{path}: {text}" if path else text for path, text in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class GenericTask:
    """A task, created and checked by ``parse_task``. Its mappings are copies of the input."""

    id: str = ""
    """Id such as ``custom/login-test``. Empty for an inline task without an id."""
    env_type: str = ""
    """Name of the task's environment. Empty if the task does not state it."""
    name: str = ""
    description: str = ""
    version: str = ""
    tags: tuple[str, ...] = ()
    instruction: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """All other keys: ``aliases``, ``difficulty``, ``rate_limit``, and the task author's own keys."""

    @property
    def split(self) -> str:
        """Split of the task: its own key ``split``, else ``custom``."""
        split = self.extra.get("split")
        return split if isinstance(split, str) and split else "custom"

    def to_dict(self) -> dict[str, Any]:
        """Return the task as a new JSON object in the long form, without empty keys."""
        given: dict[str, Any] = {
            "id": self.id,
            "env_type": self.env_type,
            "name": self.name,
            "description": self.description,
            "version": self.version,
            "tags": list(self.tags),
            "instruction": self.instruction,
        }
        written = {key: value for key, value in given.items() if value}
        written["config"] = _copy(self.config)
        written["evaluation"] = _copy(self.evaluation)
        return written | {key: _copy(value) for key, value in self.extra.items()}


def parse_task(document: Mapping[str, Any]) -> GenericTask:
    """Check *document*, a task as JSON in the long form or in the RFC's short form, and return the task.

    A key with null counts as absent, and so does an empty id or environment.

    Raises:
        TaskError: The task does not match the schema. ``problems`` lists the places, up to a limit.
    """
    given = {
        key: value
        for key, value in long_form(document).items()
        if not (value is None and key in _KEYS) and not (value == "" and key in ("id", "env_type"))
    }
    problems = [problem for problem in schema_problems(given) if problem[0] != "split"]  # a file's split is arbitrary
    if problems:
        raise TaskError(problems[:MAX_PROBLEMS])
    return GenericTask(
        id=given.get("id", ""),
        env_type=given.get("env_type", ""),
        name=given.get("name", ""),
        description=given.get("description", ""),
        version=str(given.get("version") or ""),
        tags=tuple(given.get("tags", ())),
        instruction=given.get("instruction", ""),
        config=_copy(given.get("config", {})),
        evaluation=_copy(given.get("evaluation", {})),
        extra={key: _copy(value) for key, value in given.items() if key not in _OWN},
    )


def long_form(document: object, *, max_bytes: int = MAX_TASK_BYTES, max_values: int = MAX_TASK_BYTES) -> dict[str, Any]:
    """Return a task in the long form, as a new dict. Check only that it is JSON within limits.

    The short form has ``goal`` or ``reward_fn``, but none of ``instruction``, ``config`` and ``evaluation``. ``goal``
    becomes the instruction and ``reward_fn`` becomes ``evaluation.reward_function``. All other keys except metadata
    become configuration.

    Raises:
        TaskError: The task is not an object, is not JSON, or exceeds the limits.
    """
    if not isinstance(document, Mapping):
        raise TaskError([("", f"a task is an object, not {_kind(document)}")])
    problems = _json_problems(document, max_bytes, max_values)
    if problems:  # nothing else would be safe to check
        raise TaskError(problems[:MAX_PROBLEMS])
    if _SHORT & document.keys() and not _LONG & document.keys():
        return _lengthened(document, kept=_METADATA)
    return dict(document)


def registered(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the *config* of a registration as a task in the long form, without id and environment.

    With ``instruction``, ``config`` or ``evaluation`` it is a whole task. In any other mapping, ``goal`` and
    ``reward_fn`` have the meaning of the RFC's short form. All other keys are configuration.
    """
    return dict(config) if _LONG & config.keys() else _lengthened(config, kept=frozenset())


def _lengthened(short: Mapping[str, Any], *, kept: frozenset[str]) -> dict[str, Any]:
    """Convert the short form to the long form. The keys *kept* stay next to ``config``, and all others go into it."""
    long: dict[str, Any] = {key: value for key, value in short.items() if key in kept}
    if "goal" in short:
        long["instruction"] = short["goal"]
    long["config"] = {key: value for key, value in short.items() if key not in _SHORT and key not in kept}
    if "reward_fn" in short:
        long["evaluation"] = {"reward_function": short["reward_fn"]}
    return long


def _json_problems(document: Mapping[Any, Any], max_bytes: int, max_values: int) -> list[Problem]:
    """Return the reasons why *document* is not JSON within a task's limits: types, numbers, depth, size."""
    problems: list[Problem] = []
    # No recursion, because a malicious document would exceed its limit.
    left: list[tuple[str, str | int, Any, int]] = [("", "", document, 0)]
    seen = 0
    while left and len(problems) < MAX_PROBLEMS:
        parent, step, value, depth = left.pop()
        seen += 1
        if seen > max_values:
            return [*problems, ("", f"more than {max_values} values")]
        if depth <= MAX_DEPTH and (value is None or isinstance(value, int) or _is_text(value)):
            continue  # most values: they need no path
        path = joined(parent, step) if depth else ""
        if depth > MAX_DEPTH:
            return [*problems, (path[:200], f"nested more than {MAX_DEPTH} deep")]
        if isinstance(value, Mapping):
            problems += [(path, f"the key {key!r:.50} is not a text") for key in value if not _is_text(key)]
            left += [(path, key, inner, depth + 1) for key, inner in value.items() if isinstance(key, str)]
        elif isinstance(value, list | tuple):
            left += [(path, place, inner, depth + 1) for place, inner in enumerate(value)]
        elif isinstance(value, str):
            problems.append((path, "half a character (a lone surrogate)"))
        elif not isinstance(value, float):
            problems.append((path, f"{type(value).__name__} has no JSON form"))
        elif not math.isfinite(value):
            problems.append((path, "nan and infinities are no JSON"))
    if not problems:
        text = json.dumps(document, default=dict, ensure_ascii=False, separators=(",", ":"))
        if (size := len(text.encode())) > max_bytes:
            problems.append(("", f"a task has at most {max_bytes} bytes as JSON, this one {size}"))
    return problems


def _is_text(value: object) -> bool:
    """Return True if *value* is a str that UTF-8 can carry."""
    try:
        return isinstance(value, str) and (value.isascii() or bool(value.encode()))
    except UnicodeEncodeError:
        return False


def schema_problems(task: Mapping[str, Any]) -> list[Problem]:
    """Return the mismatches between the schema and a task from `long_form`, or an empty list."""
    problems = [*islice(_faults(SCHEMA, task, ""), MAX_PROBLEMS)]
    evaluation = task.get("evaluation")
    if isinstance(evaluation, Mapping):
        call = evaluation.get("reward_function")
        if isinstance(call, str):
            try:
                parse_reward(call)
            except ValueError as error:
                problems.append(("evaluation.reward_function", str(error)))
        if call is not None and evaluation.get("script") is not None:
            problems.append(("evaluation", "either reward_function or script, not both"))
    return problems


def is_name(key: str, text: str) -> bool:
    """Return True if *text* is valid as the task's *key*: ``id``, ``env_type`` or ``split``."""
    return not any(_faults(_KEYS[key], text, key))


def _faults(schema: Mapping[str, Any], value: Any, path: str) -> Iterator[Problem]:
    types = [_TYPES[name] for name in ([schema["type"]] if isinstance(schema["type"], str) else schema["type"])]
    if isinstance(value, bool) or not any(isinstance(value, type) for type, _ in types):
        yield path, f"must be {' or '.join(words for _, words in types if words)}, not {_kind(value)}"
    elif isinstance(value, str):
        if len(value) > schema.get("maxLength", len(value)):
            yield path, f"must be at most {schema['maxLength']} characters, not {len(value)}"
        # Python's $ also matches before a final line end.
        elif "pattern" in schema and not re.search(schema["pattern"].replace("$", r"\Z"), value):
            yield path, f"must be {schema['errorMessage']}, not {value!r:.60}"
    elif isinstance(value, int | float):
        if value < schema.get("minimum", value):
            yield path, f"must be {schema['minimum']} or more, not {value!r:.30}"
        elif "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
            yield path, f"must be more than {schema['exclusiveMinimum']}, not {value!r:.30}"
        elif value > schema.get("maximum", value):
            yield path, f"must be at most {schema['maximum']}, not {value!r:.30}"
    elif isinstance(value, list | tuple):
        if len(value) > schema.get("maxItems", len(value)):
            yield path, f"must have at most {schema['maxItems']} entries, not {len(value)}"
        else:
            for place, inner in enumerate(value):
                yield from _faults(schema["items"], inner, joined(path, place))
    elif isinstance(value, Mapping):
        keys = schema.get("properties", {})
        for key in (key for key in keys if key in value):
            yield from _faults(keys[key], value[key], joined(path, key))
        yield from ((joined(path, key), "is missing") for key in schema.get("required", ()) if key not in value)
        if schema.get("additionalProperties") is False:
            yield from ((joined(path, key), "no such key") for key in value if key not in keys)


def joined(path: str, key: str | int) -> str:
    """Return the path of *key* in the object or list at *path*. Ambiguous keys are quoted."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    shown = key if _PLAIN_KEY.fullmatch(key) else json.dumps(key[:80])
    return f"{path}.{shown}" if path else shown


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    return "an empty text" if value == "" else "a text" if isinstance(value, str) else f"the number {value!r:.30}"


def _copy(value: Any) -> Any:
    """Copy a JSON value. Mappings become dicts, and tuples become lists."""
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(inner) for inner in value]
    return value

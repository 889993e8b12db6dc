"""A generic task: metadata, an instruction, the environment's configuration, and how the outcome is judged.

What stands in ``config`` and ``evaluation`` is the environment's own; here they are JSON within bounds, and no more.
``task.schema.json`` beside this module is the same schema for readers and tools. Workers and the gateway check by this
module, so it imports the standard library only.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envserver.generic.rewards import parse_reward

MAX_TASK_BYTES = 4 * 1024 * 1024
"""Of a task as compact JSON; the largest task of the project has 115 KiB."""
MAX_DEPTH = 32
MAX_INSTRUCTION_CHARS = 256 * 1024
MAX_SCRIPT_CHARS = 256 * 1024
MAX_DESCRIPTION_CHARS = 16 * 1024
MAX_NAME_CHARS = 200
MAX_TAGS = 64
"""Tags, and aliases too."""
MAX_STARTS = 10_000
"""The largest rate limit's number of starts: the gateway's store keeps each as a moment."""
MAX_PER_S = 86_400.0
"""The longest rate limit's time, in seconds: a day."""
MAX_PROBLEMS = 100
"""Of one task; what comes after them is not looked for."""

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
"""``custom/login-test``, ``miniwob/click-test``, ``train-001-count-suffix-00000``."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Names of splits and environments."""
_TAG = re.compile(r"\S(?:.{0,98}\S)?")
_OWN = frozenset({"id", "env_type", "name", "description", "version", "tags", "instruction", "config", "evaluation"})
_SHORT = frozenset({"goal", "reward_fn"})
_LONG = frozenset({"instruction", "config", "evaluation"})
_METADATA = (_OWN - _LONG) | {"aliases", "difficulty", "rate_limit", "split"}
_NEVER_NULL = _LONG | {"tags", "aliases"}

Problem = tuple[str, str]
"""Where in a task, such as ``config.files``, and what is wrong there. The path of the task itself is empty."""


class TaskError(ValueError):
    """A task does not fit the schema; *problems* says each reason with its path."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{path}: {text}" if path else text for path, text in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class GenericTask:
    """One task; made by ``parse_task``, which checks it. Its mappings are its own: copies of what was given."""

    id: str = ""
    """Such as ``custom/login-test``; empty for a task that came inline without one."""
    env_type: str = ""
    """The environment that it is for; empty where the task does not say."""
    name: str = ""
    description: str = ""
    version: str = ""
    tags: tuple[str, ...] = ()
    instruction: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Every other key: ``aliases``, ``difficulty``, ``rate_limit``, and what is the task's author's own."""

    @property
    def split(self) -> str:
        """The split that it belongs to: its own key ``split``, else ``custom``."""
        split = self.extra.get("split")
        return split if isinstance(split, str) and split else "custom"

    def to_dict(self) -> dict[str, Any]:
        """Write it as a new JSON object, in the long form, without the keys that say nothing."""
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
    """Check *document*, a task as JSON has it, in the long form or in the RFC's short one.

    A key that is null counts as absent, as do an empty id and environment.

    Raises:
        TaskError: it does not fit; ``problems`` names every place, up to a bound.
    """
    given = {
        key: value
        for key, value in long_form(document).items()
        if not (value is None and key in _NEVER_NULL) and not (value == "" and key in ("id", "env_type"))
    }
    problems = schema_problems(given)
    if problems:
        raise TaskError(problems[:MAX_PROBLEMS])
    return GenericTask(
        id=given.get("id") or "",
        env_type=given.get("env_type") or "",
        name=given.get("name") or "",
        description=given.get("description") or "",
        version=str(given.get("version") or ""),
        tags=tuple(given.get("tags") or ()),
        instruction=given.get("instruction") or "",
        config=_copy(given.get("config") or {}),
        evaluation=_copy(given.get("evaluation") or {}),
        extra={key: _copy(value) for key, value in given.items() if key not in _OWN},
    )


def long_form(document: object, *, max_bytes: int = MAX_TASK_BYTES, max_values: int = MAX_TASK_BYTES) -> dict[str, Any]:
    """Write a task in the long form, as a new dict; nothing of it is checked but that it is JSON within bounds.

    The short form has ``goal`` or ``reward_fn`` and none of ``instruction``, ``config`` and ``evaluation``: ``goal`` is
    the instruction, ``reward_fn`` the ``evaluation.reward_function``, and what is no metadata is configuration.

    Raises:
        TaskError: it is no object, or JSON cannot carry it, or it is larger than these bounds.
    """
    if not isinstance(document, Mapping):
        raise TaskError([("", f"a task is an object, not {_kind(document)}")])
    problems = _json_problems(document, max_bytes, max_values)
    if problems:  # nothing else would be safe to look at
        raise TaskError(problems[:MAX_PROBLEMS])
    if _SHORT & document.keys() and not _LONG & document.keys():
        return _lengthened(document, kept=_METADATA)
    return dict(document)


def registered(config: Mapping[str, Any]) -> dict[str, Any]:
    """Write the *config* of a registration as a task in the long form, without id and environment.

    With ``instruction``, ``config`` or ``evaluation`` it is a whole task. In any other mapping ``goal`` and
    ``reward_fn`` have the meaning of the RFC's short form, and all other keys are configuration.
    """
    return dict(config) if _LONG & config.keys() else _lengthened(config, kept=frozenset())


def _lengthened(short: Mapping[str, Any], *, kept: frozenset[str]) -> dict[str, Any]:
    """Write the short form in the long one; the keys *kept* stay beside ``config``, all others go into it."""
    long: dict[str, Any] = {key: value for key, value in short.items() if key in kept}
    if "goal" in short:
        long["instruction"] = short["goal"]
    long["config"] = {key: value for key, value in short.items() if key not in _SHORT and key not in kept}
    if "reward_fn" in short:
        long["evaluation"] = {"reward_function": short["reward_fn"]}
    return long


def _json_problems(document: Mapping[Any, Any], max_bytes: int, max_values: int) -> list[Problem]:
    """Name what keeps *document* from being JSON within the bounds of a task: types, numbers, depth, size."""
    problems: list[Problem] = []
    # Not by recursion, which a document that is made for it would end.
    left: list[tuple[str, Any, int]] = [("", document, 0)]
    seen = 0
    while left and len(problems) < MAX_PROBLEMS:
        path, value, depth = left.pop()
        seen += 1
        if seen > max_values:
            return [*problems, ("", f"more than {max_values} values")]
        if depth > MAX_DEPTH:
            return [*problems, (path[:200], f"nested more than {MAX_DEPTH} deep")]
        if isinstance(value, Mapping):
            problems += [(path, f"the key {key!r:.50} is no text") for key in value if not _is_text(key)]
            left += [(joined(path, key), inner, depth + 1) for key, inner in value.items() if isinstance(key, str)]
        elif isinstance(value, list | tuple):
            left += [(f"{path}[{place}]", inner, depth + 1) for place, inner in enumerate(value)]
        elif isinstance(value, str):
            if not _is_text(value):
                problems.append((path, "half a character (a lone surrogate)"))
        elif isinstance(value, float) and not math.isfinite(value):
            problems.append((path, "nan and infinities are no JSON"))
        elif value is not None and not isinstance(value, int | float):
            problems.append((path, f"{type(value).__name__} has no JSON form"))
    if not problems:
        text = json.dumps(document, default=dict, ensure_ascii=False, separators=(",", ":"))
        if (size := len(text.encode())) > max_bytes:
            problems.append(("", f"a task has at most {max_bytes} bytes as JSON, this one {size}"))
    return problems


def _is_text(value: object) -> bool:
    """Return True if *value* is a str that UTF-8 can carry."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def schema_problems(given: Mapping[str, Any]) -> list[Problem]:
    """Name what does not fit the schema in a task that `long_form` wrote; empty if it fits."""
    problems: list[Problem] = []

    def check(key: str, kind: type | tuple[type, ...], wanted: str) -> Any:
        value = given.get(key)
        if (value is None and (key not in given or key not in _NEVER_NULL)) or (
            isinstance(value, kind) and not isinstance(value, bool)
        ):
            return value
        problems.append((key, f"{wanted} is wanted, not {_kind(value)}"))
        return None

    for key, pattern in (("id", ID), ("env_type", NAME)):
        value = check(key, str, "a text")
        if value is not None and not pattern.fullmatch(value):
            problems.append((key, _no_name(value, pattern)))
    for key, most in (
        ("name", MAX_NAME_CHARS),
        ("description", MAX_DESCRIPTION_CHARS),
        ("instruction", MAX_INSTRUCTION_CHARS),
    ):
        if len(check(key, str, "a text") or "") > most:
            problems.append((key, f"at most {most} characters"))
    if len(str(check("version", (str, int, float), "a text or a number") or "")) > MAX_NAME_CHARS:
        problems.append(("version", f"at most {MAX_NAME_CHARS} characters"))
    for key in ("tags", "aliases"):
        problems += _list_problems(key, check(key, (list, tuple), "a list"))
    check("config", Mapping, "an object")
    problems += _evaluation_problems(check("evaluation", Mapping, "an object"))
    if (difficulty := check("difficulty", (int, float), "a number")) is not None and difficulty < 0:
        problems.append(("difficulty", "0 or more is wanted"))
    problems += _rate_problems(check("rate_limit", Mapping, "an object"))
    return problems


def _list_problems(key: str, values: Any) -> list[Problem]:
    problems = [
        (
            f"{key}[{place}]",
            "a text of 1 to 100 characters in one line, without white space at its ends, is wanted"
            if key == "tags"
            else _no_name(value, ID),
        )
        for place, value in enumerate(values or ())
        if not isinstance(value, str) or not (_TAG if key == "tags" else ID).fullmatch(value)
    ]
    if values is not None and len(values) > MAX_TAGS:
        problems.append((key, f"at most {MAX_TAGS}"))
    return problems


def _evaluation_problems(evaluation: Any) -> list[Problem]:
    problems: list[Problem] = []
    given: Mapping[str, Any] = evaluation or {}
    call, script = given.get("reward_function"), given.get("script")
    if call is not None:
        try:
            parse_reward(call)
        except ValueError as error:
            problems.append(("evaluation.reward_function", str(error)))
    if script is not None:
        if not isinstance(script, str) or not script.strip():
            problems.append(("evaluation.script", f"a text is wanted, not {_kind(script)}"))
        elif len(script) > MAX_SCRIPT_CHARS:
            problems.append(("evaluation.script", f"at most {MAX_SCRIPT_CHARS} characters"))
    if call is not None and script is not None:
        problems.append(("evaluation", "either reward_function or script, not both"))
    return problems


def _rate_problems(limit: Any) -> list[Problem]:
    if limit is None:
        return []
    problems = [(f"rate_limit.{key}", "no such key") for key in limit if key not in ("starts", "per_s")]
    starts, per_s = limit.get("starts"), limit.get("per_s")
    if not isinstance(starts, int) or isinstance(starts, bool) or not 1 <= starts <= MAX_STARTS:
        problems.append(("rate_limit.starts", f"a whole number from 1 to {MAX_STARTS} is wanted"))
    if not isinstance(per_s, int | float) or isinstance(per_s, bool) or not 0 < per_s <= MAX_PER_S:
        problems.append(("rate_limit.per_s", f"seconds above 0, at most {MAX_PER_S:g}, are wanted"))
    return problems


def _no_name(value: object, pattern: re.Pattern[str]) -> str:
    signs = "._/-" if pattern is ID else "._-"
    return f"{value!r:.80} is none: it begins with a letter or digit and has letters, digits and {signs}"


def joined(path: str, key: str) -> str:
    """Write the path of *key* in the object at *path*; a key that would read as something else is quoted."""
    shown = key if re.fullmatch(r"[\w-]{1,80}", key) else json.dumps(key[:80])
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
    """Copy a JSON value; mappings become dicts, tuples lists."""
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(inner) for inner in value]
    return value

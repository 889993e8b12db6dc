"""A generic task: metadata, an instruction, the environment's configuration, and how the outcome is judged.

What stands in ``config`` and ``evaluation`` is the environment's own; here they are JSON within bounds, and no more.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envserver.generic.calls import parse_call

MAX_TASK_BYTES = 4 * 1024 * 1024
"""Of a task as compact JSON; the largest task of the project has 115 KiB."""
MAX_DEPTH = 32
MAX_INSTRUCTION_CHARS = 256 * 1024
MAX_SCRIPT_CHARS = 256 * 1024
MAX_DESCRIPTION_CHARS = 16 * 1024
MAX_NAME_CHARS = 200
MAX_TAGS = 64
"""Tags, and aliases too."""
MAX_PROBLEMS = 50
"""Of one task; what comes after them is not looked for."""

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TAG = re.compile(r"\S(?:.{0,98}\S)?")
_OWN = frozenset({"id", "env_type", "name", "description", "version", "tags", "instruction", "config", "evaluation"})
_SHORT = frozenset({"goal", "reward_fn"})
_LONG = frozenset({"instruction", "config", "evaluation"})
_METADATA = (_OWN - _LONG) | {"aliases", "difficulty", "rate_limit", "split"}

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

    The short form has ``goal`` or ``reward_fn`` and none of ``instruction``, ``config`` and ``evaluation``: ``goal`` is
    the instruction, ``reward_fn`` the ``evaluation.reward_function``, and what is no metadata is configuration.

    Raises:
        TaskError: it does not fit; ``problems`` names every place, up to a bound.
    """
    if not isinstance(document, Mapping):
        raise TaskError([("", f"a task is an object, not {_kind(document)}")])
    problems = json_problems(document)
    if problems:  # nothing below would be safe to look at
        raise TaskError(problems)
    given = dict(document)
    if _SHORT & given.keys() and not _LONG & given.keys():
        given = lengthened(given, kept=_METADATA)
    problems = _problems(given)
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


def lengthened(short: Mapping[str, Any], *, kept: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Write a task of the short form in the long one; the keys *kept* stay beside ``config``, all others go into it."""
    long: dict[str, Any] = {key: value for key, value in short.items() if key in kept}
    long["config"] = {key: value for key, value in short.items() if key not in _SHORT and key not in kept}
    if "goal" in short:
        long["instruction"] = short["goal"]
    if "reward_fn" in short:
        long["evaluation"] = {"reward_function": short["reward_fn"]}
    return long


def json_problems(document: object) -> list[Problem]:
    """Say what keeps *document* from being JSON within the bounds of a task: types, numbers, depth, size."""
    problems: list[Problem] = []
    _look(document, "", 0, problems)
    if not problems and (size := len(json.dumps(document, default=dict, ensure_ascii=False))) > MAX_TASK_BYTES:
        problems.append(("", f"a task has at most {MAX_TASK_BYTES} bytes as JSON, this one {size}"))
    return problems


def _look(value: object, path: str, depth: int, problems: list[Problem]) -> None:
    if len(problems) >= MAX_PROBLEMS:
        return
    if depth > MAX_DEPTH:
        problems.append((path, f"nested more than {MAX_DEPTH} deep"))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(key, str):
                _look(inner, joined(path, key), depth + 1, problems)
            else:
                problems.append((path, f"the key {key!r:.50} is no text"))
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            _look(inner, f"{path}[{place}]", depth + 1, problems)
    elif isinstance(value, float) and not math.isfinite(value):
        problems.append((path, "nan and infinities are no JSON"))
    elif value is not None and not isinstance(value, str | int | float):
        problems.append((path, f"{type(value).__name__} has no JSON form"))


def _problems(given: Mapping[str, Any]) -> list[Problem]:
    problems: list[Problem] = []

    def check(key: str, kind: type | tuple[type, ...], wanted: str) -> Any:
        value = given.get(key)
        if value is None or (isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)):
            return value
        problems.append((key, f"{wanted} is wanted, not {_kind(value)}"))
        return None

    for key, pattern, what in (("id", ID, "letters, digits and ._/-"), ("env_type", _TYPE, "letters, digits and ._-")):
        value = check(key, str, "a text")
        if value and not pattern.fullmatch(value):
            problems.append((key, f"{value!r:.80} is none: it begins with a letter or digit and has {what}"))
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
        (f"{key}[{place}]", "a text of 1 to 100 characters without white space at its ends is wanted")
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
            parse_call(call)
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
    if not isinstance(starts, int) or isinstance(starts, bool) or not 1 <= starts <= 1_000_000:
        problems.append(("rate_limit.starts", "a whole number from 1 to 1000000 is wanted"))
    if not isinstance(per_s, int | float) or isinstance(per_s, bool) or not 0 < per_s <= 86_400 * 31:
        problems.append(("rate_limit.per_s", "seconds above 0, at most 31 days, are wanted"))
    return problems


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

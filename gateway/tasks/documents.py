"""Tasks as text: JSON, JSON lines and YAML become plain data, and nothing but data.

YAML is read by PyYAML's safe loader, with what it would let pass in silence refused: aliases (a few lines of them stand
for gigabytes), keys that stand twice, dates.

Read ``<split>.jsonl``: one JSON object a line, each a task.

Every line is parsed when the file is read, so that a bad one stops the start and not an episode; what is kept is the
compact text, which is a third of the size of parsed objects and is what discovery answers with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gateway.core.errors import ConfigError, TaskInvalid
from gateway.core.json_text import refuse_constant

MAX_DEPTH = 32
MAX_VALUES = 200_000
"""Values in one document: a task of the largest size has fewer, unless it is made to be slow."""
MAX_PROBLEMS = 100
"""Of one document; what comes after them is not looked for."""
MAX_KEY_CHARS = 80
"""How much of a key is told."""


def read_json(data: bytes, *, where: str = "") -> Any:
    """Read one JSON document. Raises ``TaskInvalid`` with line and column, or the key that stands twice."""
    try:
        return json.loads(_text(data, where), parse_constant=refuse_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise TaskInvalid(
            [(f"line {error.lineno}", f"not JSON: {error.msg} at column {error.colno}")], where=where
        ) from None
    except (ValueError, RecursionError) as error:
        raise TaskInvalid([("", f"not JSON: {error}")], where=where) from None


def read_json_lines(data: bytes, *, where: str = "") -> list[tuple[str, Any]]:
    """Read a JSON document from each line that is not empty; returns where it stands with each.

    Raises ``TaskInvalid`` with the line.
    """
    lines = [(f"{where}:{number}", line) for number, line in enumerate(_text(data, where).split("\n"), 1)]
    return [(place, read_json(line.encode(), where=place)) for place, line in lines if line.strip()]


def read_yaml(data: bytes, *, where: str = "") -> Any:
    """Read YAML: one document as it is, several as a list. Raises ``TaskInvalid`` with the line."""
    try:
        found = list(yaml.load_all(_text(data, where), Loader=_Loader))  # a safe loader: it makes plain data only
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 0
        raise TaskInvalid([(f"line {line}", f"not YAML: {error.problem or error.context}")], where=where) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise TaskInvalid([("", f"not YAML: {' '.join(str(error).split())[:200]}")], where=where) from None
    documents = [document for document in found if document is not None]
    return documents[0] if len(documents) == 1 else documents


def read_file(path: Path) -> list[tuple[str, Any]]:
    """Read a file of tasks by its suffix: ``.json``, ``.jsonl``, ``.yaml`` or ``.yml``.

    Returns where each document stands, and the document. A list, and the list in ``{"tasks": […]}``, are its items.

    Raises:
        TaskInvalid: it cannot be read, or is not what its suffix says.
    """
    where = str(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TaskInvalid([("", error.strerror or str(error))], where=where) from None
    match path.suffix:
        case ".jsonl":
            return read_json_lines(data, where=where)
        case ".json":
            return [(_at(where, place), item) for place, item in listed(read_json(data, where=where))]
        case ".yaml" | ".yml":
            return [(_at(where, place), item) for place, item in listed(read_yaml(data, where=where))]
    raise TaskInvalid([("", "a file of tasks ends in .json, .jsonl, .yaml or .yml")], where=where)


def listed(document: Any) -> list[tuple[str, Any]]:
    """The tasks of a document, each with its path in it: one, a list, or ``{"tasks": […]}`` with nothing beside."""
    if isinstance(document, Mapping) and set(document) == {"tasks"} and isinstance(document["tasks"], list):
        return [(f"tasks[{number}]", item) for number, item in enumerate(document["tasks"])]
    if isinstance(document, list):
        return [(f"[{number}]", item) for number, item in enumerate(document)]
    return [("", document)]


def _at(where: str, place: str) -> str:
    return f"{where}: {place}" if place else where


def not_data(value: Any) -> list[tuple[str, str]]:
    """What in *value* JSON has no word for, with the path of each; empty: it is plain data of a bounded size."""
    problems: list[tuple[str, str]] = []
    # Not by recursion, which a document that is made for it would end.
    left: list[tuple[str, Any, int]] = [("", value, 0)]
    seen = 0
    while left and len(problems) < MAX_PROBLEMS:
        path, one, depth = left.pop()
        seen += 1
        if seen > MAX_VALUES:
            return [*problems, ("", f"more than {MAX_VALUES} values")]
        if depth > MAX_DEPTH:
            return [*problems, (path[:200], f"nested deeper than {MAX_DEPTH}")]
        if isinstance(one, Mapping):
            for key, inner in one.items():
                if isinstance(key, str):
                    problems += _not_text(joined(path, key), key)
                    left.append((joined(path, key), inner, depth + 1))
                else:
                    problems.append((path, f"the key {key!r:.50} is no text"))
        elif isinstance(one, (list, tuple)):
            left += [(f"{path}[{number}]", inner, depth + 1) for number, inner in enumerate(one)]
        elif isinstance(one, str):
            problems += _not_text(path, one)
        elif isinstance(one, float) and not math.isfinite(one):
            problems.append((path, f"{one} is not JSON"))
        elif not isinstance(one, (bool, int, float, type(None))):
            problems.append((path, f"{type(one).__name__} is not JSON"))
    return problems


def joined(path: str, key: str) -> str:
    """The path of *key* in the mapping at *path*."""
    shown = key if len(key) <= MAX_KEY_CHARS else f"{key[:MAX_KEY_CHARS]}…"
    return f"{path}.{shown}" if path else shown


def compact(value: Any) -> bytes:
    """Plain data as compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _not_text(path: str, text: str) -> list[tuple[str, str]]:
    try:
        text.encode()
    except UnicodeEncodeError:
        return [(path.encode("utf-8", "replace").decode(), "half a character (a lone surrogate)")]
    return []


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise TaskInvalid([("", f"not UTF-8: {error.reason} at byte {error.start}")], where=where) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return found


class _Loader(yaml.SafeLoader):
    """The safe loader, without what is not JSON anyway and what can surprise."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # PyYAML's own way to set them
        first: [(tag, pattern) for tag, pattern in some if not tag.endswith(":timestamp")]
        for first, some in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # PyYAML's own gap
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not taken", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


MAX_LINE_BYTES = 16 * 2**20
"""A task larger than this is a mistake: it has to fit into one request."""


def read_split(path: Path) -> Sequence[bytes]:
    """Read a split; each item is one task as compact JSON in UTF-8.

    Raises:
        ConfigError: with file, line and reason: not UTF-8, not JSON, not an object, an empty line, an id or alias that
            is no string or stands twice.
    """
    tasks: list[bytes] = []
    ids: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}:{number}"
                task = _parse(line.rstrip(b"\r\n"), where)
                for name in names_of(task, where):
                    if name in ids:
                        raise ConfigError(f"{where}: id: {name!r} stands on line {ids[name]} already")
                    ids[name] = number
                tasks.append(_compact(task, where))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return tasks


def _parse(line: bytes, where: str) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise ConfigError(f"{where}: longer than {MAX_LINE_BYTES} bytes")
    if not line.strip():
        raise ConfigError(f"{where}: an empty line")
    try:
        task = json.loads(line.decode("utf-8"), parse_constant=refuse_constant, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}") from error
    if not isinstance(task, dict):
        raise ConfigError(f"{where}: a task is a JSON object, not {type(task).__name__}")
    return task


def _compact(task: dict[str, Any], where: str) -> bytes:
    try:
        return json.dumps(task, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:  # 1e999 is infinite, and \ud800 is half a character
        raise ConfigError(f"{where}: {error}") from error


def names_of(task: Mapping[str, Any], where: str = "") -> list[str]:
    """What *task* may be called by: its ``id`` and its ``aliases``, if it has them.

    Raises:
        ConfigError: with *where* it stands: they are not of the form that they should have.
    """
    aliases = task.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(name, str) and name for name in aliases):
        raise ConfigError(f"{where}: aliases: a list of non-empty strings is wanted")
    if "id" not in task:
        return aliases
    name = task["id"]
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: id: a non-empty string is wanted")
    return [name, *aliases]

"""Parses task documents in JSON, JSON lines and YAML into plain data.

PyYAML's safe loader reads YAML. The gateway also refuses aliases, because a few lines of them can expand to gigabytes,
and duplicate keys. Untagged dates stay text.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from gateway.core.errors import TaskInvalid
from gateway.core.json_text import refuse_constant


def read_json(data: bytes, *, where: str = "", is_line: bool = False) -> Any:
    """Parse one JSON document. Raises ``TaskInvalid`` with line and column, or with the duplicate key.

    With *is_line*, *where* already names the line.
    """
    try:
        return json.loads(_text(data, where), parse_constant=refuse_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        line = "" if is_line else f"line {error.lineno}"
        raise TaskInvalid([(line, f"not JSON: {error.msg} at column {error.colno}")], where=where) from None
    except (ValueError, RecursionError) as error:
        raise TaskInvalid([("", f"not JSON: {error}")], where=where) from None


def read_json_lines(data: bytes, *, where: str = "") -> list[tuple[str, Any]]:
    """Parse each non-empty line as a JSON document, and return its place (``where:line``) with each document.

    Raises ``TaskInvalid`` with the line.
    """
    lines = [(f"{where}:{number}", line) for number, line in enumerate(_text(data, where).split("\n"), 1)]
    return [(place, read_json(line.encode(), where=place, is_line=True)) for place, line in lines if line.strip()]


def read_yaml(data: bytes, *, where: str = "") -> Any:
    """Parse YAML. Several documents become a list. Raises ``TaskInvalid``, with the line if the parser reports it."""
    try:
        found = list(yaml.load_all(_text(data, where), Loader=_Loader))  # a safe loader: it creates plain data only
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 0
        raise TaskInvalid([(f"line {line}", f"not YAML: {error.problem or error.context}")], where=where) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise TaskInvalid([("", f"not YAML: {' '.join(str(error).split())[:200]}")], where=where) from None
    documents = [document for document in found if document is not None]
    return documents[0] if len(documents) == 1 else documents


def read_file(path: Path) -> list[tuple[str, Any]]:
    """Read a file of tasks in the format of its suffix: ``.json``, ``.jsonl``, ``.yaml`` or ``.yml``.

    ``-`` is the standard input, in JSON, JSON lines or YAML. Returns each document with its place. Each item of a list,
    or of ``{"tasks": […]}``, is a document of its own, except in ``.jsonl``.

    Raises:
        TaskInvalid: The file cannot be read, or its content does not have the format of its suffix.
    """
    where = str(path)
    if where == "-":
        return _read_input(sys.stdin.buffer.read())
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TaskInvalid([("", error.strerror or str(error))], where=where) from None
    if path.suffix == ".jsonl":
        return read_json_lines(data, where=where)
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise TaskInvalid([("", "a file of tasks ends in .json, .jsonl, .yaml or .yml")], where=where)
    document = read_json(data, where=where) if path.suffix == ".json" else read_yaml(data, where=where)
    return [(f"{where}: {place}" if place else where, item) for place, item in listed(document)]


def _read_input(data: bytes) -> list[tuple[str, Any]]:
    where = "standard input"
    start = data.lstrip()
    if start.startswith(b"{") and start.rstrip().endswith(b"}") and b"\n" in start.rstrip():
        with contextlib.suppress(ValueError):
            json.loads(start.partition(b"\n")[0])
            return read_json_lines(data, where=where)
    document = read_json(data, where=where) if start.startswith((b"{", b"[")) else read_yaml(data, where=where)
    return [(f"{where}: {place}" if place else where, item) for place, item in listed(document)]


def listed(document: Any) -> list[tuple[str, Any]]:
    """Return the tasks of a document (one task, a list, or ``{"tasks": […]}`` without other keys) with their paths."""
    if isinstance(document, Mapping) and set(document) == {"tasks"} and isinstance(document["tasks"], list):
        return [(f"tasks[{number}]", item) for number, item in enumerate(document["tasks"])]
    if isinstance(document, list):
        return [(f"[{number}]", item) for number, item in enumerate(document)]
    return [("", document)]


def compact(value: Any) -> bytes:
    """Encode plain data as compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise TaskInvalid([("", f"not UTF-8: {error.reason} at byte {error.start}")], where=where) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (twice := _repeated(name for name, _ in pairs)) is not None:
        raise ValueError(f"the key {twice!r} occurs twice")
    return dict(pairs)


def _repeated(names: Iterable[str]) -> str | None:
    """Return the first of *names* that repeats an earlier one, or None. Takes linear time."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


MAX_NUMBER_CHARS = 400
"""Maximum length of a number in YAML. Converting a longer one takes quadratic time, and no JSON number needs more."""
_TYPES = ("map", "seq", "str", "int", "float", "bool", "null")


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without timestamps, aliases and duplicate keys, which JSON lacks or which can surprise."""

    # Types that JSON lacks, such as !!set and !!binary, have no constructor. None stands for "any other tag".
    yaml_constructors = {  # noqa: RUF012  # PyYAML's own way to set them
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in _TYPES
    }
    yaml_implicit_resolvers = {  # noqa: RUF012  # PyYAML's own way to set them
        first: [(tag, pattern) for tag, pattern in some if not tag.endswith(":timestamp")]
        for first, some in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # PyYAML's own gap
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not supported", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        twice = _repeated(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} occurs twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def _scalar(make: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a constructor that refuses a scalar that does not fit its tag, and an overlong or infinite number."""

    def construct(loader: _Loader, node: Any) -> Any:
        problem = f"not a {node.tag.rpartition(':')[2]}: {str(node.value)[:60]!r}"
        if len(node.value) > MAX_NUMBER_CHARS:
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        try:
            value = make(loader, node)
        except (ValueError, ArithmeticError, LookupError):
            value = math.nan
        if isinstance(value, float) and not math.isfinite(value):
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return value

    return construct


for _type in ("int", "float", "bool"):
    _tag = f"tag:yaml.org,2002:{_type}"
    _Loader.add_constructor(_tag, _scalar(yaml.SafeLoader.yaml_constructors[_tag]))

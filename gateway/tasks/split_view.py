"""Builds the view of one split: the tasks of its file, then the tasks registered at run time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.core.environment import SplitType
from gateway.core.errors import ConfigError, TaskInvalid
from gateway.core.ports.tasks import StoredTask
from gateway.tasks.documents import compact, read_json
from gateway.tasks.schema import variants_of

MAX_LINE_BYTES = 16 * 2**20
"""Maximum size of a task in a file, in bytes. A larger task would not fit into one request."""
_Row = tuple[bytes, Sequence[str], Sequence[str]]
"""A task as compact JSON, with its names and its tags."""
ORDER = {kind.value: position for position, kind in enumerate(SplitType)}


@dataclass(frozen=True, slots=True)
class Added:
    """A task registered at run time, with the names and tags for its look-up."""

    stored: StoredTask
    names: Sequence[str]
    tags: Sequence[str]


@dataclass(slots=True)
class SplitView:
    """The present tasks of one split, with indices for look-ups."""

    tasks: Sequence[bytes | None] = ()
    """Tasks by index, as compact JSON. None marks a removed task."""
    names: Mapping[str, int] = field(default_factory=dict)
    tags: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Tag → indices in ascending order."""
    added: Mapping[int, Added] = field(default_factory=dict)
    has_holes: bool = False


def indexed(tasks: Iterable[bytes]) -> SplitView:
    """Return the view of a file's *tasks*, each as compact JSON."""
    return _view((raw, *_keys(json.loads(raw))) for raw in tasks)


def read(task: StoredTask) -> Added:
    """Parse a task of the store to get the names and tags for its look-up."""
    return Added(task, *_keys(json.loads(task.body)))


def read_split(path: Path) -> SplitView:
    """Read ``<split>.jsonl``, in which each line is a JSON object with one task, or with several; see `variants_of`.

    The gateway parses every line now, so that an invalid line stops the start instead of an episode. It keeps the
    compact text, which has a third of the size of parsed objects. Discovery answers with this text.

    Raises:
        ConfigError: A line is empty, too long, not UTF-8 or not a JSON object. An id or alias is a duplicate, or not a
            non-empty string. The message has file, line and reason.
    """
    try:
        with path.open("rb") as file:
            return _view(_lines(file, path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _lines(file: Iterable[bytes], path: Path) -> Iterator[_Row]:
    seen: dict[str, int] = {}
    for number, line in enumerate(file, 1):
        where = f"{path}:{number}"
        try:
            tasks = variants_of(_read_line(line.rstrip(b"\r\n"), where))
        except TaskInvalid as error:
            raise ConfigError(f"{where}: {error.detail}") from None
        for task in tasks:
            names, tags = _keys(task, where)
            for name in names:
                if name in seen:
                    raise ConfigError(f"{where}: id: {name!r} is already on line {seen[name]}")
                seen[name] = number
            try:
                body = compact(task)
            except (ValueError, RecursionError) as error:  # 1e999 parses as infinity, \ud800 as half a character
                raise ConfigError(f"{where}: {error}") from error
            yield body, names, tags


def _read_line(line: bytes, where: str) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise ConfigError(f"{where}: longer than {MAX_LINE_BYTES} bytes")
    if not line.strip():
        raise ConfigError(f"{where}: an empty line")
    try:
        task = read_json(line, where=where, is_line=True)
    except TaskInvalid as error:
        raise ConfigError(error.detail) from None
    if not isinstance(task, dict):
        raise ConfigError(f"{where}: a task is a JSON object, not {type(task).__name__}")
    return task


def _view(rows: Iterable[_Row]) -> SplitView:
    tasks: list[bytes | None] = []
    names: dict[str, int] = {}
    tags: dict[str, list[int]] = {}
    for index, (body, own_names, own_tags) in enumerate(rows):
        tasks.append(body)
        names.update(dict.fromkeys(own_names, index))
        for tag in own_tags:
            tags.setdefault(tag, []).append(index)
    return SplitView(tasks, names, tags)


def _keys(task: Mapping[str, Any], where: str = "") -> tuple[list[str], list[str]]:
    """Return the names and tags for the look-up of *task*. Raises ``ConfigError``."""
    given = task.get("tags")
    tags = [tag for tag in given if isinstance(tag, str)] if isinstance(given, list) else []
    return names_of(task, where), list(dict.fromkeys(tags))


def names_of(task: Mapping[str, Any], where: str = "") -> list[str]:
    """Return the names of *task*, its ``id`` and ``aliases``. Raises ``ConfigError`` if a name is malformed."""
    aliases = task.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(name, str) and name for name in aliases):
        raise ConfigError(f"{where}: aliases: must be a list of non-empty strings")
    if "id" not in task:
        return aliases
    name = task["id"]
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: id: must be a non-empty string")
    return [name, *aliases]


def merged(file: SplitView, added: Sequence[Added]) -> SplitView:
    """Return the view of the tasks of *file*, followed by *added*. *file* may be empty, *added* may not."""
    first = len(file.tasks)
    placed = {first + one.stored.place: one for one in sorted(added, key=lambda one: one.stored.place)}
    tasks: list[bytes | None] = [*file.tasks, *[None] * (max(placed) + 1 - first)]
    names: dict[str, int] = {}
    tags = {tag: list(indices) for tag, indices in file.tags.items()}
    for index, one in placed.items():
        tasks[index] = one.stored.body
        for name in one.names:
            names.setdefault(name, index)
        for tag in one.tags:
            tags.setdefault(tag, []).append(index)
    for index, one in placed.items():
        names[one.stored.id] = index  # an id comes before another task's alias
    return SplitView(tasks, names | dict(file.names), tags, placed, has_holes=None in tasks)


def rank(split: str) -> tuple[int, str]:
    """Return the sort key of a split: train, validation and test come first, then the others by name."""
    return ORDER.get(split, len(ORDER)), split

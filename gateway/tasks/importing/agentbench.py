"""AgentBench's OS-interaction items as tasks of the os environment.

A folder holds ``data/`` and ``scripts/``: ``data/<n>/*.json`` are the standard sets with their scripts in
``scripts/<n>/``, ``data/dev.json`` is the development set with ``scripts/dev/``. The training set is in
``train_<date>/*.json`` beside ``data/``, or in ``data/train*.json`` (``.jsonl`` too), with ``scripts/train/``. The ids
are those of AgentBench v0.2, ``{set}{file}-{position}``, which do not depend on the order of a directory; *position*
counts from 0, also over items that cannot be used.

The items keep their own order of judging (``judge: "after"``): the reference command runs when the agent is done, in
the box that it has changed. Only the well-known matchers (``check/integer-match.py`` and the like) run outside the box.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gateway.core.environment import SplitType
from gateway.core.errors import ConfigError
from gateway.tasks.importing.agentbench_items import CREATE_IS_A_LIST, task_of
from gateway.tasks.importing.entries import Entry, Imported, InvalidEntry, Refused
from gateway.tasks.importing.rows import Row, read_rows

TRAIN_PREFIX = "train-0223-"
"""Of the training set, as AgentBench's own configuration names it."""
TRAIN_SCRIPTS = ("train", "7")
"""The training set shares the scripts of set 7 where it has none of its own."""
_HOMES = ("data/os_interaction", "os_interaction", ".")
"""Where the benchmark's folder is, seen from its checkout, from the checkout's ``data``, and from itself."""


@dataclass(frozen=True, slots=True)
class ItemFile:
    """One file of items."""

    path: Path
    prefix: str
    part: SplitType
    scripts: tuple[Path, ...]
    """Where its scripts are looked for, in that order."""
    is_alone: bool
    """It is the only file of its set; then an id without the file's name is known too."""


def read_agentbench(folder: Path, *, part: SplitType | None = None) -> Iterator[Entry]:
    """Read the items below *folder*: ``data/os_interaction`` of a checkout, or a folder above it.

    Args:
        part: of the standard sets (``test``), the development set (``validation``) and the training set (``train``)
            only this one.

    Raises:
        ConfigError: there are no items there, or a file of them cannot be read.
    """
    for file in item_files(folder):
        if part is None or file.part == part:
            for position, row in enumerate(read_rows(file.path)):
                yield _entry(row, file, position)


def item_files(folder: Path) -> list[ItemFile]:
    """Find the files of items: the standard sets in their order, then the development set, then training.

    Raises:
        ConfigError: there are none.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    for home in _HOMES:
        if found := _files_of(folder / home):
            return found
    raise ConfigError(f"{folder}: no items; data/os_interaction of AgentBench is wanted, or a folder above it")


def _files_of(folder: Path) -> list[ItemFile]:
    data, scripts = folder / "data", folder / "scripts"
    found: list[ItemFile] = []
    numbered = (path for path in data.glob("*") if path.is_dir() and path.name.isdecimal())
    for home in sorted(numbered, key=lambda path: int(path.name)):
        prefix = f"std-{int(home.name):03d}-"
        found += [
            ItemFile(path, prefix, SplitType.TEST, (scripts / home.name,), False) for path in _item_paths(home, "*")
        ]
    others: tuple[tuple[str, list[Path], SplitType, tuple[str, ...]], ...] = (
        ("dev-001-", _named_paths(data, "dev"), SplitType.VALIDATION, ("dev",)),
        (TRAIN_PREFIX, _named_paths(data, "train") + _train_paths(folder), SplitType.TRAIN, TRAIN_SCRIPTS),
    )
    for prefix, paths, part, names in others:
        homes = tuple(scripts / name for name in names)
        found += [ItemFile(path, prefix, part, homes, len(paths) == 1) for path in paths]
    return found


def _named_paths(data: Path, stem: str) -> list[Path]:
    return _item_paths(data, f"{stem}*") + _item_paths(data / stem, "*")


def _train_paths(folder: Path) -> list[Path]:
    return [path for home in sorted(folder.glob("train_*")) for path in _item_paths(home, "*")]


def _item_paths(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if path.suffix in (".json", ".jsonl") and path.is_file())


def _entry(row: Row, file: ItemFile, position: int) -> Entry:
    name = f"{file.prefix}{file.path.stem}-{position:05d}"
    where = f"{row.where} ({name})"
    if row.fault:
        return Refused(where, row.fault)
    try:
        task = task_of(row.value, scripts=file.scripts, name=name)
    except InvalidEntry as error:
        return Refused(where, str(error))
    if file.is_alone:
        task["aliases"] = [f"{file.prefix}{position:05d}"]
    is_list = isinstance(row.value, dict) and isinstance(row.value.get("create"), list)
    return Imported(where, task, (CREATE_IS_A_LIST,) if is_list else ())

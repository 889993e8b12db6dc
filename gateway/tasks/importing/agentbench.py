"""Imports the OS-interaction items of AgentBench as tasks of the os environment.

A folder contains ``data/`` and ``scripts/``. The standard sets are ``data/<n>/*.json`` with scripts in
``scripts/<n>/``. The development set is ``data/dev.json`` with scripts in ``scripts/dev/``. The training set is in
``train_<date>/*.json`` next to ``data/``, or in ``data/train*.json`` (also ``.jsonl``), with scripts in
``scripts/train/``. The ids have the form of AgentBench v0.2, ``{set}{file}-{position}``, independent of a directory's
order. *position* counts from 0 and includes unusable items.

The items keep AgentBench's order of judging (``judge: "after"``). The reference command runs after the agent has
finished, in the box that the agent changed. Only the known matchers (such as ``check/integer-match.py``) run outside
the box.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envserver.generic.patterns import compiled

from gateway.core.environment import SplitType
from gateway.core.errors import ConfigError
from gateway.tasks.importing.rows import Entry, Imported, InvalidEntry, Row, RowRefused, read_rows

TRAIN_PREFIX = "train-0223-"
"""Prefix of the training set's ids, from AgentBench's own configuration."""
TRAIN_SCRIPTS = ("train", "7")
"""Script folders of the training set, which uses the scripts of set 7 if it does not have its own."""
_HOMES = ("data/os_interaction", "os_interaction", ".")
"""Paths of the benchmark's folder, relative to its checkout, to the checkout's ``data``, and to itself."""


@dataclass(frozen=True, slots=True)
class ItemFile:
    """One file of items."""

    path: Path
    prefix: str
    part: SplitType
    scripts: tuple[Path, ...]
    """Folders with the items' scripts, in the order of the search."""
    is_alone: bool
    """True if the file is the only file of its set. Its tasks then have an alias without the file's name."""


def read_agentbench(folder: Path, *, part: SplitType | None = None) -> Iterator[Entry]:
    """Read the items below *folder*.

    Args:
        folder: ``data/os_interaction`` of a checkout, or a folder above it.
        part: The only part to read: the standard sets (``test``), the development set (``validation``) or the training
            set (``train``). None: all parts.

    Raises:
        ConfigError: The folder has no items, or a file of items cannot be read.
    """
    for file in item_files(folder):
        if part is None or file.part == part:
            for position, row in enumerate(read_rows(file.path)):
                yield _entry(row, file, position)


def item_files(folder: Path) -> list[ItemFile]:
    """Find the files of items: the standard sets in their order, then the development set, then the training set.

    Raises:
        ConfigError: The folder does not exist or has no files of items.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    for home in _HOMES:
        if found := _files_of(folder / home):
            return found
    raise ConfigError(f"{folder}: no items; DIR must be data/os_interaction of AgentBench, or a folder above it")


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


def _entry(row: Row | RowRefused, file: ItemFile, position: int) -> Entry:
    name = f"{file.prefix}{file.path.stem}-{position:05d}"
    where = f"{row.where} ({name})"
    if isinstance(row, RowRefused):
        return RowRefused(where, row.reason)
    try:
        task = task_of(row.value, scripts=file.scripts, name=name)
    except InvalidEntry as error:
        return RowRefused(where, str(error))
    if file.is_alone:
        task["aliases"] = [f"{file.prefix}{position:05d}"]
    is_list = isinstance(row.value, dict) and isinstance(row.value.get("create"), list)
    return Imported(where, task, (*((CREATE_IS_A_LIST,) if is_list else ()), *_doubts(task)))


IMAGES = ("default", "packages", "ubuntu")
LANGUAGES = ("bash", "python", "c", "c++")
MATCHERS = ("integer-match", "string-match", "size-match", "containing", "in")
"""Checkers of AgentBench that the environment implements outside the box."""
MAX_SCRIPT_BYTES = 2**20
"""Maximum size of one script. The benchmark's own scripts have a few KiB."""
CREATE_IS_A_LIST = "create is a list: none of it is run, as AgentBench runs none"
"""A note on the task. The benchmark's published results come from boxes without these steps."""
_HEREDOC = re.compile(r"(?<!<)<<-?\s*(['\"]?)(\w+)\1(?!<)([^\n]*)\n.*?^\t*\2$", re.DOTALL | re.MULTILINE)
_QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|\$\(\(.*?\)\)|(?:^|(?<=\s))\#[^\n]*""", re.DOTALL | re.MULTILINE)
_NEEDS_NETWORK = re.compile(
    r"\b(?:apt(?:-get)?|yum|dnf|apk|pip3?|npm)\s+(?:-\S+\s+)*(?:install|update|add|remove)\b"
    r"|\b(?:curl|wget|git clone)\b[^\n|;&]*https?://"
)
_DESCRIPTOR = re.compile(r"(?:^|\s)(\d{5,})[<>]", re.MULTILINE)
_HUMAN_SIZE = re.compile(r"\b(?:du|ls|df)\b[^\n|;&]*\s-\w*h")
_LEFT_BY_BASH = re.compile(r"\bnohup\b|\bsetsid\b|(?<![&<>|;])&(?![&>])")
_LEFT_BY_OTHERS = re.compile(r"fork|spawn|setsid|Popen|os\.system")
"""Marks of a script that may leave processes running. A false match only costs time."""


def task_of(item: object, *, scripts: Sequence[Path], name: str) -> dict[str, Any]:
    """Turn one item into a task line. Its script files are in the folders *scripts*, searched in that order.

    Raises:
        InvalidEntry: A field is missing or malformed, or a script does not exist.
    """
    if not isinstance(item, Mapping):
        raise InvalidEntry(f"must be an object, not {type(item).__name__}")
    instruction, evaluation = item.get("description"), item.get("evaluation")
    if not isinstance(instruction, str) or not instruction.strip():
        raise InvalidEntry("description: must be a text")
    if not isinstance(evaluation, Mapping):
        raise InvalidEntry("evaluation: must be an object")
    labels = item.get("labels") or []
    tags = [label for label in (labels if isinstance(labels, list) else [labels]) if isinstance(label, str)]
    return {
        "id": name,
        "tags": ["agentbench", *tags],
        "instruction": instruction,
        "config": _config(item, scripts),
        "evaluation": _evaluation(evaluation, beside=item.get("example"), scripts=scripts),
    }


def _config(item: Mapping[str, Any], scripts: Sequence[Path]) -> dict[str, Any]:
    create = item.get("create") or {}
    if isinstance(create, list):  # see CREATE_IS_A_LIST
        create = {}
    if not isinstance(create, Mapping):
        raise InvalidEntry("create: must be an object")
    image = create.get("local") or create.get("image") or "default"
    if image not in IMAGES:
        raise InvalidEntry(f"create.local: no image {image!r}; there are {', '.join(IMAGES)}")
    given = create.get("init") or []
    init = [_script(script, scripts, "create.init") for script in (given if isinstance(given, list) else [given])]
    config: dict[str, Any] = {"image": image, "init": init}
    if item.get("start"):
        # The environment types this script into the shell, whatever its language.
        config["start"] = _script(item["start"], scripts, "start")["code"]
    if any(_leaves_processes(script) for script in init):
        config["live_init"] = True
    return config


def _doubts(task: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a task can probably never be opened, or never be won, in a box of this gateway."""
    scripts = [script["code"] for script in task["config"]["init"] if script["language"] == "bash"]
    for code in (*scripts, task["config"].get("start", "")):
        if found := _NEEDS_NETWORK.search(code):
            yield f"it cannot be opened: {found[0].strip()!r} needs packages or a network, and boxes have neither"
        if found := _DESCRIPTOR.search(_QUOTED.sub("", code)):
            yield f"it cannot be opened: {found[0].strip()!r} is a file descriptor, higher than a process may have"
    example = task["evaluation"].get("example") or {"code": ""}
    if {"matcher": "size-match"} in task["evaluation"].get("check", ()) and _HUMAN_SIZE.search(example["code"]):
        yield "it may never be won: size-match cannot read a size such as 4.0K, and its example may print one"


def _leaves_processes(script: Mapping[str, str]) -> bool:
    """Return True if *script* may leave processes running. Quotes, comments and here-documents of bash do not count."""
    if script["language"] != "bash":
        return _LEFT_BY_OTHERS.search(script["code"]) is not None
    return _LEFT_BY_BASH.search(_QUOTED.sub("", _HEREDOC.sub(r"\3", script["code"]))) is not None


def _evaluation(evaluation: Mapping[str, Any], *, beside: object, scripts: Sequence[Path]) -> dict[str, Any]:
    if evaluation.get("match"):
        return {"judge": "after", "match": _match(evaluation["match"])}
    given = evaluation.get("check")
    steps = given if isinstance(given, list) else [given]
    if "check" not in evaluation or not steps:
        raise InvalidEntry("evaluation: must have match or check")
    checks = [_check(step, scripts) for step in steps]
    read: dict[str, Any] = {"judge": "after", "check": checks}
    if example := evaluation.get("example") or beside:
        read["example"] = _script(example, scripts, "example")
    elif None in checks:
        raise InvalidEntry("evaluation.check: null means the script example, which is missing")
    return read


def _match(match: object) -> dict[str, Any]:
    given = {"answer": match} if isinstance(match, str) else dict(match) if isinstance(match, Mapping) else {}
    pattern = given.get("regex")
    if isinstance(given.get("answer"), str):
        return {"strip": True, **given}
    if not isinstance(pattern, str):
        raise InvalidEntry("evaluation.match: must be a text, or an object with answer or regex")
    try:
        compiled(pattern)
    except ValueError as error:
        raise InvalidEntry(f"evaluation.match.regex: {error}") from error
    return {"strip": True, **given}


def _check(step: object, scripts: Sequence[Path]) -> dict[str, str] | None:
    if step is None:
        return None
    if isinstance(step, Mapping) and isinstance(step.get("file"), str):
        path = Path(step["file"])
        if path.parent.name == "check" and path.suffix == ".py" and path.stem in MATCHERS:
            return {"matcher": path.stem}
    return _script(step, scripts, "evaluation.check")


def _script(script: object, scripts: Sequence[Path], key: str) -> dict[str, str]:
    """Read the script at *key*. A plain text is a bash script."""
    if isinstance(script, str):
        return {"language": "bash", "code": script}
    given: Mapping[str, Any] = script if isinstance(script, Mapping) else {}
    language = given.get("language") or "bash"
    if language not in LANGUAGES:
        raise InvalidEntry(f"{key}: no language {language!r}; there are {', '.join(LANGUAGES)}")
    if isinstance(given.get("code"), str):
        return {"language": language, "code": given["code"]}
    if isinstance(given.get("file"), str):
        return {"language": language, "code": _text(given["file"], scripts, key)}
    raise InvalidEntry(f"{key}: a script is a text, or an object with file or code")


def _text(file: str, scripts: Sequence[Path], key: str) -> str:
    try:
        path = _found(file, scripts)
        if path is None:
            raise InvalidEntry(f"{key}: no script {file} in {', '.join(f'scripts/{home.name}' for home in scripts)}")
        with path.open("rb") as script:
            data = script.read(MAX_SCRIPT_BYTES + 1)
    except OSError as error:
        raise InvalidEntry(f"{key}: {file}: {error.strerror}") from error
    if len(data) > MAX_SCRIPT_BYTES:
        raise InvalidEntry(f"{key}: {file} has more than {MAX_SCRIPT_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidEntry(f"{key}: {file} is not UTF-8: {error.reason}") from error


def _found(file: str, scripts: Sequence[Path]) -> Path | None:
    """Find *file* in the folders *scripts*. Return None for a missing file and for a path outside its folder."""
    if "\0" in file:
        return None
    paths = ((home.resolve(), (home / file).resolve()) for home in scripts)
    return next((path for home, path in paths if path.is_relative_to(home) and path.is_file()), None)

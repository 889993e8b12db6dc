"""Tasks in ``<split>.jsonl`` files: one JSON object per line, blank lines ignored.

Only the offsets of the lines stay in memory (8 bytes per task). A task is read on request. ``pathlib`` is not used
here, because it costs a bare server 0.9 MiB.
"""

import json
import os
import threading
from array import array
from typing import Any

from envserver.content import SPLIT_TYPES, Split
from envserver.errors import ConfigError

_ENDING = ".jsonl"


class TaskFiles:
    """The tasks of one directory. Without a directory, there is a split ``train`` without tasks."""

    def __init__(self, directory: str | None) -> None:
        """
        Raises:
            ConfigError: *directory* is set but is not a directory.
        """
        if directory is not None and not os.path.isdir(directory):
            raise ConfigError(f"tasks: {directory} is not a directory")
        files = sorted(os.listdir(directory)) if directory else []
        found = {name.removesuffix(_ENDING): name for name in files if name.endswith(_ENDING)}
        standard = [name for name in SPLIT_TYPES if name in found]
        ordered = [*standard, *(name for name in found if name not in SPLIT_TYPES)]
        self.splits: list[Split] = [Split.of(name) for name in ordered] or [Split.of("train")]
        self._files = {name: _TaskFile(os.path.join(directory or "", found[name])) for name in ordered}

    @classmethod
    def of(cls, directory: str | None, environment: str) -> "TaskFiles":
        """Open *directory*'s sub-directory for *environment* if it exists, else *directory* itself."""
        if directory is not None and os.path.isdir(own := os.path.join(directory, environment)):
            return cls(own)
        return cls(directory)

    def count(self, split: str) -> int:
        """Return the number of tasks in a split, or 0 for a split without a file."""
        return self._files[split].count() if split in self._files else 0

    def find(self, task_id: str) -> dict[str, Any] | None:
        """Return the first task with this ``id`` or ``task_id``. It scans the files, so it is for rare use."""
        return next((task for file in self._files.values() if (task := file.find(task_id)) is not None), None)

    def read(self, split: str, start: int, stop: int) -> list[dict[str, Any]]:
        """Return the tasks from *start* to *stop*, exclusive. Both are from 0 to the count."""
        return self._files[split].read(start, stop) if split in self._files else []


class _TaskFile:
    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._offsets: array[int] | None = None

    def count(self) -> int:
        return len(self._index()) - 1

    def read(self, start: int, stop: int) -> list[dict[str, Any]]:
        offsets = self._index()
        if start >= stop:
            return []
        with open(self._path, "rb") as file:
            data = os.pread(file.fileno(), offsets[stop] - offsets[start], offsets[start])
        lines = [line for line in data.split(b"\n") if line.strip()]
        return [self._task(line, start + i) for i, line in enumerate(lines)]

    def find(self, task_id: str) -> dict[str, Any] | None:
        # Parse a line only if it contains the id, either raw or as JSON escapes it.
        needles = {task_id.encode(errors="surrogatepass"), json.dumps(task_id)[1:-1].encode()}
        with open(self._path, "rb") as file:
            for place, line in enumerate(line for line in file if line.strip()):
                if any(needle in line for needle in needles):
                    task = self._task(line, place)
                    if task.get("id", task.get("task_id")) == task_id:
                        return task
        return None

    def _task(self, line: bytes, index: int) -> dict[str, Any]:
        try:
            task = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{os.path.basename(self._path)}, task {index}: not JSON: {error}") from error
        if not isinstance(task, dict):
            raise TypeError(f"{os.path.basename(self._path)}, task {index}: not an object")
        return task

    def _index(self) -> "array[int]":
        """Return the offset of each task and the file's end. The first use scans the file."""
        with self._lock:
            if self._offsets is None:
                offsets = array("q")
                offset = 0
                with open(self._path, "rb") as file:
                    for line in file:
                        if line.strip():
                            offsets.append(offset)
                        offset += len(line)
                offsets.append(offset)
                self._offsets = offsets
            return self._offsets

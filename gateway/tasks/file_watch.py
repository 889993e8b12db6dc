"""Task files that change while the gateway runs: they are read again, and their tasks are served without a restart.

A folder is read when two looks in a row found it the same, so that no half-written file is. What is wrong with a file
is logged once and changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gateway.core.environment import Environment
from gateway.core.errors import ConfigError
from gateway.core.ids import EnvironmentName
from gateway.tasks.registry import TaskRegistry
from gateway.tasks.split_view import SplitView, read_split

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""Between two looks. Polled, as inotify does not hear of what another machine edits on a shared file system."""

Stamps = Mapping[Path, tuple[int, int, int, int]]
"""Of each file what differs if it was written to or replaced; mtime alone is kept by ``cp -p``."""


@dataclass(slots=True)
class _Folder:
    """One environment's task folder, by its files' stamps."""

    served: Stamps = field(default_factory=dict)
    """As they were when the registry's tasks were read."""
    refused: Stamps | None = None
    """As they were when something was wrong with one of them."""
    seen: Stamps = field(default_factory=dict)
    """At the last look."""


class TaskFileWatch:
    """Tells the registry of changed task files; to be used from one event loop."""

    def __init__(self, registry: TaskRegistry, environments: Iterable[Environment], *, poll_s: float = POLL_S) -> None:
        """Take for read what is in the folders now.

        Args:
            registry: Has just read the files of all *environments*.
            environments: Those on offer at each time it is iterated: the catalog.
            poll_s: Seconds between two looks of `run`.
        """
        self._registry = registry
        self._environments = environments
        self._poll_s = poll_s
        self._folders: dict[EnvironmentName, _Folder] = {}
        for environment in environments:
            if environment.tasks is not None:
                stamps = _stamps(environment.tasks)
                self._folders[environment.name] = _Folder(served=stamps, seen=stamps)

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self.look()
            except Exception:  # what is on a disk must not end the watch over everything else
                logger.exception("tick_failed loop=task_files")

    async def look(self) -> None:
        """Look at every folder once, and read what changed before the last look and not since."""
        for environment in list(self._environments):
            if environment.tasks is None:
                continue
            folder = self._folders.setdefault(environment.name, _Folder())
            found = await asyncio.to_thread(_stamps, environment.tasks)
            is_at_rest, folder.seen = found == folder.seen, found
            if is_at_rest and found not in (folder.served, folder.refused):
                await self._read(environment.name, environment.tasks, folder, found)

    async def _read(self, environment: EnvironmentName, directory: Path, folder: _Folder, found: Stamps) -> None:
        changed = [path for path, stamp in found.items() if folder.served.get(path) != stamp]
        kept = {path.stem for path in found}
        views: dict[str, SplitView | None] = {path.stem: None for path in folder.served if path.stem not in kept}
        try:
            if not found:  # a folder that was unmounted must not take every task with it
                raise ConfigError(f"{directory}: no <split>.jsonl in it")
            views |= await asyncio.to_thread(lambda: {path.stem: read_split(path) for path in changed})
        except ConfigError as error:
            logger.error("task_files_refused environment=%s error=%s", environment, error.detail)
            folder.refused = found
            return
        folder.served, folder.refused = found, None
        told = self._registry.replace_files(environment, views)
        if told:
            logger.info("task_files_changed environment=%s tasks=%s", environment, ",".join(told))


def _stamps(directory: Path) -> Stamps:
    found = {}
    for path in sorted(directory.glob("*.jsonl")):
        try:
            status = path.stat()
        except OSError:
            continue  # it went just now
        found[path] = (status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns)
    return found

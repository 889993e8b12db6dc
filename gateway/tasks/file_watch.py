"""Reloads task files that change while the gateway runs, so that it serves their tasks without a restart.

The watch reads a changed folder once two scans in a row found it the same, so that it reads no half-written file. An
invalid file is logged once, and the gateway keeps serving the previous tasks.
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
from gateway.core.periodic import pause
from gateway.tasks.registry import TaskRegistry
from gateway.tasks.split_view import SplitView, read_split

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""Seconds between two scans. Inotify would miss edits that another machine makes on a shared file system."""

Stamps = Mapping[Path, tuple[int, int, int, int]]
"""The modification time, size, inode and change time of each file. ``cp -p`` keeps the modification time."""


@dataclass(slots=True)
class _Folder:
    """The state of one environment's task folder, as stamps of its files."""

    served: Stamps = field(default_factory=dict)
    """Stamps of the files that the registry's tasks came from."""
    refused: Stamps | None = None
    """Stamps of the last refused files. None: the last read succeeded."""
    seen: Stamps = field(default_factory=dict)
    """Stamps at the last scan."""


class TaskFileWatch:
    """Passes changed task files to the registry. All calls must come from one event loop."""

    def __init__(self, registry: TaskRegistry, environments: Iterable[Environment], *, poll_s: float = POLL_S) -> None:
        """Treat the present content of the folders as already read.

        Args:
            registry: The registry, which has just read the files of all *environments*.
            environments: The catalog: each iteration yields the environments that are available at that time.
            poll_s: Seconds between two scans of `run`.
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
        """Scan the folders every *poll_s* seconds until cancelled."""
        while True:
            await pause(self._poll_s)
            try:
                await self.look()
            except Exception:  # one unreadable folder must not end the watch of all folders
                logger.exception("tick_failed loop=task_files")

    async def look(self) -> None:
        """Scan every folder once. Read each changed folder whose files have not changed since the last scan."""
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
            if not found:  # an unmounted folder must not remove all of its tasks
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
            continue  # removed since the listing
        found[path] = (status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns)
    return found

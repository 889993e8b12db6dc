"""Watches the operators' task modules: computes a digest of each environment's folder, and detects changes.

A worker imports task modules once, at its start, so an edit takes effect in new workers. The digest of the folder's
content is part of a worker's revision (``Environment.digest``). The control loop drains workers of another revision
while their sessions continue. This module only reads names and bytes, and imports nothing from a folder.

Write access to a folder gives control over rewards. So a folder is refused if users other than its owner can write to
it. It is also refused if it is a link, if a link in it leads outside, or if it is too large. A refused folder counts as
missing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment
from gateway.core.ids import EnvironmentName
from gateway.core.periodic import pause

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""Seconds between two checks. Polling, because inotify misses edits by another machine on a shared file system."""
MAX_FILES = 2_000
"""Maximum number of files and folders of one environment. Each is checked every ``POLL_S`` seconds."""
MAX_BYTES = 64 * 2**20
_CHUNK_BYTES = 2**20
_ATTEMPTS = 3
"""Maximum number of times that one check reads a folder that changes during the read."""
_SETTLED_S = 2.0
"""Seconds after a change in which a further change may stay unnoticed: file systems' clocks tick some ms apart."""


class FolderRefused(Exception):
    """The folder is not served. The message has the reason and the remedy."""


class _Unsettled(Exception):
    """A file changed while it was read."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One file, folder or link in an environment's folder."""

    name: str
    """The path below the folder, in the operating system's spelling."""
    status: os.stat_result

    def stamp(self) -> tuple[str, int, int, int, int, int]:
        """Return values that differ after a write or a replacement. ``cp -p`` keeps the mtime, so it is not enough."""
        found = self.status
        return (self.name, found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class FolderContent:
    """The result of a check of a folder."""

    digest: str = ""
    """Digest of the content, 32 hexadecimal digits; empty: the folder is missing or empty."""
    files: int = 0
    _stamps: tuple[object, ...] | None = None
    """Stamps of all entries; None if the last change is too recent to detect the next one by them."""


class CustomTaskFolders:
    """The folders of all environments that name a task module. Use it from one event loop only."""

    def __init__(self, root: Path | None, catalog: Catalog) -> None:
        """Create a watch that has not read anything yet.

        Args:
            root: The path of the environments' folders (``<root>/<folder>``) in this process; it may be missing. None:
                no folder is checked.
            catalog: The catalog to update when the content of a folder changes. The pool then replaces the workers.
        """
        self._root = root.absolute() if root is not None else None
        self._catalog = catalog
        self._seen: dict[tuple[EnvironmentName, str], tuple[FolderContent, str]] = {}
        """The last content and the refusal's reason (empty: accepted), by environment and folder."""

    async def fill(self, environment: Environment) -> Environment:
        """Return *environment*, available or not, with the current digest of its folder."""
        tasks = environment.custom_tasks
        if tasks is None or self._root is None:
            return environment
        found, _ = await asyncio.to_thread(_read, self._root, tasks.folder, None)
        return replace(environment, custom_tasks=replace(tasks, content=found.digest))

    async def look(self) -> None:
        """Check every folder once, and update the catalog. Await it before the first worker starts."""
        if self._root is None:
            return
        wanted = [(one.name, one.custom_tasks.folder) for one in self._catalog if one.custom_tasks is not None]
        self._seen = {key: seen for key, seen in self._seen.items() if key in wanted}
        for name, folder in wanted:
            await self._look_at(name, folder, self._root)

    async def run(self) -> None:
        """Check all folders periodically until cancelled. Return immediately if there is no root folder."""
        while self._root is not None:
            await pause(POLL_S)
            try:
                await self.look()
            except Exception:  # an error of the disk must not end the watch over the other folders
                logger.exception("custom_tasks_not_read root=%s", self._root)

    async def _look_at(self, name: EnvironmentName, folder: str, root: Path) -> None:
        before, known_refusal = self._seen.get((name, folder), (None, ""))
        content, refusal = await asyncio.to_thread(_read, root, folder, before)
        if refusal and refusal != known_refusal:
            logger.error("custom_tasks_refused environment=%s folder=%s reason=%s", name, root / folder, refusal)
        self._seen[name, folder] = content, refusal
        environment = self._catalog.offered.get(name)
        tasks = environment.custom_tasks if environment is not None else None
        if environment is None or tasks is None or tasks.folder != folder or tasks.content == content.digest:
            return  # withdrawn, changed to another folder, or unchanged
        self._catalog.replace(replace(environment, custom_tasks=replace(tasks, content=content.digest)))
        logger.info(
            "custom_tasks_changed environment=%s folder=%s files=%d digest=%s",
            name,
            root / folder,
            content.files,
            content.digest or "none",
        )


def _read(root: Path, folder: str, before: FolderContent | None) -> tuple[FolderContent, str]:
    """Return the content of *folder* in *root*, and the reason if it is refused (else empty). The call blocks."""
    path = root / folder
    try:
        _check_writers(root)
        return read_folder(path, before), ""
    except FolderRefused as refused:
        return FolderContent(), str(refused)
    except FileNotFoundError:
        return FolderContent(), ""
    except OSError as error:
        return FolderContent(), f"{error.filename or path}: {error.strerror}"


def read_folder(folder: Path, before: FolderContent | None = None) -> FolderContent:
    """Return the content of a folder, or *before* if nothing changed since. The call blocks.

    Names, links and bytes count; owners and dates do not. Files that Python and editors leave behind do not count
    either: ``__pycache__``, ``*.pyc``, ``*~`` and hidden files.

    Raises:
        FolderRefused: The folder must not be served.
        FileNotFoundError: The folder does not exist.
        OSError: The folder is not accessible.
    """
    for _ in range(_ATTEMPTS):
        read_at = time.time()
        _check_folder(folder)
        try:
            entries = _entries(folder)
            stamps = tuple(entry.stamp() for entry in entries)
            if before is not None and before._stamps == stamps:
                return before
            digest = _digest(folder, entries)
            if tuple(entry.stamp() for entry in _entries(folder)) != stamps:
                continue
        except (FileNotFoundError, NotADirectoryError, _Unsettled):
            continue  # an entry was removed or replaced during the read
        except OSError as error:
            raise FolderRefused(f"{error.filename or folder}: {error.strerror}; chmod -R a+rX {folder}") from error
        newest = max((entry.status.st_ctime for entry in entries), default=0.0)
        is_settled = newest < read_at - _SETTLED_S
        return FolderContent(digest=digest, files=len(entries), _stamps=stamps if is_settled else None)
    return replace(before, _stamps=None) if before is not None else FolderContent()


def _check_folder(folder: Path) -> None:
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise FolderRefused(
            f"{folder} is a link, and the engine would mount what it leads to: put the folder itself there"
        )
    if not stat.S_ISDIR(status.st_mode):
        raise FolderRefused(f"{folder} is not a folder")
    _check_writers(folder)


def _check_writers(path: Path) -> None:
    mode = path.stat().st_mode
    if mode & 0o022:
        raise FolderRefused(
            f"others than its owner can write to {path} (mode {stat.S_IMODE(mode):04o}), and so decide rewards: "
            f"chmod -R go-w {path}"
        )


def _entries(folder: Path) -> list[_Entry]:
    """Return the entries of *folder* that count, at any depth, sorted by name."""
    found: list[_Entry] = []
    pending = [""]
    size = 0
    while pending:
        inner = pending.pop()
        with os.scandir(folder / inner) as entries:
            for entry in entries:
                if _is_left_about(entry.name):
                    continue
                name, status = os.path.join(inner, entry.name), entry.stat(follow_symlinks=False)
                found.append(_Entry(name, status))
                size += status.st_size if stat.S_ISREG(status.st_mode) else 0
                _check_entry(folder, name, status)
                if len(found) > MAX_FILES:
                    raise FolderRefused(f"{folder} has more than {MAX_FILES} files")
                if size > MAX_BYTES:
                    raise FolderRefused(f"{folder} has more than {MAX_BYTES} bytes")
                if stat.S_ISDIR(status.st_mode):
                    pending.append(name)
    return sorted(found, key=lambda entry: entry.name)


def _is_left_about(name: str) -> bool:
    return name == "__pycache__" or name.startswith(".") or name.endswith(("~", ".pyc"))


def _check_entry(folder: Path, name: str, status: os.stat_result) -> None:
    path = folder / name
    if stat.S_ISLNK(status.st_mode):
        target = Path(os.path.realpath(path))
        if os.path.isabs(os.readlink(path)) or not target.is_relative_to(os.path.realpath(folder)):
            raise FolderRefused(f"{path} is a link that leads out of {folder}: put the file itself there")
    elif not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise FolderRefused(f"{path} is neither a file nor a folder")
    elif status.st_mode & 0o022:
        raise FolderRefused(
            f"others than its owner can write to {path} (mode {stat.S_IMODE(status.st_mode):04o}), and so decide "
            f"rewards: chmod -R go-w {folder}"
        )


def _digest(folder: Path, entries: list[_Entry]) -> str:
    if not entries:
        return ""
    digest = hashlib.sha256()
    for entry in entries:
        # Each entry starts with its type and lengths, so two different folders never give the same bytes.
        name, mode = os.fsencode(entry.name), entry.status.st_mode
        size = 0 if stat.S_ISDIR(mode) else entry.status.st_size  # a folder's size depends on the file system
        digest.update(b"%d %d %d " % (stat.S_IFMT(mode), size, len(name)) + name)
        for part in _parts(folder / entry.name, entry.status):
            digest.update(part)
    return digest.hexdigest()[:32]


def _parts(path: Path, status: os.stat_result) -> Iterator[bytes]:
    if stat.S_ISLNK(status.st_mode):
        yield os.fsencode(os.readlink(path))
    elif stat.S_ISREG(status.st_mode):
        yield from _chunks(path, status.st_size)


def _chunks(path: Path, size: int) -> Iterator[bytes]:
    left = size
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
            left -= len(chunk)
            yield chunk
    if left:
        raise _Unsettled

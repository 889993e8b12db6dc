"""Operators' task modules on disk: what is in each environment's folder, and when that changes.

A worker imports task modules once, at its start, so an edit reaches trainers by new workers: the digest of the folder's
content is part of a worker's make (``Environment.digest``), and the control loop drains workers of another make while
their sessions go on. Nothing of a folder is imported here; names and bytes are read and no more.

Whoever can write to a folder decides rewards, so a folder that others than its owner can write to is refused, as is one
that is a link, leads outside by a link, or is too large. A refused folder counts as one that is not there.
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

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""Between two looks. Polled, as inotify does not hear of what another machine edits on a shared file system."""
MAX_FILES = 2_000
"""Files and folders of one environment; each is looked at every ``POLL_S``."""
MAX_BYTES = 64 * 2**20
_CHUNK_BYTES = 2**20
_ATTEMPTS = 3
"""How often a folder that is being written to is read before the next look has to do."""
_SETTLED_S = 2.0
"""Clocks of file systems tick some milliseconds apart: a file that changed this lately may have changed unseen."""


class FolderRefused(Exception):
    """The folder is not served; the message says why, and what to do."""


class _Unsettled(Exception):
    """It changed while it was read."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One file, folder or link."""

    name: str
    """Its path below the folder, as the system spells it."""
    status: os.stat_result

    def stamp(self) -> tuple[str, int, int, int, int, int]:
        """What differs if it was written to or replaced; mtime alone is kept by ``cp -p``."""
        found = self.status
        return (self.name, found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class FolderContent:
    """What a look at a folder found."""

    digest: str = ""
    """32 hexadecimal digits; empty: there is no such folder, or nothing in it."""
    files: int = 0
    _stamps: tuple[object, ...] | None = None
    """Of all entries, if they are old enough to tell the next change."""


class CustomTaskFolders:
    """The folders of all environments that name a task module; to be used from one event loop."""

    def __init__(self, root: Path | None, catalog: Catalog) -> None:
        """Read nothing yet.

        Args:
            root: Where this process sees the environments' folders, ``<root>/<folder>``; it may be missing. With None
                nothing is looked at.
            catalog: Is told when the content of a folder is another one: the pool does the rest.
        """
        self._root = root.absolute() if root is not None else None
        self._catalog = catalog
        self._seen: dict[tuple[EnvironmentName, str], tuple[FolderContent, str]] = {}
        """By environment and folder: what the last look found, and why the folder is refused, if it is."""

    async def fill(self, environment: Environment) -> Environment:
        """Return *environment* with what is in its folder now, whether it is on offer yet or not."""
        tasks = environment.custom_tasks
        if tasks is None or self._root is None:
            return environment
        found, _ = await asyncio.to_thread(_read, self._root, tasks.folder, None)
        return replace(environment, custom_tasks=replace(tasks, content=found.digest))

    async def look(self) -> None:
        """Look at every folder once; to be awaited before the first worker is started."""
        if self._root is None:
            return
        wanted = [(one.name, one.custom_tasks.folder) for one in self._catalog if one.custom_tasks is not None]
        self._seen = {key: seen for key, seen in self._seen.items() if key in wanted}
        for name, folder in wanted:
            await self._look_at(name, folder, self._root)

    async def run(self) -> None:
        """Look again and again until cancelled; returns at once where there is no folder of folders."""
        while self._root is not None:
            await asyncio.sleep(POLL_S)
            try:
                await self.look()
            except Exception:  # what is on a disk must not end the watch over the other folders
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
            return  # no longer on offer so, or unchanged
        self._catalog.replace(replace(environment, custom_tasks=replace(tasks, content=content.digest)))
        logger.info(
            "custom_tasks_changed environment=%s folder=%s files=%d digest=%s",
            name,
            root / folder,
            content.files,
            content.digest or "none",
        )


def _read(root: Path, folder: str, before: FolderContent | None) -> tuple[FolderContent, str]:
    """Return what is in *folder* of *root*, and why it is refused, if it is; blocks while that takes."""
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
    """Read a folder, unless nothing of it changed since *before*; blocks while that takes.

    Names, links and bytes count; owners and dates do not. What Python and editors leave about does not count either:
    ``__pycache__``, ``*.pyc``, ``*~`` and hidden files.

    Raises:
        FolderRefused: it is not to be served.
        FileNotFoundError: there is no such folder.
        OSError: it can't be looked at.
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
            continue  # something in it was removed or replaced meanwhile
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
    """List what is in *folder* and counts, at any depth, by name."""
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
        # Each entry says first what it is and how long: no two folders spell the same bytes.
        name, mode = os.fsencode(entry.name), entry.status.st_mode
        size = 0 if stat.S_ISDIR(mode) else entry.status.st_size  # a folder's own is the file system's affair
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

"""Detects changes of the programs that a judge's scripts run: shells, tools, interpreters and their libraries.

A link into /proc counts too: a script that searches for a word in `/proc/self/cmdline` finds the word.

The agent is root in its box, so a script that judges the box's state would run the agent's own `bash` or `stat`. The
server compares the folders of programs with a fresh box, through open folders and not through programs of the box. No
program inside can set the time of a file's status change, so this time shows each change since the agent's first
action.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from os_box import Sandbox, Sandboxes

FOLDERS = ("usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin")
"""The folders of PATH. The agent may add programs with new names, as some tasks require."""
LIBRARIES = (
    *("usr/lib", "usr/lib32", "usr/lib64", "usr/libx32", "usr/libexec", "usr/local/lib", "etc/alternatives"),
    "root/.local/lib",
)
LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "usr/local", "etc")
"""Paths above the folders: links of a merged /usr, or folders."""
SETTINGS_OF_PYTHON = ("pyvenv.cfg", "pybuilddir.txt")
"""Files beside Python, or in the folder above, that name another folder of libraries. So does a file `*._pth`."""
CACHES = "__pycache__"
"""Python's folders of bytecode, which Python may write at any time. A judge's scripts do not read them."""
MOST_LEVELS = 40
MOST_LINKS = 40
"""Number of links in one path that Linux follows."""
_FILE_CLOCK = 5
"""Linux's CLOCK_REALTIME_COARSE, the clock of file times. It stands still for some milliseconds, in which no action of
an agent can follow an opening."""

State = tuple[int, int, int]
"""Mode, size and time of the last status change."""
Listing = Mapping[str, State]
"""The programs in `FOLDERS`, by path."""


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of a box before the agent's first action."""

    base: Listing
    """The programs of a box without a task."""
    own: frozenset[str]
    """Paths of programs that the task's init scripts made or changed. The agent may change them."""
    began_ns: int

    @classmethod
    async def of(cls, sandbox: Sandbox, base: Listing) -> Programs:
        """Look at a box whose programs are still as the task's init scripts left them."""
        found = await listing(sandbox)
        own = frozenset(path for path, state in found.items() if base.get(path) != state)
        return cls(base, own, time.clock_gettime_ns(_FILE_CLOCK))

    async def change(self, sandbox: Sandbox, scripts: Iterable[str]) -> str | None:
        """Return the path of a program, a library or a link into /proc that the agent has changed or made, or None.

        A missing program counts if one of *scripts* names it, since `! grep …` succeeds without a grep.
        """
        named = {word for script in scripts for word in re.split(r"[^\w.+-]+", script)}
        fd = await sandbox.open_folder("/")
        try:
            return await asyncio.to_thread(self._change, fd, named)
        finally:
            os.close(fd)

    def _change(self, root: int, named: set[str]) -> str | None:
        for path in LINKS:
            with suppress(FileNotFoundError):
                found = os.stat(path, dir_fd=root, follow_symlinks=False)
                if stat.S_ISLNK(found.st_mode) and found.st_ctime_ns > self.began_ns:
                    return path
        now = _listed(root)
        names = {os.path.basename(path) for path in self.base}
        for path in (now.keys() | self.base.keys()) - self.own:
            name = os.path.basename(path)
            if now.get(path) != self.base.get(path) and (name in named if path not in now else name in names):
                return path
        for path in LIBRARIES:
            with _folder(root, path) as fd:
                if fd >= 0 and (changed := self._changed_below(fd, path, 0)):
                    return changed
        for path in ("etc", "usr", "usr/local", *FOLDERS):
            with _folder(root, path) as fd:
                for entry in _entries(fd) if fd >= 0 else ():
                    if _is_setting(path, entry.name) and self._is_late(entry):
                        return f"{path}/{entry.name}"
        return self._link_into_proc(root, root, (), 0)

    def _link_into_proc(self, root: int, fd: int, path: tuple[str, ...], level: int) -> str | None:
        for entry in _entries(fd):
            inner = (*path, entry.name)
            if entry.is_dir(follow_symlinks=False):
                if level < MOST_LEVELS and inner not in (("proc",), ("sys",), ("dev",)):
                    with _folder(fd, entry.name) as folder:
                        found = None if folder < 0 else self._link_into_proc(root, folder, inner, level + 1)
                    if found:
                        return found
            elif entry.is_symlink() and self._is_late(entry) and _leads_into_proc(root, inner):
                return "/".join(inner)
        return None

    def _changed_below(self, fd: int, path: str, level: int) -> str | None:
        if level > MOST_LEVELS:
            return path
        for entry in _entries(fd):
            inner = f"{path}/{entry.name}"
            if entry.name == CACHES or (path == "usr/local/lib" and not _is_loaded(entry.name)):
                continue
            if entry.is_dir(follow_symlinks=False):
                with _folder(fd, entry.name) as folder:
                    changed = inner if folder < 0 else self._changed_below(folder, inner, level + 1)
            else:
                changed = inner if self._is_late(entry) else None
            if changed:
                return changed
        return None

    def _is_late(self, entry: os.DirEntry[str]) -> bool:
        return entry.stat(follow_symlinks=False).st_ctime_ns > self.began_ns


async def listing_of(sandboxes: Sandboxes) -> Listing:
    """Return the programs of a box without a task."""
    sandbox = await sandboxes.open()
    try:
        return await listing(sandbox)
    finally:
        await sandbox.close()


async def listing(sandbox: Sandbox) -> Listing:
    """Return the programs of *sandbox*."""
    fd = await sandbox.open_folder("/")
    try:
        return await asyncio.to_thread(_listed, fd)
    finally:
        os.close(fd)


def _listed(root: int) -> dict[str, State]:
    found = {}
    for path in FOLDERS:
        with _folder(root, path) as fd:
            for entry in _entries(fd) if fd >= 0 else ():
                state = entry.stat(follow_symlinks=False)
                found[f"{path}/{entry.name}"] = (state.st_mode, state.st_size, state.st_ctime_ns)
    return found


def _entries(fd: int) -> Iterator[os.DirEntry[str]]:
    with os.scandir(fd) as entries:
        yield from entries


def _is_setting(folder: str, name: str) -> bool:
    """Return True if the loader, or Python before it starts, reads a file *name* of *folder*."""
    if folder == "etc":
        return name.startswith("ld.so")
    return name in SETTINGS_OF_PYTHON or name.endswith("._pth")


def _leads_into_proc(root: int, path: tuple[str, ...]) -> bool:
    """Return True if the link at *path* leads to /proc or below it, from inside the box, also through other links."""
    place: list[str] = []
    todo, links = [*reversed(path)], 0
    while todo and links <= MOST_LINKS:
        name = todo.pop()
        if name == "..":
            del place[-1:]
        if name in ("", ".", ".."):
            continue
        place.append(name)
        if place[0] == "proc":
            return True
        try:
            target = os.readlink("/".join(place), dir_fd=root)
        except OSError:  # not a link, or nothing
            continue
        links += 1
        place = [] if target.startswith("/") else place[:-1]
        todo += reversed(target.split("/"))
    return False


def _is_loaded(name: str) -> bool:
    """Return True if a program of the box may load a file *name* of /usr/local/lib, where an agent may put its own."""
    return name.startswith("python") or ".so" in name


@contextmanager
def _folder(above: int, path: str) -> Iterator[int]:
    """Open the folder *path* below the open folder *above*, through no link; the result is -1 if that is impossible."""
    fd = os.dup(above)
    try:
        for name in path.split("/"):
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = inner
    except OSError:
        os.close(fd)
        fd = -1
    try:
        yield fd
    finally:
        if fd >= 0:
            os.close(fd)

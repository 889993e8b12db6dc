"""The users of a sandbox, read from its own files. Root inside may add and change users at any time."""

import os
import time
from dataclasses import dataclass, field

from envserver.sandbox import kernel

_FILE_BYTES = 1024 * 1024
_MOST_GROUPS = 32
_SETTLED_NS = 1_000_000_000
"""Minimum age in nanoseconds of a change before the file's content is cached. A younger file may change again, in the
same size, within the same tick of the kernel's clock."""

_Version = tuple[int, int, int, int]
_Rows = list[list[str]]


@dataclass(frozen=True)
class User:
    name: str
    uid: int
    gid: int
    home: str
    groups: list[int] = field(default_factory=list)


class Table:
    """A file of lines with colon-separated fields. It is read again only after a change."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._version: _Version | None = None
        self._rows: _Rows = []

    def rows(self) -> _Rows:
        """Return the lines' fields, or an empty list if the file is missing."""
        try:
            fd = kernel.open_inside(self._path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return []
        try:
            version = _version(fd)
            if version is None or version != self._version:
                text = os.read(fd, _FILE_BYTES).decode("utf-8", "replace")
                self._rows, self._version = [line.split(":") for line in text.splitlines()], version
            return self._rows
        except OSError:  # a folder
            return []
        finally:
            os.close(fd)


class Users:
    """Looks up users in the sandbox that the caller has entered."""

    def __init__(self) -> None:
        self._passwd = Table("/etc/passwd")
        self._group = Table("/etc/group")

    def find(self, name: str) -> User:
        """Return the user *name*, which may also be a uid in digits.

        Raises:
            KeyError: There is no such user.
        """
        for row in self._passwd.rows():
            if len(row) >= 6 and name in (row[0], row[2]) and row[2].isdigit() and row[3].isdigit():
                return User(row[0], int(row[2]), int(row[3]), row[5] or "/", self._groups(row[0]))
        if name in ("root", "0"):
            return User("root", 0, 0, "/root")
        raise KeyError(name)

    def _groups(self, name: str) -> list[int]:
        rows = self._group.rows()
        return [int(row[2]) for row in rows if len(row) > 3 and row[2].isdigit() and name in row[3].split(",")][
            :_MOST_GROUPS
        ]


def _version(fd: int) -> _Version | None:
    """Return a version of the open file's state. It includes the ctime, which root inside cannot reset."""
    state = os.fstat(fd)
    if time.time_ns() - state.st_ctime_ns < _SETTLED_NS:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino, state.st_ctime_ns

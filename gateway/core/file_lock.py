"""A lock file that processes hold as long as they live, with the text that the holders share."""

from __future__ import annotations

import fcntl
import random
import time
from pathlib import Path
from typing import Final, TextIO

WITHIN_S: Final = 1.0
"""Seconds for which `hold` tries. A process that starts or ends at this moment frees its lock soon."""
PAUSES_S: Final = (0.005, 0.03)
"""Bounds of the random pause between two attempts, in seconds, so that processes that start together do not always
collide."""


class Taken(Exception):
    """Other processes hold the file, with a different content."""

    def __init__(self, content: str) -> None:
        super().__init__(content)
        self.content = content
        """The text that the other processes wrote."""


def hold(path: Path, content: str, *, alone: bool, within_s: float = WITHIN_S) -> TextIO:
    """Hold the file at *path* until the returned file is closed, or this process ends in any way.

    Processes with the same *content* hold the file concurrently. A process that holds it *alone* excludes all others.

    Raises:
        Taken: Other processes hold the file.
        OSError: The file can't be written, or its file system has no locks.
    """
    until = time.monotonic() + within_s
    while True:
        file = path.open("a+")
        try:
            if _lock(file, content, alone=alone):
                return file
            found = _read(file)
        except BaseException:
            file.close()
            raise
        file.close()
        if time.monotonic() >= until:
            raise Taken(found)
        time.sleep(random.uniform(*PAUSES_S))


def _lock(file: TextIO, content: str, *, alone: bool) -> bool:
    if _is_locked(file, fcntl.LOCK_EX):  # no other process reads the file during the write
        file.truncate(0)
        file.write(content)
        file.flush()
        if alone:
            return True
    elif alone:
        return False
    # The change from exclusive to shared leaves a moment without a lock, in which another process may have written.
    return _is_locked(file, fcntl.LOCK_SH) and _read(file) == content


def _is_locked(file: TextIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(file: TextIO) -> str:
    file.seek(0)
    return file.read()

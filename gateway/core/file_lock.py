"""A file that processes lock as long as they live, and in which they say what they have in common."""

from __future__ import annotations

import fcntl
import random
import time
from pathlib import Path
from typing import Final, TextIO

WITHIN_S: Final = 1.0
"""How long it is tried: the lock of one that starts, or ends, at this moment is free again soon."""
PAUSES_S: Final = (0.005, 0.03)
"""Of different lengths, so that those that start together do not always meet."""


class Taken(Exception):
    """Others hold the file, and what they have in common is something else."""

    def __init__(self, content: str) -> None:
        super().__init__(content)
        self.content = content
        """What they wrote."""


def hold(path: Path, content: str, *, alone: bool, within_s: float = WITHIN_S) -> TextIO:
    """Hold the file at *path*: until what is returned is closed, or this process ends however it may.

    Those that say the same *content* hold it beside each other; who holds it *alone* holds it beside nobody.

    Raises:
        Taken: others hold it.
        OSError: it can't be written, or its file system has no locks.
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
    if _is_locked(file, fcntl.LOCK_EX):  # nobody else has it, so nobody reads what is written
        file.truncate(0)
        file.write(content)
        file.flush()
        if alone:
            return True
    elif alone:
        return False
    # From exclusive to shared there is a moment without a lock: another one may have written meanwhile.
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

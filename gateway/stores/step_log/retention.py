"""Keeps the step log within its limits: what makes room are the oldest episodes, with their calls and images.

The limit is that of the folder, whatever the number of replicas that write to it. Each replica measures the folder when
it has written a small share of the limit, and before it writes something large. Above seven eighths of the limit, one
replica at a time removes episodes until another eighth is free, so that segments are rarely rewritten.

A key may fill what others leave free. First to go are the oldest episodes of the key that is furthest above an equal
share.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gateway.core.file_lock import Taken, hold
from gateway.stores.step_log.database import BUSY_S, INDEX, LOCK, StepLogDatabase
from gateway.stores.step_log.segments import (
    REWRITTEN,
    SEGMENT_BYTES,
    SUFFIX,
    locked,
    parts_of,
    rewrite,
)

CLEANED_S: Final = 30.0
"""Seconds between two looks for old records."""
WORK_S: Final = 1.0
"""Seconds of cleaning after which records that wait are written first, if there is room."""
DEAD_SHARE: Final = 0.25
"""Share of removed calls from which a segment is rewritten."""
REBUILT_BYTES: Final = 64 * 2**20
"""Size of an older version's index that is written anew, so that it can shrink. That of a larger one takes long, so its
free pages count as room: SQLite uses them again."""
DAMAGED: Final = f"{INDEX}.damaged"
"""Name of an index that was not readable."""


class Retention:
    """Measures and cleans one folder; a thread uses it alone."""

    def __init__(self, folder: Path, *, max_bytes: int, max_days: float) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_s = max_days * 86_400
        self._written = max_bytes
        """Bytes that this replica has written since it measured the folder."""
        self._has_room = True
        self._is_freeing = False
        self._cleaned_at = time.monotonic()
        self._ahead_s = time.time() - time.monotonic()

    @property
    def segment_bytes(self) -> int:
        """Maximum size of a segment: what a replica writes to cannot be removed."""
        return min(SEGMENT_BYTES, self._max_bytes // 32)

    @property
    def slice_bytes(self) -> int:
        """Size of calls that are written together."""
        return min(SEGMENT_BYTES // 4, self._max_bytes // 32)

    @property
    def wal_bytes(self) -> int:
        """Size from which SQLite empties its write-ahead log."""
        return min(4 * 2**20, self._max_bytes // 64)

    @property
    def batch_bytes(self) -> int:
        """Maximum size of a batch."""
        return self._max_bytes // 8

    def is_due(self) -> bool:
        """Return True if old records should be looked for."""
        return self._is_freeing or time.monotonic() - self._cleaned_at >= CLEANED_S

    @contextlib.contextmanager
    def room(self, database: StepLogDatabase, size: int = 0) -> Iterator[bool]:
        """Enter with True if *size* bytes can be written. Remove episodes before if the folder would be nearly full.

        SQLite writes images twice. No episode is removed for something larger than a sixth of the limit. In a small
        log, replicas take turns to write what is large for it.

        Raises ``OSError`` or ``sqlite3.Error``.
        """
        size, is_large = 2 * size, size > self._max_bytes // 64
        self._written += size
        if size > self._max_bytes // 3:
            yield False
        elif self._has_room and not is_large and not self.is_due() and self._written < self._max_bytes // 64:
            yield True
        else:
            with contextlib.ExitStack() as locked:
                used = self._made(database, size, is_large=is_large, locked=locked)
                if not is_large:
                    locked.close()
                self._written, self._has_room = 0, used + size <= self._max_bytes
                yield self._has_room

    def _made(self, database: StepLogDatabase, size: int, *, is_large: bool, locked: contextlib.ExitStack) -> int:
        """Lock the folder, and clean it, if this is necessary. Return the folder's size."""
        bound = self._max_bytes * 7 // 8 - size
        used, free = self._used(database)
        if not (is_large or self.is_due() or used > bound):
            return used
        is_full = used + size > self._max_bytes
        try:
            within_s = BUSY_S if is_large or is_full else 0.0
            locked.enter_context(hold(self._folder / LOCK, "", alone=True, within_s=within_s))
        except Taken:  # another replica cleans
            return self._used(database)[0]
        used, free = self._used(database)
        if used > bound:
            database.shrink(0)
        self._clean(database, bound, is_full=used + size > self._max_bytes)
        used, free = self._used(database)
        self._is_freeing = used - free > (self._target(bound) if self._is_freeing else bound)
        return used

    def _target(self, bound: int) -> int:
        return min(self._max_bytes * 3 // 4, bound)

    def _used(self, database: StepLogDatabase) -> tuple[int, int]:
        """Return the size of all files in the folder, and that of the index's free pages, which SQLite uses again."""
        with os.scandir(self._folder) as found:
            used, free = sum(map(_size, found)), database.free_bytes()
        return (used, free) if database.can_shrink() else (used - free, 0)

    def _clean(self, database: StepLogDatabase, bound: int, *, is_full: bool) -> None:
        """Remove what is too old, and more until the folder is below *bound*.

        It ends after `WORK_S` seconds, unless the folder *is_full*.
        """
        until = time.monotonic() + WORK_S
        if is_due := self.is_due():
            self._find_segments(database, until)
            self._remove_old(database, until)
            self._cleaned_at = time.monotonic()
        used, free = self._used(database)
        if used - free > bound and not is_due:
            self._find_segments(database, until)
        target = self._target(bound) if self._is_freeing or used - free > bound else self._max_bytes
        if used - free > target and not database.can_shrink():
            self._rebuild(database)
            used, free = self._used(database)
        while used - free > target and (is_full or time.monotonic() < until):
            if not self._free(database, used - free - target):
                break
            used, free = self._used(database)
            is_full = is_full and used > bound
        if used > bound:  # what SQLite does not use again soon
            database.shrink(min(free, used - bound + self._max_bytes // 32))

    def _find_segments(self, database: StepLogDatabase, until: float) -> None:
        """Note the segments of killed replicas and of older versions, and forget the removed ones."""
        known = database.segments()
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            if known.pop(path.name, None) is None and time.monotonic() < until and (file := locked(path)) is not None:
                with file:
                    if size := os.fstat(file.fileno()).st_size:
                        database.add_segment(path.name, size, parts_of(file))
                    else:
                        path.unlink(missing_ok=True)
        for id in known.values():
            database.change_segment(id, 0)
        for path in self._folder.glob(f"*{REWRITTEN}"):
            path.unlink(missing_ok=True)

    def _remove_old(self, database: StepLogDatabase, until: float) -> None:
        # A clock that jumps ahead must not remove everything. While this process lives, the monotonic clock is right.
        before = min(time.time(), time.monotonic() + self._ahead_s) - self._max_s
        while (found := database.before(before)) and time.monotonic() < until:
            database.remove(found)
            database.remove_unused()
        for id, name in database.dead_segments():  # a newer one stays while there is room: the index may have been lost
            path = self._folder / name
            if not path.exists() or path.stat().st_mtime < before:
                self._shrink_segment(database, id, name)

    def _free(self, database: StepLogDatabase, wanted: int) -> bool:
        """Do one thing that frees up to *wanted* bytes, if possible. Return False if nothing can be removed."""
        for path in self._folder.glob(f"{DAMAGED}*"):
            path.unlink(missing_ok=True)
            return True
        if (segment := database.deadest_segment(least=DEAD_SHARE)) is not None:
            self._shrink_segment(database, *segment)
        elif leases := database.above_equal_share(wanted) or database.users_without_record():
            database.remove(leases)
            database.remove_unused()
        elif (segment := database.deadest_segment(least=0.0)) is not None:
            self._shrink_segment(database, *segment)
        else:
            return False
        return True

    def _rebuild(self, database: StepLogDatabase) -> None:
        size = (self._folder / INDEX).stat().st_size - database.free_bytes()
        if size <= min(REBUILT_BYTES, self._max_bytes // 32):
            with contextlib.suppress(sqlite3.OperationalError):  # another replica uses it: the next cleaning does it
                database.rebuild()

    def _shrink_segment(self, database: StepLogDatabase, id: int, name: str) -> None:
        """Remove the calls of removed episodes from a segment."""
        path, size = self._folder / name, 0
        if (file := locked(path)) is not None:
            with file:
                alive = database.alive(id)
                if alive:
                    size = rewrite(file, path, alive)
                if not size:
                    path.unlink(missing_ok=True)
        database.change_segment(id, size)


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0

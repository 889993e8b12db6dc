"""The calls of the step log: append-only files, *segments*, of batches.

A replica appends to segments of its own, so replicas share a folder without locks. A batch has the calls of a fraction
of a second::

    MAGIC  size of header (4 bytes)  size of body (4 bytes)  header  body

Header and body are msgpack. The header has the leases in the batch, so a reader skips the bodies of other episodes, and
the Unix time at monotonic time 0. The body is a list of calls. A crash can cut off the last batch of a segment, which
readers then ignore.

An append costs the replica a third of a microsecond for a call, where a batch in SQLite costs three, and a row five.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgpack

from gateway.stores.step_log.encoding import decode

SUFFIX: Final = ".calls"
MAGIC: Final = b"EGL1"
_HEAD: Final = struct.Struct(">4sII")
HEADER_MAX: Final = 16 * 2**20
SEGMENT_BYTES: Final = 64 * 2**20
"""Size at which a replica begins its next segment."""
SEGMENT_S: Final = 600.0
"""Seconds after which a replica begins its next segment."""


class SegmentWriter:
    """Appends batches to segments of one replica."""

    def __init__(self, folder: Path, replica: str) -> None:
        self._folder = folder
        self._replica = "".join(char if char.isalnum() else "-" for char in replica)
        self._file: BinaryIO | None = None
        self._size = 0
        self._began_at = 0.0

    def append(self, leases: Collection[str], body: bytes, *, wall: float) -> None:
        """Append one batch. Raises ``OSError`` if it was not written; the segment then ends before it.

        Args:
            leases: The leases that occur in the batch.
            body: The encoded calls.
            wall: Unix time at monotonic time 0, in seconds.
        """
        header = msgpack.packb({"wall": wall, "leases": list(leases)})
        parts = [_HEAD.pack(MAGIC, len(header), len(body)), header, body]
        now = time.time()
        if self._size >= SEGMENT_BYTES or now - self._began_at >= SEGMENT_S:
            self.close()
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = (self._folder / f"{int(now * 1e3):013d}-{self._replica}{SUFFIX}").open("xb", buffering=0)
            self._size, self._began_at = 0, now
        try:
            written = os.writev(self._file.fileno(), parts)  # one call: each costs the thread its turn
            rest = memoryview(b"".join(parts))[written:] if written < sum(map(len, parts)) else b""
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            os.ftruncate(self._file.fileno(), self._size)
            self._file.seek(self._size)
            raise
        self._size += sum(map(len, parts))

    def close(self) -> None:
        """End the current segment."""
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True)
class Segment:
    """One file, and the Unix times between which its calls ended."""

    path: Path
    began_at: float
    changed_at: float
    size: int


def segments(folder: Path) -> list[Segment]:
    """Return the segments in *folder*, oldest first."""
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        stamp = path.name.partition("-")[0]
        try:
            state = path.stat()
        except FileNotFoundError:  # another replica has just removed it
            continue
        if stamp.isdecimal():
            found.append(Segment(path, int(stamp) / 1e3, state.st_mtime, state.st_size))
    return sorted(found, key=lambda segment: (segment.began_at, segment.path.name))


def calls_of(path: Path, lease: str) -> Iterator[Sequence[Any]]:
    """Yield the calls of one episode in a segment: Unix time of the begin, seconds, operation, outcome, request, reply,
    error and faults. A missing file has none.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for begin, size, header in _batches(file):
            if lease in header["leases"]:
                file.seek(begin)
                body = decode(file.read(size))
                wall = header["wall"]
                yield from (
                    (wall + call[2], call[3] - call[2], call[1], *call[4:]) for call in body if call[0] == lease
                )


def _batches(file: BinaryIO) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the position, size and header of each complete batch."""
    end = file.seek(0, os.SEEK_END)
    at = 0
    while at + _HEAD.size <= end:
        file.seek(at)
        magic, header_size, body_size = _HEAD.unpack(file.read(_HEAD.size))
        begin = at + _HEAD.size + header_size
        at = begin + body_size
        if magic != MAGIC or header_size > HEADER_MAX or at > end:
            return
        yield begin, body_size, msgpack.unpackb(file.read(header_size))

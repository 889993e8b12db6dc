"""The calls of the step log: append-only files, *segments*, of batches.

A replica appends to segments of its own, so replicas share a folder without locks. A batch has the calls of a fraction
of a second::

    MAGIC  sizes of header and body  checksums of header, of body and of all that is before  header  body

Sizes and checksums (CRC-32) have 4 bytes each. Header and body are msgpack. The header has the leases in the batch, so
a reader skips the bodies of other episodes, and the Unix time at monotonic time 0. The body is a list of calls. A crash
can cut off the last batch of a segment, which readers then ignore. A damaged batch costs its own calls: a reader goes
on with the next one. Batches of older versions, with the magic EGL1, have no checksums.

An append costs the replica a third of a microsecond for a call, where a batch in SQLite costs three, and a row five.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgpack

from gateway.stores.step_log.encoding import decode

SUFFIX: Final = ".calls"
MAGIC: Final = b"EGL2"
MAGIC_1: Final = b"EGL1"
"""The magic of batches without checksums, which are only read."""
_HEAD: Final = struct.Struct(">4sIIIII")
_HEAD_1: Final = struct.Struct(">4sII")
_CHECKED: Final = _HEAD.size - 4
"""Size of what the last checksum in a head covers."""
HEADER_MAX: Final = 16 * 2**20
_SEARCHED: Final = 2**20
"""Size of the pieces in which a reader looks for the next batch after a damaged one."""
_UNREADABLE: Final = (ValueError, TypeError, LookupError, msgpack.UnpackException)
"""What damaged msgpack raises."""
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
        parts = [_head(header, body), header, body]
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


def calls_of(path: Path, lease: str, damaged: list[str]) -> Iterator[Sequence[Any]]:
    """Yield the calls of one episode in a segment: Unix time of the begin, seconds, operation, outcome, request, reply,
    error and faults. A missing file has none.

    The places of damaged batches, which may have had calls of the episode, are added to *damaged*.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for batch in batches(file):
            if batch.leases is None:
                found = None
            elif lease in batch.leases:
                found = _calls(batch, _read_body(file, batch), lease)
            else:
                continue
            if found is None:
                damaged.append(f"{path.name}:{batch.begin}")
            else:
                yield from found


def _calls(batch: Batch, body: bytes | None, lease: str) -> list[Sequence[Any]] | None:
    """Return the calls of one episode in a batch; None if the batch is damaged."""
    if body is None:
        return None
    try:
        return [
            (batch.wall + began_at, ended_at - began_at, operation, *rest)
            for owner, operation, began_at, ended_at, *rest in decode(body)
            if owner == lease and len(rest) == 5
        ]
    except _UNREADABLE:
        return None


class Batch(NamedTuple):
    """Where a batch is in a segment."""

    begin: int
    body: int
    """Position of the body."""
    end: int
    checksum: int | None
    """Checksum of the body; None: an older version wrote the batch."""
    leases: Collection[str] | None
    """The leases that occur in the batch; None: it is damaged."""
    wall: float
    """Unix time at monotonic time 0, in seconds."""


def batches(file: BinaryIO) -> Iterator[Batch]:
    """Yield the complete batches of a segment, and the damaged ones; a last batch that was cut off is left out."""
    size = file.seek(0, os.SEEK_END)
    at = 0
    while at < size:
        batch = _batch(file, at, size)
        if batch is None:  # its head is damaged, so its size is not known
            following = _next_magic(file, at + 1, size)
            yield Batch(at, following, following, None, None, 0.0)
            at = following
        elif batch.end > size:
            return
        else:
            yield batch
            at = batch.end


def _batch(file: BinaryIO, at: int, size: int) -> Batch | None:
    """Return the batch at a position; None if its head is damaged. A batch that was cut off ends after the file."""
    file.seek(at)
    head = file.read(_HEAD.size)
    checksum: int | None = None
    if head.startswith(MAGIC) and len(head) == _HEAD.size:
        _, header_size, body_size, of_header, checksum, of_head = _HEAD.unpack(head)
        if zlib.crc32(head[:_CHECKED]) != of_head:
            return None
        begin = at + _HEAD.size
    elif head.startswith(MAGIC_1) and len(head) >= _HEAD_1.size:
        _, header_size, body_size = _HEAD_1.unpack_from(head)
        begin, of_header = at + _HEAD_1.size, None
        if header_size > HEADER_MAX or (begin + header_size + body_size > size > _next_magic(file, at + 1, size)):
            return None
    else:
        is_cut_off = size - at < _HEAD.size and any(magic.startswith(head[:4]) for magic in (MAGIC, MAGIC_1))
        return Batch(at, size, size + 1, None, None, 0.0) if is_cut_off else None
    body, end = begin + header_size, begin + header_size + body_size
    if end > size:
        return Batch(at, body, end, None, None, 0.0)
    file.seek(begin)
    header = file.read(header_size)
    leases, wall = None, 0.0
    if of_header is None or zlib.crc32(header) == of_header:
        try:
            known = decode(header)
            leases, wall = frozenset(known["leases"]), float(known["wall"])
        except _UNREADABLE:
            if of_header is None:
                return None
    return Batch(at, body, end, checksum, leases, wall)


def _next_magic(file: BinaryIO, at: int, size: int) -> int:
    """Return the position of the next batch from a position on, or the end of the file."""
    while at < size:
        file.seek(at)
        piece = file.read(_SEARCHED)
        found = [place for magic in (MAGIC, MAGIC_1) if (place := piece.find(magic)) >= 0]
        if found:
            return at + min(found)
        at += max(1, len(piece) - len(MAGIC) + 1)
    return size


def _read_body(file: BinaryIO, batch: Batch) -> bytes | None:
    """Return the body of a batch; None if it is damaged."""
    file.seek(batch.body)
    body = file.read(batch.end - batch.body)
    return body if batch.checksum is None or zlib.crc32(body) == batch.checksum else None


def _head(header: bytes, body: bytes) -> bytes:
    head = _HEAD.pack(MAGIC, len(header), len(body), zlib.crc32(header), zlib.crc32(body), 0)[:_CHECKED]
    return head + zlib.crc32(head).to_bytes(4, "big")

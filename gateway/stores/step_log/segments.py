"""The calls of the step log: append-only files, *segments*, of batches.

A replica appends to segments of its own, so replicas do not wait for each other. It locks its current segment, so that
none removes or rewrites that one. A batch has the calls of a fraction of a second::

    MAGIC  sizes of header and body  checksums of header, of body and of all that is before  header  body

Sizes and checksums (CRC-32) have 4 bytes each. Header and body are msgpack. The header has the leases in the batch, so
a reader skips the bodies of other episodes, and the Unix time at monotonic time 0. The body is a list of calls. A crash
can cut off the last batch of a segment, which readers then ignore. A damaged batch costs its own calls: a reader goes
on with the next one. Batches of older versions, with the magic EGL1, have no checksums.

An append costs the replica a third of a microsecond for a call, where a batch in SQLite costs three, and a row five.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgpack

from gateway.stores.step_log.encoding import as_list, decode

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
"""Maximum size of a segment, unless one batch is larger."""
REWRITTEN: Final = ".rewritten"
"""Suffix of a file that will replace a segment."""
SEGMENT_S: Final = 600.0
"""Seconds after which a replica begins its next segment."""


Ended = Callable[[str, int, Mapping[str, int]], None]
"""Is called with a complete segment's name and size, and the bytes that each lease has in it."""


class SegmentWriter:
    """Appends batches to segments of one replica."""

    def __init__(self, folder: Path, replica: str, ended: Ended, *, max_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._replica = "".join(char if char.isalnum() else "-" for char in replica)
        self._ended = ended
        self._max_bytes = max_bytes
        self._file: BinaryIO | None = None
        self._size = 0
        self._began_at = 0.0
        self._parts: Counter[str] = Counter()

    def append(self, weights: Mapping[str, int], body: bytes, *, wall: float) -> None:
        """Append one batch. Raises ``OSError`` if it was not written; the segment then ends before it.

        Args:
            weights: The leases that occur in the batch, and the share of the batch that each has.
            body: The encoded calls.
            wall: Unix time at monotonic time 0, in seconds.
        """
        parts = _batch_of(weights, body, wall)
        size = sum(map(len, parts))
        if self._size + size > self._max_bytes:
            self.close()
        self.close_if_old()
        if self._file is None or os.fstat(self._file.fileno()).st_nlink == 0:  # an operator may have removed it
            self._open()
        assert self._file is not None
        try:
            written = os.writev(self._file.fileno(), parts)  # one call: each costs the thread its turn
            rest = memoryview(b"".join(parts))[written:] if written < size else b""
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            os.ftruncate(self._file.fileno(), self._size)
            self._file.seek(self._size)
            raise
        self._size += size
        total = sum(weights.values())
        self._parts.update({lease: size * weight // total for lease, weight in weights.items()})

    def _open(self) -> None:
        """Begin a segment, and lock it."""
        if self._file is not None:
            self._file.close()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        stamp = int(time.time() * 1e3)
        while True:
            try:
                file = (self._folder / f"{stamp:013d}-{self._replica}{SUFFIX}").open("xb", buffering=0)
                fcntl.flock(file, fcntl.LOCK_EX)
            except FileExistsError:  # the clock was set back
                stamp += 1
                continue
            if os.fstat(file.fileno()).st_nlink:  # else another replica has just removed the empty file
                break
            file.close()
        self._file, self._size, self._began_at = file, 0, time.monotonic()
        self._parts.clear()

    def close_if_old(self) -> None:
        """End the current segment after `SEGMENT_S` seconds."""
        if time.monotonic() - self._began_at >= SEGMENT_S:
            self.close()

    def close(self) -> None:
        """End the current segment."""
        if self._file is not None:
            file, self._file = self._file, None
            with file:  # while it is locked: otherwise another replica would look for the leases in it
                self._ended(os.path.basename(str(file.name)), self._size, self._parts)
        self._size = 0


def calls_of(path: Path, lease: str, damaged: list[str]) -> Iterator[Sequence[Any]]:
    """Yield the calls of one episode in a segment, see `RecordedCalls.calls`. A missing file has none.

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
            if owner == lease and len(rest) in (5, 6)  # an older version wrote no number
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


def _batch_of(leases: Collection[str], body: bytes, wall: float) -> list[bytes]:
    header = msgpack.packb({"wall": wall, "leases": list(leases)})
    head = _HEAD.pack(MAGIC, len(header), len(body), zlib.crc32(header), zlib.crc32(body), 0)[:_CHECKED]
    return [head + zlib.crc32(head).to_bytes(4, "big"), header, body]


# -- retention ---------------------------------------------------------------------------------------------------------


def locked(path: Path) -> BinaryIO | None:
    """Open and lock a segment. None: a replica appends to it, or it is gone."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def parts_of(file: BinaryIO) -> Counter[str]:
    """Return about the bytes that each lease has in a segment: a batch does not say how long its calls are."""
    found: Counter[str] = Counter()
    for batch in batches(file):
        if batch.leases:
            size = (batch.end - batch.begin) // len(batch.leases)
            found.update(dict.fromkeys(batch.leases, size))
    return found


def rewrite(file: BinaryIO, path: Path, leases: Collection[str]) -> int:
    """Replace the segment at *path*, which is open as *file*, by one with the calls of *leases* only.

    Processes that read the old one go on with it. Damaged batches are left out. Return the new size.
    """
    temporary, state = path.with_name(path.name + REWRITTEN), os.fstat(file.fileno())
    with temporary.open("wb") as written:
        for batch in batches(file):
            kept = [lease for lease in batch.leases or () if lease in leases]
            body = _read_body(file, batch) if kept else None
            if body is not None and batch.leases is not None:
                body = body if len(kept) == len(batch.leases) else _calls_kept(body, leases)
                written.writelines(_batch_of(kept, body, batch.wall))
        size = written.tell()
    os.utime(temporary, (state.st_atime, state.st_mtime))
    temporary.replace(path)
    return size


def _calls_kept(body: bytes, leases: Collection[str]) -> bytes:
    """Return a body with the calls of *leases* only, without decoding their contents."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(body), unicode_errors="surrogatepass")
    unpacker.feed(body)
    kept = []
    for _ in range(unpacker.read_array_header()):
        begin = unpacker.tell()
        size = unpacker.read_array_header()
        lease = unpacker.unpack()
        for _ in range(size - 1):
            unpacker.skip()
        if lease in leases:
            kept.append(body[begin : unpacker.tell()])
    return as_list(kept)

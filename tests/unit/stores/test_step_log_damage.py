"""Damaged files of the step log: whatever byte is wrong or missing, the rest is read and nothing false is shown."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from gateway.stores.step_log.segments import MAGIC, MAGIC_1, SegmentWriter, batches, calls_of
from tests.unit.stores.test_step_log import segments

ONE, TWO = "1" * 32, "2" * 32
CALLS: list[tuple[Any, ...]] = [
    (lease, "call", 1.0, 2.0, "ok", b"%d" % number, b"reply", None, []) for number, lease in enumerate((ONE, TWO))
]
"""The calls of one batch."""
BATCHES = 3


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """A segment of `BATCHES` batches, each with a call of both episodes, and one with a call of ``TWO`` only."""
    writer = SegmentWriter(tmp_path, "r1", lambda *_: None)
    for _ in range(BATCHES):
        writer.append({ONE: 1, TWO: 1}, msgpack.packb(CALLS), wall=100.0)
    writer.append({TWO: 1}, msgpack.packb(CALLS[1:]), wall=100.0)
    writer.close()
    (found,) = segments(tmp_path)
    return found


def read(path: Path, lease: str) -> tuple[list[tuple[Any, ...]], int]:
    """Return the calls of an episode, and the number of damaged batches."""
    damaged: list[str] = []
    return [tuple(call) for call in calls_of(path, lease, damaged)], len(damaged)


def ends(path: Path) -> list[int]:
    with path.open("rb") as file:
        return [batch.end for batch in batches(file)]


def test_what_is_whole_is_read(segment: Path) -> None:
    call: tuple[Any, ...] = (101.0, 1.0, "call", "ok", b"0", b"reply", None, [])

    assert read(segment, ONE) == ([call] * BATCHES, 0)
    assert read(segment, TWO) == ([(*call[:4], b"1", *call[5:])] * (BATCHES + 1), 0)


def test_one_wrong_byte_costs_one_batch(segment: Path) -> None:
    written = segment.read_bytes()
    (call, *_), _ = read(segment, ONE)
    last = ends(segment)[-2]
    for at in range(len(written)):
        for flipped in (1, 0x80):
            segment.write_bytes(written[:at] + bytes([written[at] ^ flipped]) + written[at + 1 :])
            found, damaged = read(segment, ONE)
            if at < last:
                assert (found, damaged) == ([call] * (BATCHES - 1), 1), f"byte {at}"
            else:  # a damaged head could be one of any episode; a damaged body of another episode costs nothing
                assert found == [call] * BATCHES, f"byte {at}"
                assert damaged <= 1


def test_a_segment_that_was_cut_off_anywhere_has_its_whole_batches(segment: Path) -> None:
    written, stops = segment.read_bytes(), ends(segment)
    (call, *_), _ = read(segment, ONE)
    for size in range(len(written)):
        segment.write_bytes(written[:size])
        whole = sum(stop <= size for stop in stops[:BATCHES])
        assert read(segment, ONE) == ([call] * whole, 0), f"{size} bytes"


def test_bytes_between_batches_are_skipped(segment: Path) -> None:
    written, (stop, *_) = segment.read_bytes(), ends(segment)
    found, _ = read(segment, ONE)
    for between in (b"\x00" * 5000, b"EGL", MAGIC, MAGIC_1 + b"\xff" * 8, MAGIC * 9, b"\x00" * (2**20 - 2)):
        segment.write_bytes(written[:stop] + between + written[stop:])
        shown, damaged = read(segment, ONE)
        assert shown == found, between[:20]
        assert damaged >= 1


def of_older_version(count: int) -> Iterator[bytes]:
    for _ in range(count):
        header, body = msgpack.packb({"wall": 100.0, "leases": [ONE, TWO]}), msgpack.packb(CALLS)
        yield struct.pack(">4sII", MAGIC_1, len(header), len(body)) + header + body


def test_batches_of_an_older_version_are_read(segment: Path) -> None:
    found, _ = read(segment, ONE)
    segment.write_bytes(b"".join(of_older_version(2)) + segment.read_bytes())

    assert read(segment, ONE) == ([found[0]] * 2 + found, 0)


def test_damage_of_an_older_version_ends_no_reader(segment: Path) -> None:
    written = b"".join(of_older_version(2))
    for at in range(len(written)):
        for flipped in (1, 0x80):
            segment.write_bytes(written[:at] + bytes([written[at] ^ flipped]) + written[at + 1 :])
            found, damaged = read(segment, ONE)
            assert len(found) + damaged <= 3
        segment.write_bytes(written[:at])
        assert len(read(segment, ONE)[0]) == at // (len(written) // 2)

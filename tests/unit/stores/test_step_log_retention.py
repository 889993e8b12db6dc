"""The limit of the step log: it holds for all files in the folder, and what makes room are whole episodes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import sqlite3
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any, Final

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.file_lock import hold
from gateway.core.ids import Owner
from gateway.core.ports.step_log import MESSAGE, EpisodeFilter, Rollout
from gateway.stores.step_log import retention, segments
from gateway.stores.step_log.database import INDEX, LOCK, StepLogDatabase, equal_share
from gateway.stores.step_log.reader import StepLogReader
from gateway.stores.step_log.segments import MAGIC_1, batches, calls_of, rewrite
from gateway.stores.step_log.writer import StepLogWriter
from tests.deadlines import HANG_S
from tests.unit.stores.test_step_log import END, MATH, a_call, request, session
from tests.unit.stores.test_step_log import segments as in_folder

LIMIT: Final = 4 * 2**20
CALLS: Final = 3
"""Calls of each episode in these tests."""


@pytest.fixture(autouse=True)
def _cleaning_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "WORK_S", HANG_S)


@pytest.fixture
def reader(tmp_path: Path) -> StepLogReader:
    return StepLogReader(tmp_path)


def a_log(folder: Path, replica: str = "r1", **more: Any) -> StepLogWriter:
    return StepLogWriter(folder, replica, **{"max_bytes": LIMIT, "max_days": 14, **more})


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(folder / INDEX)) as database:
        return database.execute(query).fetchall()


async def play(log: StepLogWriter, lease: str, owner: str, reply: bytes, *, does_end: bool = True) -> None:
    one = replace(session(lease, lease[-5:]), owner=Owner(owner))
    log.opened(one, MATH, request(), open_s=0.0)
    for number in range(CALLS):
        log.called(a_call(b"%d" % number, reply, lease=lease))
    if does_end:
        log.closed(one, MATH, END)
    await log.flush()


def picture(size: int) -> bytes:
    return b'{"image":"' + base64.b64encode(os.urandom(size)) + b'"}'


async def listed(reader: StepLogReader, **wanted: Any) -> list[str]:
    return [row["lease"] for row in await reader.episodes(EpisodeFilter(**wanted), limit=999)]


async def calls_in(reader: StepLogReader, lease: str) -> list[bytes]:
    row = await reader.episode(lease)
    assert row is not None
    calls, damaged = await reader.calls(row)
    assert damaged == []
    return [call[4] for call in calls]


@pytest.mark.parametrize("replies", ["images", "text", "both"])
async def test_the_folder_stays_within_its_limit_and_the_newest_episodes_stay_whole(
    tmp_path: Path, reader: StepLogReader, replies: str
) -> None:
    first, second = logs = [a_log(tmp_path, name) for name in ("r1", "r2")]
    for number in range(60):
        is_image = replies == "images" or (replies == "both" and number % 3 == 0)
        reply = picture(200_000) if is_image else os.urandom(70_000)
        await play(logs[number % 2], f"{number:032x}", "alice", reply)
        assert size_of(tmp_path) <= LIMIT
    kept = await listed(reader)
    for log in logs:
        await log.aclose()

    assert first.lost == second.lost == 0
    assert 5 <= len(kept) < 60
    assert kept == [f"{number:032x}" for number in range(59, 59 - len(kept), -1)], "the newest ones"
    for lease in kept:
        assert await calls_in(reader, lease) == [b"0", b"1", b"2"]
    assert rows(tmp_path, "SELECT digest FROM blobs EXCEPT SELECT digest FROM uses") == []
    assert rows(tmp_path, "SELECT digest FROM uses EXCEPT SELECT digest FROM blobs") == []
    (held,), (paid,) = rows(
        tmp_path, "SELECT coalesce(sum(length(data)), 0) FROM blobs UNION ALL SELECT sum(bytes) FROM uses"
    )
    assert held == (paid or 0)
    assert max(path.stat().st_size for path in in_folder(tmp_path)) <= LIMIT // 8
    assert size_of(tmp_path) <= LIMIT


async def test_a_key_makes_room_for_itself_before_others_do(tmp_path: Path, reader: StepLogReader) -> None:
    log = a_log(tmp_path)
    for number in range(10):
        await play(log, f"a{number:031x}", "alice", os.urandom(5_000))
    for number in range(80):
        key = f"r{number:031x}"
        log.rollout(
            Rollout(
                key=key,
                id=str(number),
                owner=Owner("bob"),
                run="",
                name="",
                environment="math",
                split="",
                started_at=time.time() + 1e6,  # a trainer's clock keeps nothing
                info={},
            )
        )
        log.called((key, MESSAGE, 0.0, 0.0, "ok", {"id": "m", "at": 1.0, "content": "x" * 200_000}, None, None, (), 0))
        await log.flush()
        assert size_of(tmp_path) <= LIMIT
    alices = await listed(reader)
    await log.aclose()

    assert log.lost == 0
    assert len(alices) == 10
    for lease in alices:
        assert len(await calls_in(reader, lease)) == CALLS
    kept = [int(key[1:], 16) for (key,) in rows(tmp_path, "SELECT key FROM rollouts ORDER BY key")]
    assert 5 <= len(kept) < 80
    assert kept == list(range(80 - len(kept), 80))


async def test_segments_are_rewritten_without_the_calls_of_removed_episodes(
    tmp_path: Path, reader: StepLogReader
) -> None:
    log = a_log(tmp_path)
    for number in range(40):  # both in each batch
        for name, size in (("alice", 1_000), ("bob", 70_000)):
            await play(log, f"{name[0]}{number:031x}", name, os.urandom(size), does_end=False)
    kept = await listed(reader)
    await log.aclose()

    assert len([lease for lease in kept if lease.startswith("a")]) == 40
    assert 5 < len(kept) < 60
    for lease in kept:
        assert len(await calls_in(reader, lease)) == CALLS
    assert [lease for lease in kept if lease.startswith("b")][-1] != f"b{0:031x}"
    files = in_folder(tmp_path)
    assert [call for path in files for call in calls_of(path, f"b{0:031x}", [])] == []
    assert len([call for path in files for call in calls_of(path, f"a{0:031x}", [])]) == CALLS


def test_a_reader_goes_on_with_a_segment_that_is_rewritten(tmp_path: Path) -> None:
    writer = segments.SegmentWriter(tmp_path, "r1", lambda *_: None)
    for number in range(3):
        calls: list[Any] = [
            [lease, "call", 1.0, 2.0, "ok", b"%d" % number, lease * 9, None, []] for lease in ("one", "two")
        ]
        writer.append({"one": 1, "two": 1}, msgpack.packb(calls), wall=0.0)
    writer.close()
    (path,) = in_folder(tmp_path)
    os.utime(path, (5, 5))
    before = path.stat()
    reading = calls_of(path, "two", [])
    first = next(reading)
    file = segments.locked(path)
    assert file is not None
    assert segments.locked(path) is None
    with file:
        size = rewrite(file, path, {"one"})

    assert [call[4] for call in (first, *reading)] == [b"0", b"1", b"2"]
    assert list(calls_of(path, "two", [])) == []
    assert [call[4:6] for call in calls_of(path, "one", [])] == [(b"%d" % number, "one" * 9) for number in range(3)]
    assert size == path.stat().st_size < before.st_size
    assert path.stat().st_mtime == before.st_mtime


async def test_an_image_stays_while_an_episode_uses_it_and_counts_for_this_one(
    tmp_path: Path, reader: StepLogReader
) -> None:
    log, image = a_log(tmp_path), os.urandom(300_000)
    shown = b'{"image":"' + base64.b64encode(image) + b'"}'
    for number in range(30):
        await play(log, f"{number:032x}", "alice", shown if number % 2 else os.urandom(70_000))
        paid = rows(tmp_path, "SELECT lease FROM uses WHERE bytes > 0")
        assert len(paid) == min(number, 1)
    kept = await listed(reader)
    await log.aclose()

    assert f"{1:032x}" not in kept
    ((payer,),) = rows(tmp_path, "SELECT lease FROM uses WHERE bytes > 0")
    assert payer in kept
    ((digest,),) = rows(tmp_path, "SELECT digest FROM blobs")
    assert await reader.blob(digest) == image
    assert rows(tmp_path, f"SELECT bytes > 300000 FROM episodes WHERE lease = '{payer}'") == [(1,)]


async def test_what_another_replica_writes_to_is_never_removed(tmp_path: Path, reader: StepLogReader) -> None:
    quiet, loud = a_log(tmp_path, "r1"), a_log(tmp_path, "r2")
    await play(quiet, "a" * 32, "alice", b"first", does_end=False)
    (own,) = in_folder(tmp_path)
    for number in range(30):
        await play(loud, f"{number:032x}", "alice", os.urandom(70_000))
    assert "a" * 32 not in await listed(reader), "its episode made room"
    assert own in in_folder(tmp_path)
    quiet.called(a_call(b"later", b"reply"))
    quiet.closed(session(), MATH, END)
    await quiet.flush()
    assert b"later" in await calls_in(reader, "a" * 32)
    for log in (quiet, loud):
        await log.aclose()
    assert size_of(tmp_path) <= LIMIT


async def test_what_a_killed_replica_wrote_is_found_and_makes_room(tmp_path: Path, reader: StepLogReader) -> None:
    killed = a_log(tmp_path, "r1")
    await play(killed, "a" * 32, "alice", os.urandom(20_000), does_end=False)
    (left,) = in_folder(tmp_path)
    assert killed._segments._file is not None
    killed._segments._file.close()
    killed._segments._file = None
    assert len(await calls_in(reader, "a" * 32)) == CALLS
    log = a_log(tmp_path, "r2")
    for number in range(30):
        await play(log, f"{number:032x}", "alice", os.urandom(70_000))
    await log.aclose()

    assert "a" * 32 not in await listed(reader)
    assert left not in in_folder(tmp_path)
    assert [each async for each in reader.without_end(time.time())] == []


async def test_records_that_are_too_old_are_removed_but_not_because_a_clock_jumps(
    tmp_path: Path, reader: StepLogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "CLEANED_S", 0.0)
    log, now = a_log(tmp_path, max_days=1), {"wall": 0.0, "monotonic": 0.0}
    clock = SimpleNamespace(
        time=lambda: time.time() + now["wall"], monotonic=lambda: time.monotonic() + now["monotonic"]
    )
    await play(log, "a" * 32, "alice", b"reply")
    monkeypatch.setattr(retention, "time", clock)
    for wall in (1e6, -1e6):
        now["wall"] = wall
        await play(log, "b" * 32, "alice", b"reply")
        assert "a" * 32 in await listed(reader)
    now["wall"] = now["monotonic"] = 1e6
    await play(log, "c" * 32, "alice", b"reply")
    await log.aclose()

    assert await listed(reader) == []


def test_segments_of_one_moment_have_different_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "time", SimpleNamespace(time=lambda: 1e9, monotonic=time.monotonic))
    for _ in range(3):
        writer = segments.SegmentWriter(tmp_path, "r1", lambda *_: None)
        writer.append({"a": 1}, msgpack.packb([]), wall=0.0)
        writer.close()

    assert len(in_folder(tmp_path)) == 3


def test_a_segment_that_an_operator_removed_costs_only_its_calls(tmp_path: Path) -> None:
    writer = segments.SegmentWriter(tmp_path, "r1", lambda *_: None)
    for _ in range(2):
        writer.append({"a": 1}, msgpack.packb([["a", "call", 0.0, 0.0, "ok", b"", b"", None, []]]), wall=0.0)
        (path,) = in_folder(tmp_path)
        assert len(list(calls_of(path, "a", []))) == 1
        path.unlink()
    writer.close()


def test_processes_that_start_together_create_one_index(tmp_path: Path) -> None:
    count = 6
    barrier = Barrier(count)

    def start(path: Path, number: int) -> None:
        barrier.wait(HANG_S)
        with contextlib.closing(StepLogDatabase(path)) as database:
            database.store(b'[{"lease":"%d","at":1}]' % number)

    with ThreadPoolExecutor(count) as threads:
        for attempt in range(5):
            path = tmp_path / str(attempt) / INDEX
            path.parent.mkdir()
            (path.parent / LOCK).touch()
            list(threads.map(start, [path] * count, range(count)))
            assert rows(path.parent, "SELECT count(*) FROM episodes") == [(count,)]
            assert rows(path.parent, "PRAGMA auto_vacuum") == [(2,)]


async def test_one_replica_cleans_at_a_time_and_the_others_go_on(tmp_path: Path) -> None:
    log = a_log(tmp_path)
    with hold(tmp_path / LOCK, "", alone=True):
        opening = asyncio.ensure_future(play(log, "b" * 32, "alice", b"reply"))
        await asyncio.sleep(0)
    await opening
    with hold(tmp_path / LOCK, "", alone=True):
        for number in range(20):
            await play(log, f"{number:032x}", "alice", os.urandom(15_000))
    await log.aclose()

    assert log.lost == 0
    assert len(await listed(StepLogReader(tmp_path))) == 21


OLD: Final = """
CREATE TABLE episodes (
    lease TEXT PRIMARY KEY, session TEXT, name TEXT, owner TEXT, environment TEXT, split TEXT, task TEXT,
    task_digest TEXT, policy TEXT, group_name TEXT, protocol TEXT, worker TEXT, image TEXT, scorer TEXT, seed INTEGER,
    opened_at REAL, closed_at REAL, reason TEXT, outcome TEXT, reward REAL, steps INTEGER,
    unexpected_error TEXT, tags TEXT, "begin" TEXT, "end" TEXT, at REAL NOT NULL
);
CREATE INDEX episodes_by_time ON episodes (at);
CREATE TABLE rollouts (
    key TEXT PRIMARY KEY, id TEXT, owner TEXT, run TEXT, name TEXT, environment TEXT, split TEXT,
    started_at REAL NOT NULL, info TEXT, lease TEXT
);
CREATE TABLE blobs (digest TEXT PRIMARY KEY, used_at REAL NOT NULL, data BLOB NOT NULL);
CREATE INDEX blobs_by_time ON blobs (used_at);
"""
"""The index of commit 5528efbd."""


def an_old_log(folder: Path, *, episodes: int, size: int, image_size: int = 1_000) -> None:
    """Write a log as commit 5528efbd did, with an image for each episode."""
    began_at = time.time() - 600_000
    with contextlib.closing(sqlite3.connect(folder / INDEX)) as old:
        old.execute("PRAGMA journal_mode = WAL")
        old.executescript(OLD)
        for number in range(episodes):
            at = began_at + 1000 * number
            old.execute(
                'INSERT INTO episodes (lease, name, owner, environment, opened_at, closed_at, at, "begin") '
                "VALUES (?, 'old', 'alice', 'math', ?, ?, ?, '{}')",
                (f"{number:032x}", at, at + 0.5, at),
            )
            old.execute("INSERT INTO blobs VALUES (?, ?, ?)", (str(number), at, os.urandom(image_size)))
        old.commit()
    for number in range(episodes):
        lease = f"{number:032x}"
        call: tuple[Any, ...] = (lease, "call", 1.0, 2.0, "ok", b"0", bytes(size), None, [])
        header, body = msgpack.packb({"wall": began_at, "leases": [lease]}), msgpack.packb([call])
        path = folder / f"{int((began_at + 1000 * number) * 1e3):013d}-old.calls"
        path.write_bytes(struct.pack(">4sII", MAGIC_1, len(header), len(body)) + header + body)


async def test_a_log_of_an_older_version_is_read_and_makes_room_from_its_oldest_end(
    tmp_path: Path, reader: StepLogReader
) -> None:
    an_old_log(tmp_path, episodes=30, size=50_000, image_size=80_000)
    before = await listed(reader)
    assert [await calls_in(reader, lease) for lease in before[:3]] == [[b"0"]] * 3
    log = a_log(tmp_path)
    for number in range(30, 40):
        await play(log, f"{number:032x}", "alice", picture(100_000))
    kept = await listed(reader)
    await log.aclose()

    assert len(before) == 30
    assert log.lost == 0
    assert 12 < len(kept) < 40
    assert kept == [f"{number:032x}" for number in range(39, 39 - len(kept), -1)]
    for lease in kept:
        assert len(await calls_in(reader, lease)) >= 1
    blobs = [int(digest) for (digest,) in rows(tmp_path, "SELECT digest FROM blobs WHERE length(digest) < 9")]
    assert set(blobs) == set(range(min(blobs), 30))
    assert abs(min(blobs) - (40 - len(kept))) <= 1, "images of an older version go with their episodes"
    free = rows(tmp_path, "SELECT freelist_count * page_size FROM pragma_freelist_count, pragma_page_size")[0][0]
    assert size_of(tmp_path) - free <= LIMIT


async def test_the_index_of_an_older_version_is_rebuilt_when_it_is_small(tmp_path: Path) -> None:
    an_old_log(tmp_path, episodes=3, size=50_000)
    log = a_log(tmp_path, max_bytes=2 * LIMIT)
    for number in range(60):
        await play(log, f"{number:032x}", "alice", os.urandom(100_000))
    await log.aclose()

    assert rows(tmp_path, "PRAGMA auto_vacuum") == [(2,)]
    assert size_of(tmp_path) <= 2 * LIMIT


async def test_what_is_too_large_for_the_log_costs_no_other_episode(tmp_path: Path, reader: StepLogReader) -> None:
    log = a_log(tmp_path)
    await play(log, "a" * 32, "alice", b"reply")
    await play(log, "b" * 32, "bob", bytes(LIMIT // 2))
    await log.flush()
    await play(log, "c" * 32, "carol", b"reply")
    row = await reader.episode("b" * 32)
    await log.aclose()

    assert row is not None
    assert (row["lost"], log.lost) == (CALLS, CALLS)
    assert await listed(reader) == ["c" * 32, "b" * 32, "a" * 32]
    assert await calls_in(reader, "a" * 32) == [b"0", b"1", b"2"]


async def test_segments_stay_after_the_index_is_lost_while_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "CLEANED_S", 0.0)
    log = a_log(tmp_path)
    await play(log, "a" * 32, "alice", b"reply")
    await log.aclose()
    (left,) = in_folder(tmp_path)
    (tmp_path / INDEX).unlink()
    log = a_log(tmp_path, "r2")
    for number in range(3):
        await play(log, f"{number:032x}", "alice", b"reply")
    assert left in in_folder(tmp_path)
    os.utime(left, (5, 5))
    await play(log, "b" * 32, "alice", b"reply")
    await log.aclose()

    assert left not in in_folder(tmp_path)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(0, 3000))
def test_an_equal_share_frees_what_is_wanted_from_the_largest(totals: list[int], wanted: int) -> None:
    level = equal_share(totals, wanted)

    kept = sum(min(total, level) for total in totals)
    assert kept == pytest.approx(max(0, sum(totals) - wanted))


def test_no_question_of_each_day_reads_the_whole_index(tmp_path: Path) -> None:
    database = StepLogDatabase(tmp_path / INDEX)
    asked: list[str] = []
    database._db.set_trace_callback(asked.append)
    lease = "a" * 32
    questions: list[Callable[[], object]] = [
        lambda: database.episodes(EpisodeFilter(), limit=5),
        lambda: database.episodes(EpisodeFilter(gateway="g", before=(1.0, lease)), limit=5),
        lambda: database.episodes(EpisodeFilter(group="g"), limit=5),
        lambda: database.episode(lease),
        lambda: database.without_end(5.0, (0.0, ""), limit=5),
        lambda: database.segments_of(lease),
        lambda: database.before(5.0),
        lambda: database.store(b'[{"lease":"a","at":1}]', b'[{"key":"k","started_at":1}]'),
        lambda: database.add_segment("one", 5, {lease: 5}),
        lambda: database.alive(1),
        lambda: database.remove([lease]),
        lambda: StepLogDatabase(tmp_path / INDEX).close(),
    ]
    for question in questions:
        question()
    database._db.set_trace_callback(None)
    plans = [
        (step[3], query)
        for query in asked
        if query.startswith(("SELECT", "UPDATE", "DELETE", "INSERT"))
        for step in database._db.execute(f"EXPLAIN QUERY PLAN {query}")
    ]
    database.close()

    assert len(plans) > 20
    for step, query in plans:
        is_ordered = "USING INDEX episodes_by_time" in step and "LIMIT" in query
        assert not step.startswith(("SCAN episodes", "SCAN rollouts", "SCAN parts", "SCAN uses")) or is_ordered, query


def test_batches_of_a_rewritten_old_segment_have_checksums(tmp_path: Path) -> None:
    an_old_log(tmp_path, episodes=1, size=10)
    (path,) = in_folder(tmp_path)
    with path.open("rb") as file:
        rewrite(file, path, {f"{0:032x}"})
    with path.open("rb") as file:
        (batch,) = batches(file)

    assert batch.checksum is not None
    assert len(list(calls_of(path, f"{0:032x}", []))) == 1

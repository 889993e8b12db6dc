"""The index of the step log: one SQLite file in WAL mode with the begin and end of each episode, and with blobs.

All replicas on a machine share it. Blobs are images and long tasks, which repeat, so each is stored once by its digest.

For `retention`, the file has the bytes that each episode and each rollout takes: in its row, in each segment
(``parts``) and in blobs (``uses``). The bytes of a blob count for one of the episodes that use it.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
import os
import sqlite3
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from gateway.core.file_lock import Taken, hold
from gateway.core.ids import GATEWAYS_OWN
from gateway.core.outcomes import EpisodeOutcome
from gateway.core.ports.step_log import ANY, UNRECORDED, EpisodeFilter, EpisodeWithoutEnd

INDEX: Final = "episodes.sqlite"
"""Name of the file in the log's folder."""
BUSY_S: Final = 5.0
"""Seconds that a write waits for another replica's write."""
LOCK: Final = "lock"
"""Name of the file that a replica locks while it creates the index, or removes records."""
RENEWED_S: Final = 600.0
"""Seconds for which an older version did not note that a blob was used again."""
ROW_BYTES: Final = 512
"""About the size of a row's entries in indices and in ``parts``."""
REMOVED: Final = 500
"""Maximum number of episodes that are removed together: other replicas wait for it."""
ROLLOUT_S: Final = 600.0
"""Seconds by which a rollout may begin before its episode, or after it."""
ROLLOUTS_MAX: Final = 256
"""Maximum number of rollouts that are compared with an episode."""

COLUMNS: Final = (
    "lease", "session", "name", "owner", "environment", "split", "task", "task_digest", "policy", "group_name",
    "protocol", "worker", "image", "scorer", "seed", "opened_at", "closed_at", "reason", "outcome", "reward",
    "steps", "unexpected_error", "tags", "gateway", "replica", "episode", "place", "lost", "begin", "end",
)  # fmt: skip
"""An episode's columns. ``begin`` and ``end`` are JSON objects with all that was recorded, ``tags`` is a JSON array."""
LISTED: Final = tuple(name for name in COLUMNS if name not in ("begin", "end"))
"""Columns of an episode in a list."""
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS episodes (
    lease TEXT PRIMARY KEY, session TEXT, name TEXT, owner TEXT, environment TEXT, split TEXT, task TEXT,
    task_digest TEXT, policy TEXT, group_name TEXT, protocol TEXT, worker TEXT, image TEXT, scorer TEXT, seed INTEGER,
    opened_at REAL, closed_at REAL, reason TEXT, outcome TEXT, reward REAL, steps INTEGER,
    unexpected_error TEXT, tags TEXT, gateway TEXT, replica TEXT, episode TEXT, place TEXT, lost INTEGER,
    "begin" TEXT, "end" TEXT, at REAL NOT NULL, bytes INTEGER
);
CREATE TABLE IF NOT EXISTS rollouts (
    key TEXT PRIMARY KEY, id TEXT, owner TEXT, run TEXT, name TEXT, environment TEXT, split TEXT,
    started_at REAL NOT NULL, info TEXT, lease TEXT, at REAL, bytes INTEGER
);
CREATE TABLE IF NOT EXISTS blobs (digest TEXT PRIMARY KEY, used_at REAL NOT NULL, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS uses (digest TEXT, lease TEXT, bytes INTEGER, PRIMARY KEY (digest, lease)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS segments (id INTEGER PRIMARY KEY, name TEXT UNIQUE, bytes INTEGER, dead INTEGER);
CREATE TABLE IF NOT EXISTS parts (
    segment INTEGER, lease TEXT, bytes INTEGER, PRIMARY KEY (segment, lease)
) WITHOUT ROWID;
"""
_NEW: Final = {"episodes": (*COLUMNS, "bytes"), "rollouts": ("at", "bytes")}
"""Columns that a file of an older version may lack."""
_INDICES: Final = """
CREATE INDEX IF NOT EXISTS episodes_by_time ON episodes (at);
CREATE INDEX IF NOT EXISTS episodes_of_group ON episodes (group_name, at) WHERE group_name != '';
CREATE INDEX IF NOT EXISTS episodes_of_name ON episodes (name, at);
CREATE INDEX IF NOT EXISTS episodes_of_trainer ON episodes (episode, at) WHERE episode != '';
CREATE INDEX IF NOT EXISTS episodes_without_end ON episodes (at, lease) WHERE closed_at IS NULL;
CREATE INDEX IF NOT EXISTS episodes_of_owner ON episodes (owner, at, bytes);
CREATE INDEX IF NOT EXISTS episodes_of_gateway ON episodes (gateway, at);
CREATE INDEX IF NOT EXISTS rollouts_by_time ON rollouts (started_at);
CREATE INDEX IF NOT EXISTS rollouts_by_arrival ON rollouts (at);
CREATE INDEX IF NOT EXISTS rollouts_of_owner ON rollouts (owner, at, bytes);
CREATE INDEX IF NOT EXISTS uses_of_lease ON uses (lease);
CREATE INDEX IF NOT EXISTS parts_of_lease ON parts (lease);
CREATE INDEX IF NOT EXISTS blobs_by_time ON blobs (used_at);
UPDATE rollouts SET at = started_at WHERE at IS NULL;
"""
VERSION: Final = zlib.crc32(f"{_SCHEMA}{_NEW}{_INDICES}".encode()) >> 1
"""Identifies these tables, in the file's ``user_version``."""
_RECORDS: Final = {"episodes": "lease", "rollouts": "key"}
"""Tables of all that counts for an owner, with their keys. A rollout's ``at`` is the time when it arrived, because a
trainer chooses ``started_at``."""
_IS_KNOWN: Final = "(lease IN (SELECT lease FROM episodes) OR lease IN (SELECT key FROM rollouts))"
_names = ", ".join(f'"{name}"' for name in COLUMNS)
_values = ", ".join(f"json_extract(value, '$.{name}')" for name in COLUMNS)
_kept = ", ".join(
    f'"{name}" = coalesce(excluded."{name}", "{name}")' for name in COLUMNS if name not in ("lease", "lost")
)
_UPSERT: Final = (
    f"INSERT INTO episodes ({_names}, at, bytes) SELECT {_values}, json_extract(value, '$.at'), "
    f"length(value) + {ROW_BYTES} FROM json_each(?) WHERE true ON CONFLICT (lease) DO UPDATE SET {_kept}, "
    "lost = coalesce(lost + excluded.lost, lost, excluded.lost), at = min(at, excluded.at), "
    "bytes = coalesce(bytes, 0) + excluded.bytes"
)
"""One statement for many rows: each statement of a thread costs it two waits for Python's lock."""
_ROLLOUT_COLUMNS: Final = ("key", "id", "owner", "run", "name", "environment", "split", "started_at", "info")
_rollout_values = ", ".join(f"json_extract(value, '$.{name}')" for name in _ROLLOUT_COLUMNS)
_ROLLOUT: Final = (
    f"INSERT OR IGNORE INTO rollouts ({', '.join(_ROLLOUT_COLUMNS)}, at, bytes) SELECT {_rollout_values}, ?2, "
    f"length(value) + {ROW_BYTES} FROM json_each(?1)"
)
_COUNTED: Final = tuple(
    f"UPDATE {table} SET bytes = coalesce(bytes, 0) + counted.value FROM json_each(?) AS counted "
    f"WHERE {table}.{column} = counted.key"
    for table, column in _RECORDS.items()
)

_DEAD: Final = (
    "UPDATE segments SET dead = max(0, bytes - (SELECT coalesce(sum(bytes), 0) FROM parts WHERE segment = ?1 "
    f"AND {_IS_KNOWN})) WHERE id = ?1"
)


class StepLogDatabase:
    """One connection to the file; a thread uses it alone."""

    def __init__(self, path: Path, *, wal_bytes: int = 4 * 2**20) -> None:
        """Open the file, and create it if it is missing. Raises ``OSError`` or ``sqlite3.Error``.

        Args:
            path: The file.
            wal_bytes: Size from which the write-ahead log is moved into the file.
        """
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            if self._number("user_version") != VERSION:
                self._create(path.parent / LOCK)
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA secure_delete = FAST")  # zeros for removed images would fill the write-ahead log
            self._wal, self._wal_bytes = f"{path}-wal", wal_bytes
            self._wal_pages = max(1, wal_bytes // self._number("page_size"))
            self._db.execute(f"PRAGMA wal_autocheckpoint = {self._wal_pages}")
            self._db.execute(f"PRAGMA journal_size_limit = {wal_bytes}")
        except BaseException:
            self._db.close()
            raise
        self.inode = path.stat().st_ino
        """Number of the file in its file system."""
        self._db.text_factory = partial(str, encoding="utf-8", errors="replace")  # texts may have lone surrogates
        self._put: dict[str, bytes] = {}
        self._uses: list[tuple[str, str]] = []

    def _create(self, lock: Path) -> None:
        """Create the tables, or add what a file of an older version lacks. One process does so at a time."""
        try:
            file = hold(lock, "", alone=True, within_s=BUSY_S)
        except Taken:
            raise TimeoutError(f"{lock} is locked for more than {BUSY_S:g} s") from None
        with file:
            self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before the first table
            self._db.execute("PRAGMA journal_mode = WAL")
            with self._change():
                _each(self._db, _SCHEMA)
                for table, columns in _NEW.items():
                    known = {row[1] for row in self._db.execute(f"PRAGMA table_info({table})")}
                    for column in columns:
                        if column not in known:
                            self._db.execute(f'ALTER TABLE {table} ADD COLUMN "{column}"')
                _each(self._db, _INDICES)
                self._db.execute(f"PRAGMA user_version = {VERSION}")

    def _number(self, pragma: str) -> int:
        return int(self._db.execute(f"PRAGMA {pragma}").fetchone()[0])

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Close the connection."""
        self._db.close()

    # -- writing --------------------------------------------------------------------------------------------------

    def store(self, rows: bytes = b"", rollouts: bytes = b"") -> None:
        """Store begins and ends of episodes, and the blobs that `put` collected. Raises ``sqlite3.Error``.

        Args:
            rows: A JSON array of objects with the columns, and ``at``, a Unix time. Empty: no rows.
            rollouts: A JSON array of rollouts, as `Rollout` has them. Empty: none.
        """
        blobs, self._put = self._put, {}
        uses, self._uses = self._uses, []
        if not rows and not blobs and not rollouts:
            return
        now = time.time()
        with self._change():
            if rows:
                self._db.execute(_UPSERT, (rows.decode(),))
            if rollouts:
                self._db.execute(_ROLLOUT, (rollouts.decode(), now))
            if blobs:
                self._use(blobs, uses, now)
        # Replicas that write all the time keep SQLite from beginning the write-ahead log anew.
        if blobs and os.path.getsize(self._wal) > 2 * self._wal_bytes:
            self.shrink(0)

    def _use(self, blobs: Mapping[str, bytes], uses: Sequence[tuple[str, str]], now: float) -> None:
        """Store the blobs that are new. The first episode that uses one pays for it."""
        known = self._db.execute(
            "SELECT digest FROM blobs WHERE digest IN (SELECT value FROM json_each(?))", (json.dumps(list(blobs)),)
        )
        new = blobs.keys() - {digest for (digest,) in known}
        if new:
            self._db.executemany("INSERT INTO blobs VALUES (?, ?, ?)", [(name, now, blobs[name]) for name in new])
        paid: dict[str, int] = {}
        rows = []
        for digest, lease in uses:
            size = len(blobs[digest]) if digest in new else 0
            new.discard(digest)
            paid[lease] = paid.get(lease, 0) + size
            rows.append((digest, lease, size))
        self._db.executemany("INSERT OR IGNORE INTO uses VALUES (?, ?, ?)", rows)
        self._count({lease: size for lease, size in paid.items() if size})

    def _count(self, added: Mapping[str, int]) -> None:
        """Add bytes to episodes and rollouts."""
        if added:
            for statement in _COUNTED:
                self._db.execute(statement, (json.dumps(added),))

    def put(self, data: bytes, lease: str) -> str:
        """Store *data* once, with the next `store`, for an episode. Return its SHA-256 in hexadecimal digits."""
        digest = hashlib.sha256(data).hexdigest()
        self._put[digest] = data
        self._uses.append((digest, lease))
        return digest

    # -- retention ------------------------------------------------------------------------------------------------

    def add_segment(self, name: str, size: int, parts: Mapping[str, int]) -> None:
        """Note that a segment is complete, and the bytes that the calls of each lease take in it."""
        with self._change():
            id = self._db.execute("INSERT INTO segments (name, bytes) VALUES (?, ?)", (name, size)).lastrowid
            self._db.execute("INSERT INTO parts SELECT ?, key, value FROM json_each(?)", (id, json.dumps(parts)))
            self._count(parts)
            self._db.execute(_DEAD, (id,))

    def segments(self) -> dict[str, int]:
        """Return the numbers of the complete segments, by name."""
        return dict(self._db.execute("SELECT name, id FROM segments").fetchall())

    def segments_of(self, lease: str) -> set[str]:
        """Return the names of the complete segments that have calls of an episode."""
        query = "SELECT name FROM segments WHERE id IN (SELECT segment FROM parts WHERE lease = ?)"
        return {name for (name,) in self._db.execute(query, (lease,))}

    def deadest_segment(self, *, least: float) -> tuple[int, str] | None:
        """Return the number and name of the segment with the largest share of calls of removed episodes.

        None: no share is at least *least*.
        """
        found: tuple[int, str] | None = self._db.execute(
            "SELECT id, name FROM segments WHERE dead > 0 AND dead >= bytes * ? "
            "ORDER BY dead * 1.0 / bytes DESC LIMIT 1",
            (least,),
        ).fetchone()
        return found

    def dead_segments(self) -> list[tuple[int, str]]:
        """Return the numbers and names of the segments without calls of recorded episodes."""
        return self._db.execute("SELECT id, name FROM segments WHERE dead >= bytes").fetchall()

    def alive(self, segment: int) -> set[str]:
        """Return the leases in a segment whose episode or rollout is recorded."""
        query = f"SELECT lease FROM parts WHERE segment = ? AND {_IS_KNOWN}"
        return {lease for (lease,) in self._db.execute(query, (segment,))}

    def change_segment(self, segment: int, size: int) -> None:
        """Note that a segment has calls of the `alive` leases only, and its new size. 0: it is removed."""
        with self._change():
            self._db.execute(f"DELETE FROM parts WHERE segment = ? AND (? OR NOT {_IS_KNOWN})", (segment, not size))
            if size:
                self._db.execute("UPDATE segments SET bytes = ? WHERE id = ?", (size, segment))
                self._db.execute(_DEAD, (segment,))
            else:
                self._db.execute("DELETE FROM segments WHERE id = ?", (segment,))

    def before(self, before: float) -> list[str]:
        """Return leases of episodes that ended, and keys of rollouts that arrived, before a Unix time."""
        found = self._db.execute(
            "SELECT lease FROM episodes WHERE at < ?1 AND coalesce(closed_at, at) < ?1 UNION ALL "
            "SELECT key FROM rollouts WHERE at < ?1 LIMIT ?2",
            (before, REMOVED),
        )
        return [lease for (lease,) in found]

    def above_equal_share(self, wanted: int) -> list[str]:
        """Return the oldest episodes and rollouts of the owners that are furthest above an equal share.

        They are at most `REMOVED`, and take about *wanted* bytes.
        """
        totals: Counter[str | None] = Counter()
        for table in _RECORDS:
            totals.update(dict(self._db.execute(f"SELECT owner, coalesce(sum(bytes), 0) FROM {table} GROUP BY owner")))
        level = equal_share(list(totals.values()), wanted)
        chosen: list[str] = []
        for owner, total in totals.most_common():
            excess = total - level
            queries = (
                f"SELECT coalesce(at, 0), {key}, bytes FROM {table} WHERE owner IS ? ORDER BY at"
                for table, key in _RECORDS.items()
            )
            for _, lease, size in heapq.merge(*(self._db.execute(query, (owner,)) for query in queries)):
                if (excess <= 0 and level > 0) or len(chosen) >= REMOVED:
                    break
                chosen.append(lease)
                excess -= size or 0
        return chosen

    def remove(self, leases: Iterable[str]) -> None:
        """Remove episodes and rollouts, and the blobs that no others use. Their calls count as dead in segments."""
        chosen = "(SELECT lease FROM chosen)"
        self._db.execute("CREATE TEMP TABLE IF NOT EXISTS chosen (lease TEXT PRIMARY KEY) WITHOUT ROWID")
        with self._change():
            self._db.execute("INSERT OR IGNORE INTO chosen SELECT value FROM json_each(?)", (json.dumps(list(leases)),))
            self._db.execute(
                "UPDATE segments SET dead = dead + removed.bytes FROM (SELECT segment, sum(bytes) AS bytes FROM parts "
                f"WHERE lease IN {chosen} GROUP BY segment) AS removed WHERE id = removed.segment"
            )
            freed = self._db.execute(
                f"SELECT digest, sum(bytes) FROM uses WHERE lease IN {chosen} GROUP BY digest"
            ).fetchall()
            for statement in (
                f"DELETE FROM parts WHERE lease IN {chosen}",
                f"DELETE FROM uses WHERE lease IN {chosen}",
                f"DELETE FROM episodes WHERE lease IN {chosen}",
                f"DELETE FROM rollouts WHERE key IN {chosen}",
                "DELETE FROM chosen",
            ):
                self._db.execute(statement)
            for digest, size in freed:
                heir = self._db.execute("SELECT min(lease) FROM uses WHERE digest = ?", (digest,)).fetchone()[0]
                if heir is None:
                    self._db.execute("DELETE FROM blobs WHERE digest = ?", (digest,))
                elif size:
                    self._db.execute("UPDATE uses SET bytes = ? WHERE (digest, lease) = (?, ?)", (size, digest, heir))
                    self._count({heir: size})

    def remove_unused(self) -> None:
        """Remove blobs of an older version, which did not note uses, that are older than all episodes."""
        self._db.execute(
            "DELETE FROM blobs WHERE used_at < coalesce((SELECT min(at) FROM episodes), 1e99) - ? "
            "AND digest NOT IN (SELECT digest FROM uses)",
            (RENEWED_S,),
        )

    def users_without_record(self) -> list[str]:
        """Return leases that use blobs, and whose episode or rollout is not recorded, such as those of lost begins."""
        found = self._db.execute(f"SELECT DISTINCT lease FROM uses WHERE NOT {_IS_KNOWN} LIMIT ?", (REMOVED,))
        return [lease for (lease,) in found]

    def free_bytes(self) -> int:
        """Return the size of the file's free pages."""
        return self._number("freelist_count") * self._number("page_size")

    def can_shrink(self) -> bool:
        """Return True if `shrink` returns free pages to the file system. In a file of an older version it cannot."""
        return self._number("auto_vacuum") != 0

    def shrink(self, wanted: int) -> None:
        """Return up to *wanted* bytes of free pages to the file system, and empty the write-ahead log."""
        pages = wanted // self._number("page_size")
        while True:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if pages <= 0:
                return
            # ``execute`` would end after one page, because this statement's rows have no columns.
            self._db.executescript(f"PRAGMA incremental_vacuum({min(pages, self._wal_pages)})")
            pages -= self._wal_pages

    def rebuild(self) -> None:
        """Write the file anew, so that it `can_shrink`."""
        self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        self._db.execute("VACUUM")

    # -- reading --------------------------------------------------------------------------------------------------

    def episodes(self, wanted: EpisodeFilter, *, limit: int) -> list[dict[str, Any]]:
        """Return the newest episodes that *wanted* selects, newest first."""
        tests, values = ["true"], []
        texts = (
            "owner",
            "environment",
            "split",
            "task_digest",
            "policy",
            "name",
            "outcome",
            "reason",
            "scorer",
        )
        for column in texts:
            if value := getattr(wanted, column):
                tests.append(f"{column} = ?")
                values.append(value)
        if wanted.gateway:
            tests.append("(gateway = ? OR gateway IS NULL)")
            values.append(wanted.gateway)
        if wanted.task:
            tests.append("? IN (task, place)")
            values.append(wanted.task)
        if not wanted.owner:
            tests.append(f"owner NOT IN ({', '.join('?' * len(GATEWAYS_OWN))})")
            values.extend(sorted(GATEWAYS_OWN))
        if wanted.unexpected_error == ANY:
            tests.append("unexpected_error IS NOT NULL")
        elif wanted.unexpected_error:
            tests.append("unexpected_error = ?")
            values.append(wanted.unexpected_error)
        if wanted.group:
            tests.append("group_name = ? AND group_name != ''")  # as the index has it
            values.append(wanted.group)
        if wanted.reward_min is not None:
            tests.append("reward >= ?")
            values.append(wanted.reward_min)
        if wanted.reward_max is not None:
            tests.append("reward <= ?")
            values.append(wanted.reward_max)
        if wanted.before is not None:
            tests.append("(at, lease) < (?, ?)")
            values.extend(wanted.before)
        if wanted.tag:
            tests.append("EXISTS (SELECT 1 FROM json_each(tags) WHERE value = ?)")
            values.append(wanted.tag)
        if wanted.since:
            tests.append("at >= ?")
            values.append(wanted.since)
        names = ", ".join(LISTED)
        query = f"SELECT {names}, at FROM episodes WHERE {' AND '.join(tests)} ORDER BY at DESC, lease DESC LIMIT ?"
        return [_row(found, LISTED) for found in self._db.execute(query, (*values, limit))]

    def episode(self, id: str) -> dict[str, Any] | None:
        """Return an episode; see ``StepLogQueries.episode``."""
        for test in ("lease = ?", "name = ?", "episode = ? AND episode != ''"):
            query = f"SELECT {_names}, at FROM episodes WHERE {test} ORDER BY at DESC LIMIT 1"
            if (found := self._db.execute(query, (id,)).fetchone()) is not None:
                return _row(found)
        return None

    def without_end(self, before: float, after: tuple[float, str], *, limit: int) -> list[EpisodeWithoutEnd]:
        """Return the oldest episodes that have no end and began before a time, after an episode's time and lease."""
        found = self._db.execute(
            "SELECT lease, gateway, at FROM episodes WHERE closed_at IS NULL AND at < ? "
            "AND (at, lease) > (?, ?) ORDER BY at, lease LIMIT ?",
            (before, *after, limit),
        )
        return [EpisodeWithoutEnd(*row) for row in found]

    def end_unrecorded(self, leases: Sequence[str]) -> int:
        """End episodes whose ends were lost; see ``EndlessEpisodes.end_unrecorded``."""
        return self._db.execute(
            "UPDATE episodes SET closed_at = ?, reason = ?, outcome = ? WHERE closed_at IS NULL "
            "AND lease IN (SELECT value FROM json_each(?))",
            (time.time(), UNRECORDED, EpisodeOutcome.INFRASTRUCTURE.value, json.dumps(leases)),
        ).rowcount

    def rollouts(self, episode: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the rollouts that may belong to *episode*; see ``StepLogQueries.rollouts``."""
        began_at = episode["opened_at"] or episode["at"]
        ended_at = episode["closed_at"] or time.time()
        found = self._db.execute(
            f"SELECT {', '.join(_ROLLOUT_COLUMNS)}, lease FROM rollouts WHERE owner = ? AND environment IN ('', ?) "
            "AND started_at BETWEEN ? AND ? AND coalesce(lease, ?) = ? ORDER BY abs(started_at - ?) LIMIT ?",
            (
                episode["owner"],
                episode["environment"],
                began_at - ROLLOUT_S,
                ended_at + ROLLOUT_S,
                episode["lease"],
                episode["lease"],
                began_at,
                ROLLOUTS_MAX,
            ),
        )
        rows = [dict(zip((*_ROLLOUT_COLUMNS, "lease"), row, strict=True)) for row in found]
        return [{**row, "info": json.loads(row["info"])} for row in rows]

    def link(self, key: str, lease: str) -> None:
        """Note that a rollout belongs to an episode."""
        self._db.execute("UPDATE rollouts SET lease = ? WHERE key = ?", (lease, key))

    def blob(self, digest: str) -> bytes | None:
        """Return the data with this SHA-256, or None if it is not stored any more."""
        found = self._db.execute("SELECT data FROM blobs WHERE digest = ?", (digest,)).fetchone()
        return None if found is None else found[0]


def _row(values: Sequence[Any], columns: Sequence[str] = COLUMNS) -> dict[str, Any]:
    row = dict(zip((*columns, "at"), values, strict=True))
    for name in ("begin", "end", "tags"):
        if name in row:
            row[name] = json.loads(row[name]) if row[name] else None
    return row


def equal_share(totals: Sequence[int], wanted: int) -> float:
    """Return the bytes that each owner may keep, so that *wanted* bytes are freed. 0: nothing can stay."""
    left = sum(totals) - wanted
    for number, total in enumerate(sorted(totals)):
        share = left / (len(totals) - number)
        if total > share:
            return max(0.0, share)
        left -= total
    return float(max(totals, default=0))


def _each(database: sqlite3.Connection, script: str) -> None:
    """Run the statements of a script. ``executescript`` would end the transaction first."""
    for statement in script.split(";"):
        database.execute(statement)

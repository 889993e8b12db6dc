"""The index of the step log: one SQLite file in WAL mode with the begin and end of each episode, and with blobs.

All replicas on a machine share it. Blobs are images and long tasks, which repeat, so each is stored once by its digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from gateway.core.ids import GATEWAYS_OWN
from gateway.core.ports.step_log import ANY, EpisodeFilter, EpisodeWithoutEnd

INDEX: Final = "episodes.sqlite"
"""Name of the file in the log's folder."""
BUSY_S: Final = 5.0
"""Seconds that a write waits for another replica's write."""
BLOB_RENEWED_S: Final = 600.0
"""Seconds after which a blob that is used again gets a new time."""
ROLLOUT_S: Final = 600.0
"""Seconds by which a rollout may begin before its episode, or after it."""
ROLLOUTS_MAX: Final = 256
"""Maximum number of rollouts that are compared with an episode."""
BLOBS_KNOWN: Final = 20_000

COLUMNS: Final = (
    "lease", "session", "name", "owner", "environment", "split", "task", "task_digest", "policy", "group_name",
    "protocol", "worker", "image", "scorer", "seed", "opened_at", "closed_at", "reason", "outcome", "reward",
    "steps", "unexpected_error", "tags", "gateway", "replica", "episode", "place", "begin", "end",
)  # fmt: skip
"""An episode's columns. ``begin`` and ``end`` are JSON objects with all that was recorded, ``tags`` is a JSON array."""
LISTED: Final = tuple(name for name in COLUMNS if name not in ("begin", "end"))
"""Columns of an episode in a list."""
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS episodes (
    lease TEXT PRIMARY KEY, session TEXT, name TEXT, owner TEXT, environment TEXT, split TEXT, task TEXT,
    task_digest TEXT, policy TEXT, group_name TEXT, protocol TEXT, worker TEXT, image TEXT, scorer TEXT, seed INTEGER,
    opened_at REAL, closed_at REAL, reason TEXT, outcome TEXT, reward REAL, steps INTEGER,
    unexpected_error TEXT, tags TEXT, gateway TEXT, replica TEXT, episode TEXT, place TEXT,
    "begin" TEXT, "end" TEXT, at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS rollouts (
    key TEXT PRIMARY KEY, id TEXT, owner TEXT, run TEXT, name TEXT, environment TEXT, split TEXT,
    started_at REAL NOT NULL, info TEXT, lease TEXT
);
CREATE INDEX IF NOT EXISTS rollouts_by_time ON rollouts (started_at);
CREATE TABLE IF NOT EXISTS blobs (digest TEXT PRIMARY KEY, used_at REAL NOT NULL, data BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS blobs_by_time ON blobs (used_at);
"""
_INDICES: Final = """
CREATE INDEX IF NOT EXISTS episodes_by_time ON episodes (at);
CREATE INDEX IF NOT EXISTS episodes_of_group ON episodes (group_name, at) WHERE group_name != '';
CREATE INDEX IF NOT EXISTS episodes_of_name ON episodes (name, at);
CREATE INDEX IF NOT EXISTS episodes_of_trainer ON episodes (episode, at) WHERE episode != '';
CREATE INDEX IF NOT EXISTS episodes_without_end ON episodes (at, lease) WHERE closed_at IS NULL;
"""
_names = ", ".join(f'"{name}"' for name in COLUMNS)
_values = ", ".join(f"json_extract(value, '$.{name}')" for name in COLUMNS)
_kept = ", ".join(f'"{name}" = coalesce(excluded."{name}", "{name}")' for name in COLUMNS[1:])
_UPSERT: Final = (
    f"INSERT INTO episodes ({_names}, at) SELECT {_values}, json_extract(value, '$.at') FROM json_each(?) WHERE true "
    f"ON CONFLICT (lease) DO UPDATE SET {_kept}, at = min(at, excluded.at)"
)
"""One statement for many rows: each statement of a thread costs it two waits for Python's lock."""
_ROLLOUT_COLUMNS: Final = ("key", "id", "owner", "run", "name", "environment", "split", "started_at", "info")
_rollout_values = ", ".join(f"json_extract(value, '$.{name}')" for name in _ROLLOUT_COLUMNS)
_ROLLOUT: Final = (
    f"INSERT OR IGNORE INTO rollouts ({', '.join(_ROLLOUT_COLUMNS)}) SELECT {_rollout_values} FROM json_each(?)"
)
_BLOB: Final = "INSERT INTO blobs VALUES (?, ?, ?) ON CONFLICT (digest) DO UPDATE SET used_at = excluded.used_at"


class StepLogDatabase:
    """One connection to the file; a thread uses it alone."""

    def __init__(self, path: Path) -> None:
        """Open the file, and create it if it is missing. Raises ``OSError`` or ``sqlite3.Error``."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(_SCHEMA)
        known = {row[1] for row in self._db.execute("PRAGMA table_info(episodes)")}
        for name in COLUMNS:  # a file of an older version
            if name not in known:
                with contextlib.suppress(sqlite3.OperationalError):  # another replica was faster
                    self._db.execute(f'ALTER TABLE episodes ADD COLUMN "{name}"')
        self._db.executescript(_INDICES)
        self._db.text_factory = partial(str, encoding="utf-8", errors="replace")  # texts may have lone surrogates
        self._known: dict[str, float] = {}
        self._put: dict[str, bytes] = {}

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
        if not rows and not blobs and not rollouts:
            return
        now = time.time()
        self._db.execute("BEGIN IMMEDIATE")
        try:
            if blobs:
                self._db.executemany(_BLOB, [(digest, now, data) for digest, data in blobs.items()])
            if rows:
                self._db.execute(_UPSERT, (rows.decode(),))
            if rollouts:
                self._db.execute(_ROLLOUT, (rollouts.decode(),))
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self._known.update(dict.fromkeys(blobs, now))

    def put(self, data: bytes) -> str:
        """Store *data* once, with the next `store`, and return its SHA-256 in hexadecimal digits."""
        digest = hashlib.sha256(data).hexdigest()
        if time.time() - self._known.get(digest, 0.0) > BLOB_RENEWED_S:
            self._put[digest] = data
            if len(self._known) >= BLOBS_KNOWN:
                self._known.clear()
        return digest

    def remove_before(self, before: float) -> None:
        """Remove episodes that ended, and blobs that were used last, before this Unix time."""
        self._db.execute("DELETE FROM episodes WHERE at < ? AND coalesce(closed_at, at) < ?", (before, before))
        self._db.execute("DELETE FROM rollouts WHERE started_at < ?", (before,))
        self._db.execute("DELETE FROM blobs WHERE used_at < ?", (before - BLOB_RENEWED_S,))

    # -- reading --------------------------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Return the size of what the file holds, without its free pages."""
        (pages,), (free,), (size,) = (
            self._db.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def episodes(self, wanted: EpisodeFilter, *, limit: int) -> list[dict[str, Any]]:
        """Return the newest episodes that *wanted* selects, newest first."""
        tests, values = ["true"], []
        for column in ("owner", "environment", "split", "policy", "name", "outcome", "reason", "scorer", "gateway"):
            if value := getattr(wanted, column):
                tests.append(f"{column} = ?")
                values.append(value)
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
            tests.append("group_name = ?")
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
            "SELECT lease, replica, gateway, at FROM episodes WHERE closed_at IS NULL AND at < ? "
            "AND (at, lease) > (?, ?) ORDER BY at, lease LIMIT ?",
            (before, *after, limit),
        )
        return [EpisodeWithoutEnd(*row) for row in found]

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

"""Writes the step log of one replica: a thread stores what the request path queued, five times a second.

The request path only adds to a buffer, after the answer was sent, so no call waits for the log. A full disk, or a
disk that does not answer, costs records and never a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from gateway.core.environment import Environment, StepLogging
from gateway.core.episode import Summary
from gateway.core.errors import EnvironmentUnavailable
from gateway.core.file_lock import Taken, hold
from gateway.core.json_text import dump
from gateway.core.periodic import until_next
from gateway.core.ports.step_log import MESSAGE, REFERENCE, EpisodeEnd, LoggedCall, Rollout
from gateway.core.session import SECRET_CHARS, SECRET_MARK, EpisodeRequest, Session
from gateway.core.task_name import TaskName
from gateway.stores.step_log.database import BUSY_S, INDEX, LOCK, StepLogDatabase
from gateway.stores.step_log.encoding import EMBEDDED_CHARS, CallBatch, CallBuffer, CallEncoder, as_list, size_of
from gateway.stores.step_log.masking import forms_of, masked
from gateway.stores.step_log.retention import CLEANED_S, DAMAGED, Retention
from gateway.stores.step_log.segments import SegmentWriter

logger = logging.getLogger(__name__)

PAUSE_S: Final = 0.2
"""Seconds between two writes while calls come."""
SOON_S: Final = 0.05
"""Seconds after which a begin, an end or the first call after a pause is written."""
QUEUED_MAX: Final = 100_000
"""Maximum number of queued calls."""
EPISODES_MAX: Final = 10_000
"""Maximum number of queued begins and ends, which hold their tasks."""
QUEUED_BYTES: Final = 128 * 2**20
"""Size of queued calls above which further calls are lost to the log."""
BATCH_MAX: Final = 2048
"""Maximum number of calls that are encoded together."""
ROWS_MAX: Final = 500
"""Maximum number of begins and ends that are written together."""
COMPLAINT_S: Final = 60.0
END_S: Final = 5.0
"""Seconds that the last write has."""
SECRETS_MAX: Final = 10_000
"""Maximum number of sessions whose secrets are known here. No calls of further sessions with secrets are recorded."""


class StepLogWriter:
    """The step log of one replica; implements `gateway.core.ports.step_log.StepLog`."""

    def __init__(
        self,
        folder: Path,
        replica: str,
        *,
        max_bytes: int,
        max_days: float,
        secrets: Iterable[str] = (),
        of_sessions: Callable[[Environment], Mapping[str, str]] = lambda _: {},
    ) -> None:
        """
        Args:
            folder: Folder of the segments and the database, which replicas on this machine share.
            replica: Unique name of this process.
            max_bytes: Maximum size of the folder; the oldest episodes make room for new ones. 0: nothing is recorded.
            max_days: Age in days at which records are removed.
            secrets: Texts that must not be stored, such as API keys.
            of_sessions: Reads the operator's secrets for sessions, which must not be stored either.
        """
        self._folder = folder
        self._replica = replica
        self.gateway = ""
        self._max_bytes = max_bytes
        own = [secret for secret in secrets if len(secret) >= SECRET_CHARS]
        self._own, self._own_in_calls = forms_of(own), forms_of(own, in_base64=False)
        """The gateway's own secrets. Workers do not get them, so calls, which are many, are not searched for base64."""
        self._read_secrets = of_sessions
        self._of_operator: set[str] = set()
        self._of_sessions: dict[str, list[bytes]] = {}
        """Secrets that trainers gave to open sessions, by lease."""
        self._retention = Retention(folder, max_bytes=max_bytes, max_days=max_days)
        self._segments = SegmentWriter(folder, replica, self._segment_ended, max_bytes=self._retention.segment_bytes)
        self._queued_bytes = min(QUEUED_BYTES, self._retention.batch_bytes)
        self._calls = CallBuffer()
        self._episodes: list[dict[str, Any]] = []
        self.called: Callable[[LoggedCall], object] = self._calls.add
        self._database: StepLogDatabase | None = None
        self._thread = ThreadPoolExecutor(1, "step-log")  # starts its thread with the first write
        self._writing: asyncio.Future[None] | None = None
        self._inode: int | None = None
        """Number of the index's file when it was last used."""
        self._wall = 0.0
        """Unix time at monotonic time 0, in seconds."""
        self._woken = asyncio.Event()
        self._complained_at = -COMPLAINT_S
        self._losing = threading.Lock()
        self.lost = 0
        """Number of records that were not stored."""
        self._lost_of: Counter[str] = Counter()
        """Lost records that their episodes do not show yet, by lease."""

    # -- the request path -----------------------------------------------------------------------------------------

    def keeps(self, lease: str, environment: Environment) -> bool:
        """See ``StepLog.keeps``. A lease is random, so its last digits choose a sample.

        Only the replica that opened a session can know its secrets, so other replicas record none of its calls. Nor are
        calls of a session recorded that has a secret of fewer than `SECRET_CHARS` characters.
        """
        policy = environment.step_log
        if not self._max_bytes or (lease.startswith(SECRET_MARK) and lease not in self._of_sessions):
            return False
        if environment.secrets and not self._learns_secrets(environment):
            return False
        if policy.mode is StepLogging.SAMPLED:
            return int(lease[-8:], 16) < policy.share * 2**32
        return policy.mode is StepLogging.FULL

    def _learns_secrets(self, environment: Environment) -> bool:
        """Mask the operator's secrets of *environment* from now on. Return False if they cannot be read."""
        try:
            found = set(self._read_secrets(environment).values()) - self._of_operator
        except EnvironmentUnavailable:
            return False
        if found:
            self._of_operator |= found
            forms = forms_of(found)
            self._own = sorted({*self._own, *forms}, key=len, reverse=True)
            self._own_in_calls = sorted({*self._own_in_calls, *forms}, key=len, reverse=True)
        return True

    def opened(self, session: Session, environment: Environment, request: EpisodeRequest, *, open_s: float) -> None:
        """See ``StepLog.opened``."""
        if not self._max_bytes or environment.step_log.mode is StepLogging.OFF:
            return
        setup, now = request.setup, time.time()
        secrets = [secret for secret in setup.secrets.values() if secret]
        are_maskable = all(len(secret) >= SECRET_CHARS for secret in secrets)
        if setup.secrets and are_maskable and len(self._of_sessions) < SECRETS_MAX:
            self._of_sessions[session.lease] = forms_of(secrets)
        ticket = setup.ticket
        group = setup.group if ticket is None else ticket.group
        begin = {
            "spec": setup.spec,
            "config": setup.config,
            "split": setup.split or None,
            "index": setup.index,
            "toolset": setup.toolset or None,
            "episode": request.episode or None,
            "group_size": None if group is None else group.size,
            "curriculum": None if ticket is None else ticket.curriculum,
            "wire": environment.wire.value,
            "variant": environment.name if environment.base else None,
            "open_s": round(open_s, 4),
        }
        self._note(
            {
                **_names(session, environment),
                "gateway": self.gateway or None,
                "replica": self._replica,
                "episode": request.episode or None,
                "place": setup.place or None,
                "split": setup.of_split or setup.split,
                "group_name": "" if group is None else group.name,
                "protocol": request.protocol,
                "image": environment.image_id,
                "seed": setup.seed,
                "tags": tags if isinstance(tags := setup.spec.get("tags"), list) and tags else None,
                "opened_at": now,
                "at": now,
                "begin": {name: value for name, value in begin.items() if value is not None},
            }
        )

    def closed(self, session: Session, environment: Environment, end: EpisodeEnd) -> None:
        """See ``StepLog.closed``."""
        if not self._max_bytes or environment.step_log.mode is StepLogging.OFF:
            return
        now, summary = time.time(), end.summary
        self._note(
            {
                **_names(session, environment),
                "gateway": self.gateway or None,
                "closed_at": now,
                "at": now,
                "reason": end.reason.value,
                "outcome": end.outcome.value,
                "reward": end.reward,
                "steps": None if summary is None else summary.steps,
                "unexpected_error": (summary and summary.unexpected_error) or None,
                "end": {} if summary is None else _end(summary),
            }
        )

    def rollout(self, rollout: Rollout) -> None:
        """See ``StepLog.rollout``."""
        if self._max_bytes:
            self._note({"rollout": asdict(rollout)})

    def _note(self, row: dict[str, Any]) -> None:
        if len(self._episodes) < EPISODES_MAX:
            self._episodes.append(row)
            self._woken.set()
        else:
            self._lose((row["rollout"]["key"] if "rollout" in row else row["lease"],))

    def _drop(self, call: LoggedCall) -> None:
        self._lose((call[0],))

    # -- the loop -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write five times a second, until cancelled. Begins and ends, and calls after a pause, are written at once."""
        while True:
            if self._calls or self._episodes or self._is_writing:
                within_s = until_next(PAUSE_S)
            else:
                self.called = self._first
                within_s = CLEANED_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._woken.wait()
                    await asyncio.sleep(SOON_S)  # for what comes together
            self._woken.clear()
            self._look()

    def _first(self, call: LoggedCall) -> None:
        """Add a call after a pause, and wake the loop."""
        self.called = self._calls.add
        self.called(call)
        self._woken.set()

    def _look(self) -> None:
        """Start a write unless one runs. Accept no calls while too much is queued."""
        if self._is_writing:
            is_full = len(self._calls) > QUEUED_MAX or self._calls.size() > self._queued_bytes
            self.called = self._drop if is_full else self._calls.add
        elif self._calls or self._episodes or (self._writing is not None and self._retention.is_due()):
            self._start_write()

    @property
    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def _start_write(self) -> None:
        calls = self._calls.take()
        rows, self._episodes = self._episodes, []
        self.called = self._calls.add
        self._writing = asyncio.get_running_loop().run_in_executor(self._thread, self._write, calls, rows)

    async def flush(self) -> None:
        """Write what is queued, and wait for it for at most `END_S` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                while self._is_writing or self._calls or self._episodes:
                    if not self._is_writing:
                        self._start_write()
                    if self._writing is not None:
                        await asyncio.wait([self._writing])

    async def aclose(self) -> None:
        """Write what is queued, and release the files."""
        await self.flush()
        if self._writing is not None and self._writing.done():
            await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._segments.close()
        if self._database is not None:
            self._database.close()

    def _write(self, calls: CallBatch, rows: list[dict[str, Any]]) -> None:
        """Store begins, then calls, then ends: an end has the number of records that were lost before it."""
        self._wall, is_due = time.time() - time.monotonic(), self._retention.is_due()
        ended = [row for row in rows if "closed_at" in row]
        begun = [row for row in rows if "closed_at" not in row]
        self._store_rows(begun)
        body = calls.body()
        if calls.leases:
            weights = Counter(calls.leases)
            self._attempt(calls.leases, len(body), lambda _: self._append(weights, body, self._own_in_calls))
        for some in self._slices(calls.others):
            leases = [call[0] for call in some]
            self._attempt(leases, sum(map(size_of, some)), partial(self._store_calls, some))
        self._store_rows(ended)
        for row in ended:
            self._of_sessions.pop(row["lease"], None)
        if self._lost_of:
            self._attempt((), 0, self._store_lost)
        if is_due:
            self._segments.close_if_old()
            # An open connection does not notice that the file is no database any more.
            self._attempt((), 0, lambda _: StepLogDatabase(self._folder / INDEX).close())

    def _attempt(self, leases: Sequence[str], size: int, store: Callable[[StepLogDatabase], None]) -> None:
        """Store about *size* bytes of records of *leases*. They are lost if this fails."""
        try:
            database = self._opened()
            with self._retention.room(database, size) as has_room:
                if not has_room:
                    raise OSError(f"no room for {size} bytes within GATEWAY_STEP_LOG_BYTES")
                store(database)
        except (sqlite3.Error, OSError) as error:
            self._lose(leases)
            self._complain(error)
            if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                self._set_aside(error)
        except Exception:  # one record that cannot be stored must not end the log
            self._lose(leases)
            logger.exception("step_log_failed")

    def _opened(self) -> StepLogDatabase:
        """Return the index. Open it again if its file was moved or removed."""
        path = self._folder / INDEX
        self._inode = path.stat().st_ino if path.exists() else None  # to open it here would drop SQLite's locks
        if self._database is not None and self._database.inode != self._inode:
            self._database.close()
            self._database = None
        if self._database is None:
            self._database = StepLogDatabase(path, wal_bytes=self._retention.wal_bytes)
        return self._database

    def _set_aside(self, error: Exception) -> None:
        """Move an index that is damaged aside, unless another replica did so, so that the log can go on."""
        if self._database is not None:
            self._database.close()
            self._database = None
        path, aside = self._folder / INDEX, self._folder / DAMAGED
        with contextlib.suppress(OSError, Taken), hold(self._folder / LOCK, "", alone=True, within_s=BUSY_S):
            if path.stat().st_ino == self._inode:
                for suffix in ("-wal", "-shm", ""):  # the file itself comes last
                    if (part := Path(f"{path}{suffix}")).exists():
                        part.replace(f"{aside}{suffix}")
                logger.error("step_log_index_damaged moved_to=%s error=%s", aside, error)

    def _append(self, weights: Mapping[str, int], body: bytes, secrets: Sequence[bytes]) -> None:
        if len(body) > self._retention.batch_bytes:
            raise OSError(f"{len(body)} bytes are too many for a batch within GATEWAY_STEP_LOG_BYTES")
        self._segments.append(weights, masked(body, secrets), wall=self._wall)

    def _slices(self, calls: Sequence[LoggedCall]) -> Iterator[list[LoggedCall]]:
        """Yield the calls that are encoded together. They are no more than the log has room for at a time."""
        some: list[LoggedCall] = []
        size = 0
        for call in calls:
            if call[0].startswith(SECRET_MARK) and call[0] not in self._of_sessions:
                self._lose((call[0],))  # it ended after its session, whose secrets are not known any more
                continue
            if some and (len(some) >= BATCH_MAX or size + size_of(call) > self._retention.slice_bytes):
                yield some
                some, size = [], 0
            some.append(call)
            size += size_of(call)
        if some:
            yield some

    def _store_calls(self, calls: Sequence[LoggedCall], database: StepLogDatabase) -> None:
        encoder = CallEncoder(lambda lease, data: database.put(data, lease))
        weights: Counter[str] = Counter()
        encoded = []
        for call in calls:
            encoded.append(encoder.encode(call, self._secrets_of(call[0], call[1] == MESSAGE)))
            weights[call[0]] += len(encoded[-1])
        database.store()  # the blobs first, because the batch refers to them
        self._append(weights, as_list(encoded), self._own)

    def _store_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        for begin in range(0, len(rows), ROWS_MAX):
            some = rows[begin : begin + ROWS_MAX]
            leases = [row["rollout"]["key"] if "rollout" in row else row["lease"] for row in some]
            self._attempt(leases, 0, partial(self._store_some_rows, some))

    def _store_some_rows(self, rows: Sequence[dict[str, Any]], database: StepLogDatabase) -> None:
        begun = [self._written(row["rollout"]) for row in rows if "rollout" in row]
        others = [self._written(self._with_task(database, row)) for row in rows if "rollout" not in row]
        database.store(*(b"[" + b",".join(some) + b"]" if some else b"" for some in (others, begun)))

    def _store_lost(self, database: StepLogDatabase) -> None:
        with self._losing:
            lost, self._lost_of = self._lost_of, Counter()
        try:
            now = time.time()
            database.store(dump([{"lease": lease, "lost": count, "at": now} for lease, count in lost.items()]))
        except BaseException:
            with self._losing:
                self._lost_of.update(lost)
            raise

    def _lose(self, leases: Sequence[str]) -> None:
        """Count records that are not stored, for the metric and for their episodes."""
        with self._losing:
            self.lost += len(leases)
            if len(self._lost_of) < EPISODES_MAX:
                self._lost_of.update(leases)

    def _secrets_of(self, lease: str, is_rollout: bool) -> Sequence[bytes]:
        """Return the secrets that a record may have. A rollout does not say from which session its texts come."""
        found: Iterable[bytes] = self._of_sessions.get(lease, ())
        if is_rollout:
            found = sorted({form for some in tuple(self._of_sessions.values()) for form in some}, key=len, reverse=True)
        return [*found, *self._own_in_calls]

    def _with_task(self, database: StepLogDatabase, row: dict[str, Any]) -> dict[str, Any]:
        """Return *row* with a reference in place of a long task, which is stored once."""
        begin = row.get("begin")
        if begin is None:
            return row
        spec = masked(dump(begin["spec"]), (*self._own, *self._secrets_of(row["lease"], False)))
        if len(spec) >= EMBEDDED_CHARS:
            begin = {**begin, "spec": REFERENCE + database.put(spec, row["lease"])}
        return {**row, "begin": begin}

    def _written(self, row: dict[str, Any]) -> bytes:
        """Return a row as JSON without secrets."""
        return masked(dump(row), (*self._own, *self._secrets_of(row.get("lease", ""), "lease" not in row)))

    def _complain(self, error: Exception) -> None:
        now = time.monotonic()
        if now - self._complained_at >= COMPLAINT_S:
            self._complained_at = now
            logger.warning("step_log_not_written folder=%s lost=%s error=%s", self._folder, self.lost, error)

    def _segment_ended(self, name: str, size: int, parts: Mapping[str, int]) -> None:
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):  # a replica that cleans looks for the leases in it
                self._database.add_segment(name, size, parts)


def _names(session: Session, environment: Environment) -> dict[str, Any]:
    """Return the columns that the begin and the end of an episode both know. Variants have their environment's name."""
    return {
        "lease": session.lease,
        "session": session.id,
        "name": session.name,
        "owner": session.owner,
        "environment": environment.base or environment.name,
        "task": (name := TaskName.of(session.task)).label,
        "task_digest": name.digest or None,
        "scorer": session.scorer or None,
        "policy": session.policy,
        "worker": session.worker,
    }


def _end(summary: Summary) -> dict[str, Any]:
    return {**asdict(summary), "faults": [fault._asdict() for fault in summary.faults]}

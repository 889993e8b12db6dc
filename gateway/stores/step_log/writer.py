"""Writes the step log of one replica: a thread stores what the request path queued, five times a second.

The request path only adds to a buffer, after the answer was sent, so no call waits for the log. A full disk, or a
disk that does not answer, costs records and never a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from gateway.core.environment import Environment, StepLogging
from gateway.core.episode import Summary
from gateway.core.json_text import dump
from gateway.core.periodic import pause
from gateway.core.ports.step_log import MESSAGE, REFERENCE, EpisodeEnd, LoggedCall, Rollout
from gateway.core.session import SECRET_MARK, EpisodeRequest, Session
from gateway.core.task_name import TaskName
from gateway.stores.step_log.database import INDEX, StepLogDatabase
from gateway.stores.step_log.encoding import EMBEDDED_CHARS, CallBatch, CallBuffer, CallEncoder, as_list
from gateway.stores.step_log.masking import MASKED_CHARS, forms_of, masked
from gateway.stores.step_log.segments import SegmentWriter, segments

logger = logging.getLogger(__name__)

PAUSE_S: Final = 0.2
"""Seconds between two writes."""
IDLE_PAUSE_S: Final = 1.0
QUEUED_MAX: Final = 100_000
"""Maximum number of queued calls."""
EPISODES_MAX: Final = 10_000
"""Maximum number of queued begins and ends, which hold their tasks."""
QUEUED_BYTES: Final = 128 * 2**20
"""Size of queued calls above which further calls are lost to the log."""
BATCH_MAX: Final = 2048
"""Maximum number of calls that are encoded together."""
CLEANED_S: Final = 30.0
"""Seconds between two looks for old records."""
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
        gateway: str = "",
    ) -> None:
        """
        Args:
            folder: Folder of the segments and the database, which replicas on this machine share.
            replica: Unique name of this process.
            max_bytes: Maximum size of the folder; the oldest records make room for new ones. 0: nothing is recorded.
            max_days: Age in days at which records are removed.
            secrets: Texts that must not be stored, such as API keys.
            gateway: Identity of the gateway, which its episodes get.
        """
        self._folder = folder
        self._replica = replica
        self._gateway = gateway or None
        self._max_bytes = max_bytes
        self._max_days = max_days
        own = [secret for secret in secrets if len(secret) >= MASKED_CHARS]
        self._own, self._own_in_calls = forms_of(own), forms_of(own, in_base64=False)
        """The gateway's own secrets. Workers do not get them, so calls, which are many, are not searched for base64."""
        self._of_sessions: dict[str, list[bytes]] = {}
        """Secrets of open sessions, by lease."""
        self._segments = SegmentWriter(folder, replica)
        self._calls = CallBuffer()
        self._episodes: list[dict[str, Any]] = []
        self.called: Callable[[LoggedCall], object] = self._calls.add
        self._database: StepLogDatabase | None = None
        self._thread = ThreadPoolExecutor(1, "step-log")  # starts its thread with the first write
        self._writing: asyncio.Future[None] | None = None
        self._cleaned_at = time.monotonic()
        self._complained_at = -COMPLAINT_S
        self._unstored = 0
        self.lost = 0
        """Number of records that were not stored."""

    # -- the request path -----------------------------------------------------------------------------------------

    def keeps(self, lease: str, environment: Environment) -> bool:
        """See ``StepLog.keeps``. A lease is random, so its last digits choose a sample.

        Only the replica that opened a session can know its secrets, so other replicas record none of its calls. Nor are
        calls of a session recorded that has a secret of fewer than `MASKED_CHARS` characters.
        """
        policy = environment.step_log
        if not self._max_bytes or (lease.startswith(SECRET_MARK) and lease not in self._of_sessions):
            return False
        if policy.mode is StepLogging.SAMPLED:
            return int(lease[-8:], 16) < policy.share * 2**32
        return policy.mode is StepLogging.FULL

    def opened(self, session: Session, environment: Environment, request: EpisodeRequest, *, open_s: float) -> None:
        """See ``StepLog.opened``."""
        if not self._max_bytes or environment.step_log.mode is StepLogging.OFF:
            return
        setup, now = request.setup, time.time()
        secrets = [secret for secret in setup.secrets.values() if secret]
        are_maskable = all(len(secret) >= MASKED_CHARS for secret in secrets)
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
                "gateway": self._gateway,
                "replica": self._replica,
                "episode": request.episode or None,
                "place": None if setup.index is None or not setup.split else f"{setup.split}/{setup.index}",
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
                "gateway": self._gateway,
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
        else:
            self.lost += 1

    def _drop(self, call: LoggedCall) -> None:
        self.lost += 1

    # -- the loop -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write five times a second, until cancelled. While nothing happens, look once a second."""
        while True:
            is_busy = bool(self._calls or self._episodes or self._is_writing)
            await pause(PAUSE_S if is_busy else IDLE_PAUSE_S)
            self._look()

    def _look(self) -> None:
        """Start a write unless one runs. Accept no calls while too much is queued."""
        if self._is_writing:
            is_full = len(self._calls) > QUEUED_MAX or self._calls.size() > QUEUED_BYTES
            self.called = self._drop if is_full else self._calls.add
        elif self._calls or self._episodes or self._is_cleaning_due:
            self._start_write()

    @property
    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    @property
    def _is_cleaning_due(self) -> bool:
        return self._database is not None and time.monotonic() - self._cleaned_at > CLEANED_S

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
        self._unstored = len(calls.leases) + len(calls.others) + len(rows)
        try:
            if self._database is None:
                self._database = StepLogDatabase(self._folder / INDEX)
            self._store(self._database, calls, rows)
            if self._is_cleaning_due:
                self._cleaned_at = time.monotonic()
                self._remove_old(self._database)
        except (sqlite3.Error, OSError) as error:
            self._complain(error)
        except Exception:  # one record that cannot be stored must not end the log
            logger.exception("step_log_failed")
        self.lost += self._unstored

    def _store(self, database: StepLogDatabase, calls: CallBatch, rows: list[dict[str, Any]]) -> None:
        wall = time.time() - time.monotonic()
        body = calls.body()
        if calls.leases:
            self._segments.append(set(calls.leases), masked(body, self._own_in_calls), wall=wall)
            self._unstored -= len(calls.leases)
        others = [call for call in calls.others if self._may_store(call)]
        for begin in range(0, len(others), BATCH_MAX):
            some = others[begin : begin + BATCH_MAX]
            encoder = CallEncoder(lambda _, data: database.put(data))
            body = as_list([encoder.encode(call, self._secrets_of(call[0], call[1] == MESSAGE)) for call in some])
            database.store()  # the blobs of the batch first, because the batch refers to them
            self._segments.append({call[0] for call in some}, masked(body, self._own), wall=wall)
            self._unstored -= len(some)
        if rows:
            begun = [self._written(row["rollout"]) for row in rows if "rollout" in row]
            ended = [self._written(self._with_task(database, row)) for row in rows if "rollout" not in row]
            database.store(*(b"[" + b",".join(some) + b"]" if some else b"" for some in (ended, begun)))
            self._unstored -= len(rows)
        for row in rows:
            if "closed_at" in row:
                self._of_sessions.pop(row["lease"], None)

    def _may_store(self, call: LoggedCall) -> bool:
        """Return False for a call that ended after its session if the session's secrets are not known any more."""
        return not call[0].startswith(SECRET_MARK) or call[0] in self._of_sessions

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
            begin = {**begin, "spec": REFERENCE + database.put(spec)}
        return {**row, "begin": begin}

    def _written(self, row: dict[str, Any]) -> bytes:
        """Return a row as JSON without secrets."""
        return masked(dump(row), (*self._own, *self._secrets_of(row.get("lease", ""), "lease" not in row)))

    def _remove_old(self, database: StepLogDatabase) -> None:
        """Remove what is too old, and the oldest records if the folder is too large."""
        before = time.time() - self._max_days * 86_400
        found = segments(self._folder)
        size = sum(segment.size for segment in found) + database.used_bytes()
        for segment in found[:-1]:
            if segment.changed_at >= before and size <= self._max_bytes:
                break
            segment.path.unlink(missing_ok=True)
            size -= segment.size
            before = max(before, segment.changed_at)
        database.remove_before(before)

    def _complain(self, error: Exception) -> None:
        now = time.monotonic()
        if now - self._complained_at >= COMPLAINT_S:
            self._complained_at = now
            logger.warning("step_log_not_written folder=%s lost=%s error=%s", self._folder, self.lost, error)


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

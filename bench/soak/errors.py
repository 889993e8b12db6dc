"""The errors of a soak: the kind of each error, the faults that explain it, and the violations."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from bench.load import steps
from bench.load.http1 import Response, StreamError, events
from bench.load.steps import Stepped, read_stream

EXAMPLES = 3
VIOLATIONS_MAX = 50


class Fault(StrEnum):
    """A kind of fault."""

    KILL_WORKER = "kill a worker"
    PAUSE_WORKER = "pause a container"
    KILL_REPLICA = "kill -9 a replica"
    TERM_REPLICA = "SIGTERM a replica"
    RESTART_REDIS = "restart Redis with its data"
    PAUSE_REDIS = "pause Redis"


WORKER = (Fault.KILL_WORKER, Fault.PAUSE_WORKER)
REPLICA = (Fault.KILL_REPLICA, Fault.TERM_REPLICA)
REDIS = (Fault.RESTART_REDIS, Fault.PAUSE_REDIS)
FULL = ("pool_exhausted", "worker_full", "capacity", "CAPACITY_REACHED")
"""Kinds of errors for a slot that did not become free in time. The load is too high at times on purpose."""
EXPLAINED_BY: Mapping[str, tuple[Fault, ...]] = {
    "worker_lost": WORKER,
    "upstream_gone": WORKER,
    "environment_lost": WORKER,
    "session_failed": WORKER,
    "timeout": (*WORKER, *REDIS),
    "start_failed": (*WORKER, *REPLICA),
    "open_failed": (*WORKER, *REPLICA),
    "upstream": WORKER,
    "store_unavailable": REDIS,
    "draining": REPLICA,
}
"""The faults that a kind of error may follow. A kind that is neither here nor in `FULL` is a violation."""
AFTER_S = 90.0
"""Seconds after a fault in which it explains errors. A hung worker shows when a call or close times out."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A request with a typed error as its answer."""

    kind: str
    text: str
    is_over: bool = False
    """True if the error ends the session."""


@dataclass(slots=True)
class Ledger:
    """The shared record of all observations."""

    steps: Counter[str] = field(default_factory=Counter)
    """Correct steps by protocol."""
    episodes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    recent: deque[tuple[Fault, float]] = field(default_factory=lambda: deque(maxlen=64))
    """Faults and the time of each start and end, by the monotonic clock."""

    def add_fault(self, fault: Fault) -> None:
        """Record the start of *fault*. Call it again at the end of the fault."""
        self.recent.append((fault, time.monotonic()))

    def add_error(self, who: str, failed: Failed) -> None:
        """Count a typed error, and check whether a fault explains it."""
        self._count(failed.kind, f"{who}: {failed.text}")
        if failed.kind in FULL:
            return
        since = time.monotonic() - AFTER_S
        happened = {fault for fault, at in self.recent if at >= since}
        if not happened.intersection(EXPLAINED_BY.get(failed.kind, ())):
            self.violate(f"{who}: {failed.kind}, which nothing explains: {failed.text}")

    def add_broken(self, who: str, error: Exception, *, is_explained: bool) -> None:
        """Count a broken connection."""
        self._count("connection", f"{who}: {error!r}")
        if not is_explained:
            self.violate(f"{who}: a connection broke although its replica was up: {error!r}")

    def violate(self, sentence: str) -> None:
        """Record a violation."""
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(sentence[:600])

    def _count(self, kind: str, example: str) -> None:
        self.errors[kind] += 1
        kept = self.examples.setdefault(kind, [])
        if len(kept) < EXAMPLES:
            kept.append(example[:300])


class Untyped(Exception):
    """An error without a type, or with a reward."""


def read_ors(response: Response) -> Stepped | Failed:
    """Return the step or the error in a call's answer.

    Raises:
        Untyped: It is an error without a type.
        WrongAnswer: It is not a step's result.
    """
    if response.status != 200:
        return read_json(response)
    try:
        last = list(events(response.body))[-1]
    except (StreamError, IndexError) as error:
        raise Untyped(f"a stream without an end: {response.body[-300:]!r}") from error
    if last.name != "error":
        return read_stream(response.body)
    if b"reward" in response.body:
        raise Untyped(f"an error with a reward: {response.body!r}")
    kind, colon, _ = last.data.partition(":")
    if not colon or " " in kind:
        raise Untyped(f"an error event without a type: {last.data!r}")
    return Failed(kind, last.data)


def read_json(response: Response) -> Failed:
    """Return the error in an HTTP answer of ORS or AReaL.

    Raises:
        Untyped: The answer has no type, or has a reward.
    """
    if b"reward" in response.body:
        raise Untyped(f"an error with a reward: {response.body!r}")
    try:
        body = json.loads(response.body)
    except ValueError as error:
        raise Untyped(f"status {response.status}: {response.body[:300]!r}") from error
    kind = next((body[name] for name in ("reason", "status", "code") if isinstance(body.get(name), str)), "")
    if not kind:
        raise Untyped(f"status {response.status}: {response.body[:300]!r}")
    if kind == "internal" and "store" in str(body.get("detail")):
        kind = "store_unavailable"  # AReaL has no own word for it
    return Failed(kind, f"{response.status} {body}", is_over=response.status in (404, 410))


def read_areal(response: Response) -> Stepped | Failed:
    """Return the step or the error in a step's answer.

    Raises:
        Untyped, WrongAnswer: See `read_ors`.
    """
    if response.status != 200:
        return read_json(response)
    return steps.read_areal(json.loads(response.body))


def read_frame(payload: bytes) -> dict[str, object] | Failed:
    """Return the data or the error in a frame of OpenEnv.

    Raises:
        Untyped: It is an error without a type.
    """
    reply = json.loads(payload)
    if reply["type"] != "error":
        data: dict[str, object] = reply["data"]
        return data
    data = reply["data"]
    kind = data.get("reason") or data.get("code")
    if not isinstance(kind, str) or "reward" in data:
        raise Untyped(f"{reply!r}"[:300])
    if kind not in FULL and kind not in EXPLAINED_BY and "store" in str(data.get("message")):
        kind = "store_unavailable"
    return Failed(kind, f"{data}", is_over=data.get("code") == "SESSION_ERROR")

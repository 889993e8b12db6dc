"""What went wrong in a soak: each error's kind, whether a fault explains it, and what must never be."""

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
    """What is broken."""

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
"""No slot became free in time: the load is meant to be too much at times."""
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
"""Which faults a kind of error may follow; a kind that is not here, nor of a full pool, must never be."""
AFTER_S = 90.0
"""How long after a fault: a worker that hangs is noticed when a call to it, or its close, has run out of time."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that was answered with a typed error."""

    kind: str
    text: str
    is_over: bool = False
    """Whether its session is over."""


@dataclass(slots=True)
class Ledger:
    """What was seen, by everybody."""

    steps: Counter[str] = field(default_factory=Counter)
    """Right steps by protocol."""
    episodes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    recent: deque[tuple[Fault, float]] = field(default_factory=lambda: deque(maxlen=64))
    """Faults and when each ended, by the monotonic clock."""

    def add_fault(self, fault: Fault) -> None:
        """Note that *fault* was made; call it again when it is over."""
        self.recent.append((fault, time.monotonic()))

    def add_error(self, who: str, failed: Failed) -> None:
        """Count a typed error, and see whether a fault explains it."""
        self._count(failed.kind, f"{who}: {failed.text}")
        if failed.kind in FULL:
            return
        since = time.monotonic() - AFTER_S
        happened = {fault for fault, at in self.recent if at >= since}
        if not happened.intersection(EXPLAINED_BY.get(failed.kind, ())):
            self.violate(f"{who}: {failed.kind}, which nothing explains: {failed.text}")

    def add_broken(self, who: str, error: Exception, *, is_explained: bool) -> None:
        """Count a connection that broke."""
        self._count("connection", f"{who}: {error!r}")
        if not is_explained:
            self.violate(f"{who}: a connection broke although its replica was up: {error!r}")

    def violate(self, sentence: str) -> None:
        """Note what must never be."""
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(sentence[:600])

    def _count(self, kind: str, example: str) -> None:
        self.errors[kind] += 1
        kept = self.examples.setdefault(kind, [])
        if len(kept) < EXAMPLES:
            kept.append(example[:300])


class Untyped(Exception):
    """An error that does not say what it is, or bears a reward."""


def read_ors(response: Response) -> Stepped | Failed:
    """What a call's answer says.

    Raises:
        Untyped: it is an error without a type.
        WrongAnswer: it is no step's result.
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
    """What an error over HTTP says, of ORS or AReaL.

    Raises:
        Untyped: nothing, or a reward.
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
        kind = "store_unavailable"  # AReaL has no word of its own for it
    return Failed(kind, f"{response.status} {body}", is_over=response.status in (404, 410))


def read_areal(response: Response) -> Stepped | Failed:
    """What a step's answer says.

    Raises:
        Untyped, WrongAnswer: as `read_ors`.
    """
    if response.status != 200:
        return read_json(response)
    return steps.read_areal(json.loads(response.body))


def read_frame(payload: bytes) -> dict[str, object] | Failed:
    """What a frame of OpenEnv says: its data, or an error.

    Raises:
        Untyped: it is an error without a type.
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

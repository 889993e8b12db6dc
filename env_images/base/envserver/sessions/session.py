"""A session, its calls and their order. ``sessions`` and ``calls`` act on them."""

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from envserver.environment import Environment, Task
from envserver.errors import UNTOLD_MAX, Refused, SessionFault, fault_of, written
from envserver.execution.runner import Place
from envserver.http.bodies import Action, Create
from envserver.schema.environment_types import Kind
from envserver.sessions.outcomes import Outcome, Turn
from envserver.tools import Mode, Tool

SETUP_WAIT_S = 25.0
"""Seconds that a request waits for a session's setup, as in the reference server. Its client retries for ten
minutes."""
State: TypeAlias = Literal["starting", "ready", "failed", "closed"]


class Signal:
    """An event that occurs once. Waiting for it needs a timeout but no task."""

    __slots__ = ("_waiters", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiters: list[asyncio.Future[None]] = []

    def set(self) -> None:
        """Mark the event as occurred and wake all waiters."""
        self.is_set = True
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            _wake(waiter)

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the event. Return False if *timeout_s* passed first."""
        if self.is_set:
            return True
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        timer = waiter.get_loop().call_later(timeout_s, _wake, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            if not self.is_set:
                self._waiters.remove(waiter)
        return self.is_set


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """An action in a session, with its outcome."""

    session: "Session"
    action: Action
    task_id: str
    """32 hexadecimal characters."""
    key: str | None = None
    mode: Mode = "serial"
    state: Literal["waiting", "running", "ended"] = "waiting"
    ended: Signal = field(default_factory=Signal)
    outcome: Outcome | None = None
    refusal: Refused | None = None
    """Set instead of an outcome: the reason why the call never ran."""
    listeners: int = 0
    """Number of requests that wait for the outcome."""
    turn: Turn = 0
    was_delivered: bool = False
    ends_at: float = math.inf
    """The end of the step by ``time.monotonic``, for tools with a limit of their own; infinite: the client set none."""

    def end(self, outcome: Outcome | None, refusal: Refused | None = None) -> None:
        """End the call with exactly one of *outcome* and *refusal*."""
        self.outcome = outcome
        self.refusal = refusal
        self.state = "ended"
        self.ended.set()


class Turns:
    """The order of a session's calls.

    A serial call runs while no other serial call does. A concurrent call runs next to them, and an exclusive call runs
    alone. No call overtakes a waiting exclusive call.
    """

    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Call] = []
        self.running: list[Call] = []

    def leave(self, call: Call) -> None:
        """Remove *call*, whether it waits or runs."""
        (self.running if call in self.running else self.waiting).remove(call)

    def drain(self) -> list[Call]:
        """Remove and return all waiting calls."""
        drained, self.waiting = self.waiting, []
        return drained

    def next(self) -> Call | None:
        """Move the first call that may run from the waiting to the running calls, and return it."""
        modes = {call.mode for call in self.running}
        if "exclusive" in modes:
            return None
        for i, call in enumerate(self.waiting):
            if call.mode == "exclusive" and (i or self.running):
                return None
            if call.mode == "serial" and "serial" in modes:
                continue
            self.running.append(self.waiting.pop(i))
            return call
        return None


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Session:
    """One episode."""

    sid: str
    kind: Kind
    create: Create
    """The request that created the session. No traceback may show the values of its secrets."""
    serial: int
    """Serial number of the session. Unlike the id, it is never reused."""
    seed: int
    note: str
    """Text for the list of sessions, from the session's creator."""
    place: Place = field(init=False)
    # The episode.
    task: Task | None = None
    environment: Environment | None = None
    prompt_json: bytes = b""
    messages_json: bytes = b""
    task_tools: Mapping[str, Tool] = field(default_factory=dict)
    task_tools_json: bytes = field(init=False)
    steps: int = 0
    """Number of tools that ran, whether they returned or raised."""
    turns_taken: int = 0
    """Number of calls with an outcome reported as a turn, including calls that ran no tool."""
    reward: float = 0.0
    """Sum of all rewards."""
    is_rewarded: bool = False
    """Whether any tool returned a reward, even 0."""
    finished: bool = False
    fault: SessionFault | None = None
    """Fault that ended the setup or the last call, unless the agent caused it. With a fault the session has no
    reward."""
    unexpected: str = ""
    """The first unexpected exception of a tool, with its line, as ``KeyError: 'x' (server.py, line
    3)``. The episode went on, but its rewards are not only the agent's doing. Empty: there was none."""
    untold: list[SessionFault] = field(default_factory=list)
    """Faults not reported in any answer yet, the newest `UNTOLD_MAX`."""
    # The lifecycle.
    state: State = "starting"
    failure: str = ""
    """Reason of the failure, such as ``RuntimeError: message``."""
    opened: Signal = field(default_factory=Signal)
    """Set once the environment exists, or never will. In that case *open_refusal* holds the reason."""
    open_refusal: Refused | None = None
    settled: Signal = field(default_factory=Signal)
    """Set once the state is no longer ``starting``."""
    setup: asyncio.Task[None] | None = None
    teardown: asyncio.Task[None] | None = None
    is_torn_down: bool = False
    created_at: float
    used_at: float = field(init=False)
    """Time when the last request or call ended."""
    requests: int = 0
    """Number of requests that are being answered."""
    # The calls.
    calls: dict[str, Call] = field(default_factory=dict)
    """Waiting and running calls by task id."""
    turns: Turns = field(default_factory=Turns)
    """Order of the calls. All calls wait here until the setup has ended."""
    cut: dict[str, int] = field(default_factory=dict)
    """Started calls whose every stream was cut before its end: task ids with the digests of their actions."""
    is_advancing: bool = False

    def __post_init__(self) -> None:
        self.place = Place(self.kind.place if self.kind.shares_lane else None)
        self.task_tools_json = self.kind.tools_json
        self.used_at = self.created_at

    @property
    def is_busy(self) -> bool:
        """Whether a request or a call is in progress."""
        return bool(self.requests or self.calls)

    @property
    def is_over(self) -> bool:
        """Whether no code of the session runs or ever will."""
        return self.is_torn_down and not self.calls

    def settle(self, state: State) -> None:
        """Set *state* and wake the requests that wait for the end of the setup."""
        self.state = state
        self.settled.set()

    def check(self) -> None:
        """
        Raises:
            Refused: 500: The session has failed. 410: The session was deleted.
        """
        if self.state == "failed":
            raise self.refusal()
        if self.state == "closed":
            raise deleted()

    def refusal(self) -> Refused:
        """Return the refusal of a failed session, with the reason and the party at fault."""
        kind = {"X-Session-Fault": self.fault.kind} if self.fault is not None else {}
        return Refused(500, self.failure, {**kind, **self.fault_headers()})

    def note_fault(self, error: BaseException, place: str) -> SessionFault:
        """Keep *error*, raised by the hook *place*, until it is reported.

        It stays the session's fault until a later call yields a result.
        """
        self.fault = fault_of(error, place, secrets=(self.create.secrets or {}).values())
        self.untold.append(self.fault)
        del self.untold[:-UNTOLD_MAX]
        return self.fault

    def tell_faults(self) -> list[SessionFault]:
        """Return the unreported faults if the creator requested them, and mark them as reported."""
        if not self.create.tells_faults:
            return []
        untold, self.untold = self.untold, []
        return untold

    def fault_headers(self) -> dict[str, str]:
        """Return the header with the faults that were not reported yet."""
        faults = self.tell_faults()
        return {"X-Session-Faults": written(faults)} if faults else {}

    def result_headers(self, now: float) -> dict[str, str]:
        """Return the header with the summary of an episode that the environment has ended, for the session's creator.

        The creator then knows the result, even if this server dies before the session is deleted.
        """
        if not self.finished or not self.create.tells_faults:
            return {}
        return {"X-Session-Result": json.dumps(self.summary(now), separators=(",", ":"))}

    def summary(self, now: float) -> dict[str, Any]:
        """Return the episode's summary. ``seconds`` counts from the session's creation."""
        told: dict[str, Any] = {
            "reward": self.reward,
            "rewarded": self.is_rewarded,
            "judged": self.kind.scores_groups,
            "finished": self.finished,
            "steps": self.steps,
            "seconds": round(now - self.created_at, 3),
        }
        if self.fault is not None:
            told["fault"] = self.fault.kind
        if self.unexpected and self.create.tells_faults:
            told["unexpected"] = self.unexpected
        return told

    def row(self, now: float) -> dict[str, Any]:
        """Return the session's entry in a list of sessions."""
        return {
            "sid": self.sid,
            "env_name": self.kind.name,
            "task_id": self.task.id if self.task is not None else None,
            "state": self.state,
            "busy": self.is_busy,
            "steps": self.steps,
            "idle_s": 0.0 if self.is_busy else round(now - self.used_at, 3),
            "note": self.note,
        }


def deleted() -> Refused:
    return Refused(410, "Session deleted")


def starting() -> Refused:
    return Refused(503, "Environment still starting.", {"X-Backend-State": "starting", "Retry-After": "2"})

"""One session, its calls and their order; ``sessions`` and ``calls`` act on them."""

import asyncio
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
"""How long a request waits for a session's setup, as in the reference server; its client asks again for ten minutes."""
State: TypeAlias = Literal["starting", "ready", "failed", "closed"]


class Signal:
    """Something that happens once, and can be waited for with a time-out and without a task."""

    __slots__ = ("_waiters", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiters: list[asyncio.Future[None]] = []

    def set(self) -> None:
        """Let it have happened; all who wait go on."""
        self.is_set = True
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            _wake(waiter)

    async def wait(self, timeout_s: float) -> bool:
        """Wait for it; False where *timeout_s* passed first."""
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


@dataclass(slots=True, eq=False)
class Call:
    """One action in a session and what became of it."""

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
    """Instead of an outcome: the call never ran, for this reason."""
    listeners: int = 0
    """Requests that wait for the outcome."""
    turn: Turn = 0
    is_turn: bool = False
    """Whether it takes the next turn as it ends: somebody asked for it in JSON."""
    was_delivered: bool = False

    def __repr__(self) -> str:
        return f"<Call {self.task_id} {self.state}, {self.listeners} listeners>"

    def end(self, outcome: Outcome | None, refusal: Refused | None = None) -> None:
        """Set what became of the call; exactly one of the two is given."""
        self.outcome = outcome
        self.refusal = refusal
        self.state = "ended"
        self.ended.set()


class Turns:
    """The order of a session's calls.

    A serial call runs while no other serial call does. A concurrent call runs beside them, and an exclusive call runs
    alone. No call overtakes a waiting exclusive call.
    """

    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Call] = []
        self.running: list[Call] = []

    def __repr__(self) -> str:
        return f"<Turns {len(self.running)} running, {len(self.waiting)} waiting>"

    def leave(self, call: Call) -> None:
        """Take *call* out, whether it waits or runs."""
        (self.running if call in self.running else self.waiting).remove(call)

    def drain(self) -> list[Call]:
        """Take out all waiting calls."""
        drained, self.waiting = self.waiting, []
        return drained

    def next(self) -> Call | None:
        """Move the first call whose turn has come from the waiting to the running calls, and return it."""
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


@dataclass(slots=True, eq=False, kw_only=True)
class Session:
    """One episode."""

    sid: str
    kind: Kind
    create: Create
    """The request that created it; no traceback may show the values of its secrets."""
    serial: int
    """Unlike the id never used again."""
    seed: int
    note: str
    """What the creator wants to read in the list of sessions."""
    place: Place = field(init=False)
    # The episode.
    task: Task | None = None
    environment: Environment | None = None
    prompt_json: bytes = b""
    messages_json: bytes = b""
    task_tools: Mapping[str, Tool] = field(default_factory=dict)
    task_tools_json: bytes = field(init=False)
    steps: int = 0
    """Tools that ran, whether they returned or raised."""
    turns_taken: int = 0
    """Calls whose outcome was told as a turn, those too that no tool was run for."""
    reward: float = 0.0
    """Sum of the rewards given."""
    is_rewarded: bool = False
    """Whether any was given, be it 0."""
    finished: bool = False
    fault: SessionFault | None = None
    """What its setup or its last call ended with, if that was not the agent's doing: then it has no reward."""
    untold: list[SessionFault] = field(default_factory=list)
    """Faults that no answer has told yet, the newest `UNTOLD_MAX`."""
    # Its life.
    state: State = "starting"
    failure: str = ""
    """Why it failed, as ``RuntimeError: message``."""
    opened: Signal = field(default_factory=Signal)
    """The environment exists, or will never: then *open_refusal* says why."""
    open_refusal: Refused | None = None
    settled: Signal = field(default_factory=Signal)
    """The state is no longer ``starting``."""
    setup: asyncio.Task[None] | None = None
    teardown: asyncio.Task[None] | None = None
    is_torn_down: bool = False
    created_at: float
    used_at: float = field(init=False)
    """When the last request or call ended."""
    requests: int = 0
    """Requests that are being answered."""
    # Its calls.
    calls: dict[str, Call] = field(default_factory=dict)
    """Waiting and running, by task id."""
    turns: Turns = field(default_factory=Turns)
    """All calls wait here until the setup has ended."""
    cut: dict[str, int] = field(default_factory=dict)
    """Task ids of begun calls whose every stream was cut before its end, and the digests of their actions."""
    is_advancing: bool = False

    def __post_init__(self) -> None:
        self.place = Place(self.kind.place if self.kind.shares_lane else None)
        self.task_tools_json = self.kind.tools_json
        self.used_at = self.created_at

    def __repr__(self) -> str:
        return f"<Session {self.sid} of {self.kind.name}: {self.state}, {self.turns!r}>"

    @property
    def is_busy(self) -> bool:
        """Whether a request or a call is under way."""
        return bool(self.requests or self.calls)

    @property
    def is_over(self) -> bool:
        """Whether no code of it runs, and none ever will."""
        return self.is_torn_down and not self.calls

    def settle(self, state: State) -> None:
        """Leave ``starting``, or close."""
        self.state = state
        self.settled.set()

    def check(self) -> None:
        """
        Raises:
            Refused: 500 where the session has failed, 410 where it was deleted meanwhile.
        """
        if self.state == "failed":
            raise self.refusal()
        if self.state == "closed":
            raise deleted()

    def refusal(self) -> Refused:
        """Say why the session, which has failed, takes no more requests, and who is at fault."""
        kind = {"X-Session-Fault": self.fault.kind} if self.fault is not None else {}
        return Refused(500, self.failure, {**kind, **self.fault_headers()})

    def note_fault(self, error: BaseException, place: str) -> SessionFault:
        """Keep *error*, which the hook *place* raised, until it is told; the session ends with it unless it goes on."""
        self.fault = fault_of(error, place, secrets=(self.create.secrets or {}).values())
        self.untold.append(self.fault)
        del self.untold[:-UNTOLD_MAX]
        return self.fault

    def tell_faults(self) -> list[SessionFault]:
        """Return the untold faults, where the creator asked for them; they count as told from now on."""
        if not self.create.tells_faults:
            return []
        untold, self.untold = self.untold, []
        return untold

    def fault_headers(self) -> dict[str, str]:
        """Give the header that tells the faults that were not told yet."""
        faults = self.tell_faults()
        return {"X-Session-Faults": written(faults)} if faults else {}

    def summary(self, now: float) -> dict[str, Any]:
        """Tell how the episode went; seconds since it was created."""
        told: dict[str, Any] = {
            "reward": self.reward,
            "rewarded": self.is_rewarded,
            "judged": self.kind.scores_groups,
            "finished": self.finished,
            "steps": self.steps,
            "seconds": round(now - self.created_at, 3),
        }
        return told | {"fault": self.fault.kind} if self.fault is not None else told

    def row(self, now: float) -> dict[str, Any]:
        """Describe the session in a list of sessions."""
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

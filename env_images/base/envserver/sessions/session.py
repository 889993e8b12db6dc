"""One session and its calls, as values; what happens to them is in ``sessions`` and ``calls``."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeAlias

from envserver.content import Json
from envserver.environment import Environment
from envserver.errors import Refused
from envserver.execution.runner import Place
from envserver.faults import UNTOLD_MAX, SessionFault, fault_of, written
from envserver.http.bodies import Action
from envserver.schema.environment_types import Kind
from envserver.sessions.call_queue import Turns
from envserver.sessions.outcomes import Outcome, Turn
from envserver.task import Task
from envserver.tools import Mode, Tool

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
            if not waiter.done():
                waiter.set_result(None)

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


class Call:
    """One action in a session and what became of it."""

    __slots__ = (
        "action",
        "ended",
        "is_turn",
        "key",
        "listeners",
        "mode",
        "outcome",
        "refusal",
        "session",
        "state",
        "task_id",
        "turn",
        "was_delivered",
    )

    def __init__(self, session: "Session", action: Action, *, task_id: str, key: str | None = None) -> None:
        self.session = session
        self.action = action
        self.task_id = task_id
        """32 hexadecimal characters."""
        self.key = key
        self.mode: Mode = "serial"
        self.state: Literal["waiting", "running", "ended"] = "waiting"
        self.ended = Signal()
        self.outcome: Outcome | None = None
        self.refusal: Refused | None = None
        """Instead of an outcome: the call never ran, for this reason."""
        self.listeners = 0
        """Requests that wait for the outcome."""
        self.turn: Turn = 0
        self.is_turn = False
        """Whether it takes the next turn as it ends: somebody asked for it in JSON."""
        self.was_delivered = False

    def __repr__(self) -> str:
        return f"<Call {self.task_id} {self.state}, {self.listeners} listeners>"

    def end(self, outcome: Outcome | None, refusal: Refused | None = None) -> None:
        """Set what became of the call; exactly one of the two is given."""
        self.outcome = outcome
        self.refusal = refusal
        self.state = "ended"
        self.ended.set()


class Session:
    """One episode."""

    __slots__ = (
        "calls",
        "config",
        "created_at",
        "cut",
        "digest",
        "early",
        "environment",
        "failure",
        "fault",
        "finished",
        "is_advancing",
        "is_rewarded",
        "is_torn_down",
        "kind",
        "lease",
        "messages_json",
        "note",
        "open_refusal",
        "opened",
        "place",
        "prompt_json",
        "requests",
        "reward",
        "secrets",
        "seed",
        "serial",
        "settled",
        "setup",
        "sid",
        "state",
        "steps",
        "task",
        "task_tools",
        "task_tools_json",
        "teardown",
        "tells_faults",
        "turns",
        "turns_taken",
        "untold",
        "used_at",
    )

    def __init__(
        self, sid: str, kind: Kind, *, serial: int, digest: int, seed: int, config: Json | None, now: float
    ) -> None:
        self.sid = sid
        self.kind = kind
        self.serial = serial
        """Unlike the id never used again."""
        self.digest = digest
        """Of the request that created it."""
        self.seed = seed
        self.config: Json = config or {}
        self.place = Place(kind.place if kind.shares_lane else None)
        self.lease = ""
        """Which of its id's sessions this one is, as who created it says: who ends another one does not mean this."""
        self.note = ""
        """What who created it wants to read again in the list of sessions, which outlives the memory of who asks."""
        self.tells_faults = False
        """Whether who created it is told what went wrong in the author's code, with the traceback."""
        self.secrets: Collection[str] = ()
        """Values that no traceback may show."""
        # The episode.
        self.task: Task | None = None
        self.environment: Environment | None = None
        self.prompt_json = b""
        self.messages_json = b""
        self.task_tools: Mapping[str, Tool] = {}
        self.task_tools_json = kind.tools_json
        self.steps = 0
        """Tools that ran, whether they returned or raised."""
        self.turns_taken = 0
        """Calls whose outcome was told as a turn, those too that no tool was run for."""
        self.reward = 0.0
        """Sum of the rewards given."""
        self.is_rewarded = False
        """Whether any was given, be it 0."""
        self.finished = False
        self.fault: SessionFault | None = None
        """What its setup or its last call ended with, if that was not the agent's doing: then it has no reward."""
        self.untold: list[SessionFault] = []
        """Faults that no answer has told yet, the newest `UNTOLD_MAX`."""
        # Its life.
        self.state: State = "starting"
        self.failure = ""
        """Why it failed, as ``RuntimeError: message``."""
        self.opened = Signal()
        """The environment exists, or will never: then *open_refusal* says why."""
        self.open_refusal: Refused | None = None
        self.settled = Signal()
        """The state is no longer ``starting``."""
        self.setup: asyncio.Task[None] | None = None
        self.teardown: asyncio.Task[None] | None = None
        self.is_torn_down = False
        self.created_at = now
        self.used_at = now
        """When the last request or call ended."""
        self.requests = 0
        """Requests that are being answered."""
        # Its calls.
        self.calls: dict[str, Call] = {}
        """Waiting and running, by task id."""
        self.early: list[Call] = []
        """Of these the ones that wait for the setup."""
        self.turns: Turns[Call] = Turns()
        self.cut: dict[str, int] = {}
        """Task ids of begun calls whose every stream was cut before its end, and the digests of their actions."""
        self.is_advancing = False

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
        self.fault = fault_of(error, place, secrets=self.secrets)
        self.untold.append(self.fault)
        del self.untold[:-UNTOLD_MAX]
        return self.fault

    def fault_headers(self) -> dict[str, str]:
        """Give the header that tells the faults that were not told yet; they count as told from now on."""
        if not self.untold or not self.tells_faults:
            return {}
        untold, self.untold = self.untold, []
        return {"X-Session-Faults": written(untold)}

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

"""A working third-party image in memory, for any protocol: a counter that must reach its task's target.

It records its requests, and writes its frames with a spacing that no other program uses.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.core.environment import Environment, Split, SplitType, TaskSpec
from gateway.core.episode import Action, Block, StepResult, Summary, TextBlock
from gateway.core.errors import InvalidRequest, SessionNotFound, UnknownSplit, UpstreamGone
from gateway.core.ids import SessionId, WorkerId
from gateway.core.session import Session, SessionSetup
from gateway.core.worker import Worker, WorkerSession, WorkerTasks
from gateway.upstreams.ors_facade import OrsFacade


@dataclass(slots=True)
class Play:
    """One episode."""

    setup: SessionSetup
    value: int = 0
    finished: bool = False

    @property
    def target(self) -> int:
        """The value that the counter must reach."""
        return int(self.setup.spec.get("target", 2))


class CounterImage(OrsFacade):
    """All workers of one third-party environment."""

    def __init__(self, splits: Mapping[str, Sequence[TaskSpec]] | None = None, *, has_frames: bool = True) -> None:
        """Make the image. With *has_frames* False it is an old OpenEnv server, which has no ``mcp`` frames."""
        super().__init__()
        self.kept = dict(splits or {})
        self.told: dict[str, Any] = {}
        """The image's description of itself, as `about` returns it."""
        self.asked: Counter[str] = Counter()
        """Number of queries by kind."""
        self.setups: list[SessionSetup] = []
        """Setups of the started episodes."""
        self.frames: list[bytes] = []
        """Received frames, including the empty frame that requests the reply of a reset."""
        self.replies: list[bytes] = []
        """The replies to `frames`."""
        self.stuck = asyncio.Event()
        """Event that is set once a step hangs or waits."""
        self.opened = asyncio.Event()
        """Event that releases waiting steps."""
        self.gate = asyncio.Event()
        """Event that releases openings whose task has ``on_open: gate``. Queries are answered meanwhile."""
        self.asleep: dict[WorkerId, asyncio.Event] = {}
        """Workers that accept requests but answer none until their event is set, like stopped processes."""
        self.opened_in: list[WorkerId] = []
        """The worker of each started episode."""
        self._has_frames = has_frames
        self._plays: dict[SessionId, Play] = {}

    # -- the worker -----------------------------------------------------------------------------------------------

    async def ready(self, worker: Worker, environment: Environment) -> int:
        """See ``Upstream.ready``."""
        return 0

    async def alive(self, worker: Worker, environment: Environment, *, busy_counts: bool = True) -> None:
        """See ``Upstream.alive``."""
        self.asked["alive"] += 1
        await self._awake(worker.id)

    async def tools(self, worker: Worker, environment: Environment) -> bytes:
        """See ``Upstream.tools``."""
        self.asked["tools"] += 1
        return json.dumps({"tools": [{"name": "move", "description": "Counts", "input_schema": None}]}).encode()

    async def registered(self, worker: Worker, environment: Environment) -> WorkerTasks:
        """See ``Upstream.registered``."""
        self.asked["registered"] += 1
        return WorkerTasks()

    async def splits(self, worker: Worker, environment: Environment) -> list[Split]:
        """See ``Upstream.splits``."""
        self.asked["splits"] += 1
        return [Split(name, SplitType.TRAIN) for name in self.kept]

    async def count(self, worker: Worker, environment: Environment, split: str) -> int:
        """See ``Upstream.count``."""
        self.asked["count"] += 1
        return len(self._split(split))

    async def tasks(
        self, worker: Worker, environment: Environment, split: str, start: int, stop: int
    ) -> list[TaskSpec]:
        """See ``Upstream.tasks``."""
        self.asked["tasks"] += 1
        return list(self._split(split)[start:stop])

    async def about(self, worker: Worker, environment: Environment) -> Mapping[str, Any]:
        """See ``Upstream.about``."""
        self.asked["about"] += 1
        return self.told

    async def _awake(self, worker: WorkerId) -> None:
        if (awake := self.asleep.get(worker)) is not None:
            await awake.wait()

    def _split(self, name: str) -> Sequence[TaskSpec]:
        if name not in self.kept:
            raise UnknownSplit("Invalid split")
        return self.kept[name]

    # -- an episode -----------------------------------------------------------------------------------------------

    async def open(self, session: Session, environment: Environment, setup: SessionSetup) -> Session:
        """See ``Upstream.open``. Refuses the sample ``nosuch``."""
        if setup.spec.get("sample_id") == "nosuch":
            raise InvalidRequest("sample not found: nosuch")
        await self._awake(session.worker)
        if setup.spec.get("on_open") == "gate":
            await self.gate.wait()
        self.opened_in.append(session.worker)
        self.setups.append(setup)
        self._plays[session.id] = Play(setup)
        self.tallies.begin(session)
        return replace(session, handle="handle")

    async def close(self, session: Session, environment: Environment, *, keeps: bool = False) -> Summary | None:
        """See ``Upstream.close``."""
        await self._awake(session.worker)
        self._plays.pop(session.id, None)
        summary = await self.tallies.summary(session)
        self.forget(session)
        return summary

    async def sessions(
        self, worker: Worker, environment: Environment, ids: Collection[SessionId] | None = None
    ) -> list[WorkerSession] | None:
        """See ``Upstream.sessions``."""
        return None

    async def prompt(self, session: Session, environment: Environment) -> list[Block]:
        """See ``Upstream.prompt``."""
        return [TextBlock(f"Reach {self._play(session).target}.")]

    async def step(self, session: Session, environment: Environment, action: Action, *, key: str | None) -> StepResult:
        """See ``OrsFacade.step``."""
        words = action.fields or action.arguments
        return await self._move(session, str(action.text or words.get("op")))

    async def pass_frame(self, session: Session, environment: Environment, message: bytes) -> bytes:
        """See ``FrameUpstream.pass_frame``."""
        play = self._play(session)
        self.frames.append(message)
        reply = await self._reply(session, play, json.loads(message) if message else {"type": "reset"})
        self.replies.append(reply)
        return reply

    async def _reply(self, session: Session, play: Play, frame: Mapping[str, Any]) -> bytes:
        match frame["type"]:
            case "reset":
                return _frame("observation", {"observation": {"text": f"Reach {play.target}."}, "done": False})
            case "state":
                return _frame("state", {"step_count": play.value, "own": "state"})
            case "mcp" if self._has_frames:
                return _frame("mcp", _rpc(frame["data"]))
            case "mcp":
                return _frame("error", {"message": "Unknown message type: mcp", "code": "UNKNOWN_TYPE"})
        if frame["data"].get("op") == "boom":
            return _frame("error", {"message": "boom from env", "code": "EXECUTION_ERROR"})
        result = await self._move(session, str(frame["data"].get("op")))
        seen = {"observation": {"value": play.value}, "reward": result.reward, "done": result.finished}
        return _frame("observation", seen)

    async def _move(self, session: Session, op: str) -> StepResult:
        play = self._play(session)
        match op:
            case "gone":
                del self._plays[session.id]
                raise UpstreamGone("the connection to the worker broke", sent=True)
            case "hang":
                self.stuck.set()
                await asyncio.get_running_loop().create_future()
            case "wait":
                self.stuck.set()
                await self.opened.wait()
                return StepResult(blocks=(TextBlock("waited"),))
            case "inc":
                play.value += 1
            case _:
                return StepResult(error=f"no such move: {op}", reason="input_validation")
        play.finished = play.value >= play.target
        return StepResult(
            blocks=(TextBlock(str(play.value)),), reward=float(play.finished), finished=play.finished, data=None
        )

    def _play(self, session: Session) -> Play:
        if session.id not in self._plays:
            raise SessionNotFound(session.name)
        return self._plays[session.id]


def _frame(kind: str, data: Mapping[str, Any]) -> bytes:
    """Return a frame with spaces where no other program writes them."""
    return f'{{ "data" :{json.dumps(data, ensure_ascii=False)}  , "type":"{kind}", "née": 1}}'.encode()


def _rpc(request: Mapping[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"jsonrpc": "2.0", "id": request.get("id")}
    match request["method"], request.get("params", {}).get("name"):
        case "tools/list", _:
            return {**answer, "result": {"tools": [{"name": "own", "inputSchema": {}}]}}
        case "tools/call", "own":
            return {**answer, "result": {"data": request["params"]["arguments"], "is_error": False}}
        case _, name:
            return {**answer, "error": {"code": -32603, "message": f"Unknown tool: {name!r}", "data": None}}

"""Environments for the tests; the names of their tools say what they do."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from envserver import (
    Environment,
    GroupCandidate,
    GroupScore,
    ImageBlock,
    Message,
    Prompt,
    Split,
    StepResult,
    Task,
    TextBlock,
    ToolCall,
    tool,
)

from tests.deadlines import HANG_S


class Gates:
    """Doors that tests open by name, and a count of arrivals at each door."""

    def __init__(self) -> None:
        self._doors: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self.came: Counter[str] = Counter()

    def door(self, name: str) -> threading.Event:
        with self._lock:
            return self._doors.setdefault(name, threading.Event())

    def open(self, name: str) -> None:
        self.door(name).set()

    def note(self, name: str) -> None:
        with self._lock:
            self.came[name] += 1
        self.door(f"{name} came").set()

    def pass_through(self, name: str) -> None:
        """Arrive at a door and wait until it is open."""
        self.note(name)
        assert self.door(name).wait(HANG_S), f"nobody opened {name}"

    async def until_came(self, name: str) -> None:
        """Wait until a caller arrives at a door or is noted."""
        assert await asyncio.to_thread(self.door(f"{name} came").wait, HANG_S), f"nobody came to {name}"


GATES = Gates()
TASKS: list[Mapping[str, Any]] = [{"id": f"t{i}", "question": f"q{i}"} for i in range(5)]


class MathEnv(Environment):
    """The default environment of most tests."""

    resolves_ids = False

    @classmethod
    def splits(cls) -> list[Split | str]:
        return ["train", "test", "gpu", Split("extra", "train")]

    @classmethod
    def tasks(cls, split: str) -> Sequence[Mapping[str, Any]]:
        return TASKS if split == "train" else TASKS[:2]

    async def reset(self, task: Task, *, seed: int) -> Prompt:
        if gate := task.get("gate"):
            await asyncio.to_thread(GATES.pass_through, gate)
        if error := task.get("error"):
            raise RuntimeError(error)
        self.client_state = task.get("state", {})
        return [TextBlock(task.get("question", "?"), {"seed": seed})]

    def task_tools(self, task: Task) -> list[Callable[..., Any]]:
        return [getattr(self, name) for name in task.get("tools", ())]

    def close(self) -> None:
        GATES.note(f"closed {self.task.get('id')}")

    @tool
    async def submit(self, answer: Annotated[str, "The answer."]) -> StepResult:
        """Answer the question."""
        return StepResult("noted", reward=float(answer == "4"), finished=True)

    @tool
    async def think(self) -> StepResult:
        """Think."""
        return StepResult([TextBlock("think", {"k": 1})], reward=0.1)

    @tool(inline=True)
    def quick(self, n: int = 1) -> StepResult:
        GATES.note(f"quick {self.task.id}")
        return StepResult("x" * n, reward=0, metadata={"nan": float("nan"), "é": "ü"})

    @tool(inline=True)
    async def quick_async(self) -> StepResult:
        await asyncio.sleep(0)
        return StepResult("quick")

    @tool
    def wait(self, gate: str) -> StepResult:
        """Wait in plain code, blocking its thread."""
        GATES.pass_through(gate)
        return StepResult(gate)

    @tool
    async def wait_badly(self, gate: str) -> StepResult:
        """Wait in asynchronous code, blocking its loop."""
        GATES.pass_through(gate)
        return StepResult(gate)

    @tool(concurrent=True)
    async def wait_beside(self, gate: str, finish: bool = False) -> StepResult:
        await asyncio.to_thread(GATES.pass_through, gate)
        return StepResult(gate, finished=finish)

    @tool(exclusive=True)
    async def wait_alone(self, gate: str) -> StepResult:
        await asyncio.to_thread(GATES.pass_through, gate)
        return StepResult(gate)

    @tool
    async def text(self, text: str) -> StepResult:
        return StepResult(text)

    @tool
    async def picture(self) -> StepResult:
        return StepResult(ImageBlock("AAAA", "image/png"), metadata={"w": 1}, data={"pixels": [0, 1]})

    @tool
    async def fail(self, text: str) -> StepResult:
        raise RuntimeError(text)

    @tool(inline=True)
    def leave(self) -> StepResult:
        raise SystemExit("over")

    @tool
    async def leave_lane(self) -> StepResult:
        raise SystemExit("over")

    @tool
    async def bad(self) -> StepResult:
        return "text"  # type: ignore[return-value]  # the test needs the mistake

    @tool
    async def whoami(self) -> StepResult:
        return StepResult("me", data={"secrets": dict(self.secrets), "seed": self.seed, "config": dict(self.config)})

    @tool(terminal=True)
    async def done(self, message: str) -> StepResult:
        """Take the final message."""
        return StepResult(message, reward=1.0, finished=True)

    @tool(listed=False)
    async def hint(self, level: Literal["low", "high"] = "low") -> StepResult:
        """Give a hint."""
        return StepResult(level)

    def think_again(self) -> StepResult:
        return StepResult("again")


class CounterEnv(Environment):
    """Index only, with one tool, group scores and a conversation."""

    @classmethod
    def splits(cls) -> list[str]:
        return ["train"]

    @classmethod
    async def num_tasks(cls, split: str) -> int:
        return 10

    @classmethod
    async def get_task(cls, split: str, index: int) -> dict[str, Any]:
        return {"start": index}

    def messages(self) -> list[Message]:
        return [Message("system", [TextBlock("Count.")]), Message("user", [TextBlock("Go.")])]

    @tool
    def add(self, amount: int) -> StepResult:
        return StepResult(str(self.task["start"] + amount))

    async def score_group(self, candidates: Sequence[GroupCandidate]) -> list[GroupScore | float]:
        if candidates[0].metadata == {"broken": True}:
            return []
        return [float(len(candidate.messages)) for candidate in candidates]


class Talker(Environment):
    """Understands free text in its own way."""

    default_tool = "say"

    def reset(self, task: Task, *, seed: int) -> str:
        return "Say something."

    @tool
    def say(self, text: str, loud: bool = False) -> StepResult:
        return StepResult(text.upper() if loud else text)

    @tool
    def shout(self, text: str) -> StepResult:
        return StepResult(text + "!")

    def parse_text(self, text: str) -> ToolCall | str:
        if text == "crash":
            raise ValueError("cannot parse")
        return ToolCall("shout", {"text": text[1:]}) if text.startswith("!") else "start with an exclamation mark"


class Listener(Environment):
    """Has a default tool that free text and dict actions go to."""

    def reset(self, task: Task, *, seed: int) -> str:
        return "Act."

    @tool
    def act(self, move: str, times: int = 1) -> StepResult:
        return StepResult(move * times)


class Guesser(Environment):
    """Its only tool takes a number."""

    def reset(self, task: Task, *, seed: int) -> str:
        return "Guess."

    @tool
    def guess(self, number: int) -> StepResult:
        return StepResult(f"guessed {number!r}")


class Thrower(Environment):
    """Its only tool takes one of three words."""

    def reset(self, task: Task, *, seed: int) -> str:
        return "Throw."

    @tool
    def throw(self, shape: Literal["rock", "paper", "scissors"]) -> StepResult:
        return StepResult(f"threw {shape!r}")


class Sorter(Environment):
    """Its only tool takes a list."""

    def reset(self, task: Task, *, seed: int) -> str:
        return "Sort."

    @tool
    def order(self, names: list[str]) -> StepResult:
        return StepResult(",".join(names))


class Builder(Environment):
    """Has a constructor."""

    def __init__(self) -> None:
        if gate := self.task.get("build gate"):
            GATES.pass_through(gate)
        if self.task.get("broken"):
            raise RuntimeError("no bricks")
        self.built = self.task["plan"]

    async def reset(self, task: Task, *, seed: int) -> str:
        return f"Built {self.built}."

    @tool
    async def look(self) -> StepResult:
        return StepResult(self.built)


class Sharer(Environment):
    """All sessions on one loop."""

    lanes = "shared"

    async def reset(self, task: Task, *, seed: int) -> str:
        self.loop = asyncio.get_running_loop()
        return "Share."

    @tool
    async def loop_number(self) -> StepResult:
        return StepResult(str(id(asyncio.get_running_loop())))


class Loner(Environment):
    """Each session on a loop of its own."""

    async def reset(self, task: Task, *, seed: int) -> str:
        self.lock = asyncio.Lock()
        return "Alone."

    @tool
    async def loop_number(self) -> StepResult:
        async with self.lock:
            return StepResult(str(id(asyncio.get_running_loop())))

    @tool
    async def shell(self, command: str) -> StepResult:
        process = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        return StepResult(out.decode())


class Endless(Environment):
    """Its setup never ends by itself."""

    async def reset(self, task: Task, *, seed: int) -> str:
        GATES.note("endless began")
        try:
            await asyncio.Event().wait()
        finally:
            GATES.note("endless cancelled")
        return "never"

    def close(self) -> None:
        GATES.note("endless closed")

    @tool
    def act(self) -> StepResult:
        return StepResult()

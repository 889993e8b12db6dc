"""The test environments on an official server, as the reference for the gateway's own server.

Run as ``server.py ors`` or ``server.py openreward``. It listens on a free port of the loopback, which uvicorn logs. For
an environment's author, the two packages are identical in everything that is used here.
"""

import asyncio
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

PACKAGES = {"ors": "ors", "openreward": "openreward.environments"}
TASKS = Path(__file__).parent.parent / "tasks"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

if TYPE_CHECKING:
    import ors as sdk
    from ors import ToolOutput

    beside = sdk.tool
else:
    sdk = importlib.import_module(PACKAGES[sys.argv[1]])
    ToolOutput = sdk.ToolOutput
    # One package needs a declaration for tools that run concurrently, and the other has none.
    beside = sdk.tool(concurrent=True) if sys.argv[1] == "openreward" else sdk.tool
tool = sdk.tool


class Text(BaseModel):
    text: str


class Amount(BaseModel):
    n: int


class Duration(BaseModel):
    seconds: float


class Name(BaseModel):
    name: str


class Token(BaseModel):
    token: str


class Reward(BaseModel):
    reward: float


class MaybeReward(BaseModel):
    reward: float | None


def said(text: str, **more: Any) -> ToolOutput:
    return ToolOutput(blocks=[sdk.TextBlock(text=text)], **more)


def noted(task: Any, token: str) -> int:
    with (Path(task["folder"]) / "ledger").open("a+") as ledger:
        ledger.write(token + "\n")
        ledger.seek(0)
        return ledger.read().split().count(token)


async def until_there(gate: str) -> None:
    for _ in range(3000):
        if os.path.exists(gate):  # noqa: ASYNC240  # takes microseconds
            return
        await asyncio.sleep(0.02)
    raise TimeoutError(f"nobody opened {gate}")


class FromFiles(sdk.Environment):
    """Reads its tasks from the files that the gateway also reads."""

    task_spec: Any

    def __init__(self, task_spec: Any = {}, secrets: dict[str, str] = {}) -> None:  # noqa: B006  # their signature
        super().__init__(task_spec, secrets)
        self.secrets = secrets

    @classmethod
    def list_splits(cls) -> list[str]:  # type: ignore[override]  # theirs is wrapped in a cache
        names = {path.stem for path in (TASKS / cls.name().lower()).glob("*.jsonl")}
        return [name for name in ("train", "validation", "test") if name in names]

    @classmethod
    def list_tasks(cls, split: str) -> list[Any]:
        lines = (TASKS / cls.name().lower() / f"{split}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


class Probe(FromFiles):
    def get_prompt(self) -> list[Any]:
        blocks: list[Any] = [sdk.TextBlock(text=self.task_spec.get("question", ""))]
        if self.task_spec.get("image"):
            blocks.append(sdk.ImageBlock(data=PIXEL, mimeType="image/png"))
        return blocks

    def list_task_tools(self) -> Any:
        named = self.task_spec.get("tools", ())
        tools = [sdk.ToolSpec(name=name, description="Give a hint.", input_schema=None) for name in named]
        return sdk.ListToolsOutput(tools=tools)

    @sdk.tool(shared=False)
    async def hint(self) -> ToolOutput:
        """Give a hint."""
        return said("look closer")

    @tool
    async def echo(self, params: Text) -> ToolOutput:
        """Give the text back."""
        return said(params.text)

    @tool
    async def image(self) -> ToolOutput:
        """Show one pixel."""
        return ToolOutput(blocks=[sdk.ImageBlock(data=PIXEL, mimeType="image/png", detail={"pixels": 1})])

    @tool
    async def big(self, params: Amount) -> ToolOutput:
        """Give n characters."""
        return said(("0123456789" * (params.n // 10 + 1))[: params.n])

    @tool
    async def spaces(self, params: Amount) -> ToolOutput:
        """Give n spaces."""
        return said(" " * params.n)

    @beside
    async def sleep(self, params: Duration) -> ToolOutput:
        """Take some time, awaiting."""
        await asyncio.sleep(params.seconds)
        return said("slept")

    @tool
    def block(self, params: Duration) -> ToolOutput:
        """Take some time, blocking."""
        time.sleep(params.seconds)
        return said("blocked")

    @tool
    async def fail(self) -> ToolOutput:
        """Raise an error of two lines."""
        raise RuntimeError("the first line\nthe second line")

    @tool
    async def raise_empty(self) -> ToolOutput:
        """Raise an error without a message."""
        raise RuntimeError

    @tool
    async def wrong_type(self) -> ToolOutput:
        """Return what no tool may return."""
        return "text"  # type: ignore[return-value]  # the mistake is the point

    @tool
    async def secret(self, params: Name) -> ToolOutput:
        """Tell a secret."""
        return said(self.secrets.get(params.name, ""))

    @beside
    async def count(self, params: Token) -> ToolOutput:
        """Note the token in the ledger; return how often it stands there."""
        return said(str(noted(self.task_spec, params.token)))

    @beside
    async def hold(self, params: Token) -> ToolOutput:
        """Note the token in the ledger, then wait until its gate is there."""
        times = noted(self.task_spec, params.token)
        await until_there(f"{self.task_spec['folder']}/{params.token}.gate")
        return said(str(times))

    @tool
    def hold_blocking(self, params: Token) -> ToolOutput:
        """Do as hold, but block."""
        times = noted(self.task_spec, params.token)
        asyncio.run(until_there(f"{self.task_spec['folder']}/{params.token}.gate"))
        return said(str(times))

    @tool
    async def score(self, params: MaybeReward) -> ToolOutput:
        """Give a reward, or none, and go on."""
        return said("scored", reward=params.reward)

    @tool
    async def note(self) -> ToolOutput:
        """Answer with a detail and metadata."""
        block = sdk.TextBlock(text="noted", detail={"k": 1})
        return ToolOutput(blocks=[block], metadata={"depth": {"n": [1, 2.5, None, "é"]}})

    @tool
    async def finish(self, params: Reward) -> ToolOutput:
        """End the episode."""
        return said("finished", reward=params.reward, finished=True)

    @beside
    async def pid(self) -> ToolOutput:
        """Tell the number of the process that runs this."""
        return said(str(os.getpid()))


class Counter(FromFiles):
    def setup(self) -> None:
        self.value = self.task_spec["start"]

    def get_prompt(self) -> list[Any]:
        return [sdk.TextBlock(text=f"The counter stands at {self.task_spec['start']}.")]

    @tool
    async def add(self, params: Amount) -> ToolOutput:
        """Add n and return the sum."""
        self.value += params.n
        return said(str(self.value))

    @tool
    async def stop(self) -> ToolOutput:
        """End the episode; the reward is a tenth of the sum."""
        return said(str(self.value), reward=self.value / 10, finished=True)


class SlowSetup(FromFiles):
    async def setup(self) -> None:
        await asyncio.sleep(self.task_spec.get("setup_s", 0))
        if gate := self.task_spec.get("gate"):
            await until_there(gate)
        if self.task_spec.get("error"):
            raise RuntimeError(self.task_spec["error"])

    def get_prompt(self) -> list[Any]:
        return [sdk.TextBlock(text="Ready.")]

    @tool
    async def count(self, params: Token) -> ToolOutput:
        """Note the token in the ledger."""
        noted(self.task_spec, params.token)
        return said("counted")


def judge() -> type[FromFiles]:
    """Return the environment whose features only one of the packages has."""
    package: Any = sdk

    class Judge(FromFiles):
        def get_messages(self) -> list[Any]:
            text = package.TextBlock
            call = package.ToolCallBlock(id="c1", name="look", input={"at": "it"})
            result = package.ToolResultBlock(tool_call_id="c1", blocks=[text(text="seen")])
            turns = [
                ("system", [text(text="Be brief.")]),
                ("user", [text(text=self.task_spec.get("question", ""))]),
                ("assistant", [package.ReasoningBlock(text="hm", signature="sig"), call]),
                ("user", [result]),
            ]
            return [package.Message(role=role, blocks=blocks) for role, blocks in turns]

        @package.terminal  # type: ignore[untyped-decorator]  # the other package has none
        @tool
        async def answer(self, params: Text) -> ToolOutput:
            """Take the final message."""
            length = len(params.text)
            return said(f"{length} characters", reward=1 / (1 + length), finished=True)

        @tool
        async def given(self) -> ToolOutput:
            """Tell what the trainer gave besides the task."""
            return said("nothing")

        async def score_group(self, candidates: list[Any]) -> list[Any]:
            if self.task_spec.get("strict"):
                raise RuntimeError("the judge is unwell")
            return [package.GroupScore(reward=len(each.messages), metadata=each.metadata) for each in candidates]

    return Judge


if __name__ == "__main__":
    environments: list[type[FromFiles]] = [Probe, Counter, SlowSetup]
    if sys.argv[1] == "openreward":
        environments.append(judge())
    sdk.Server(list(environments)).run(host="127.0.0.1", port=0)

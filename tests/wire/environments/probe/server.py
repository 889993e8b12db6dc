"""``probe``: one tool for each success or failure that is possible between a trainer and a tool."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

from envserver import Environment, ImageBlock, Prompt, StepResult, Task, TextBlock, serve, tool

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A PNG image of one pixel, in base64."""


def digits(n: int) -> str:
    """Return *n* characters in which each piece shows its position: 0123456789012…"""
    return ("0123456789" * (n // 10 + 1))[:n]


async def until_there(gate: str) -> None:
    """Wait, for at most a minute, until the test has put *gate* into the folder that it shares with the worker."""
    for _ in range(3000):
        if os.path.exists(gate):  # noqa: ASYNC240  # takes microseconds
            return
        await asyncio.sleep(0.02)
    raise TimeoutError(f"nobody opened {gate}")


def block_until_there(gate: str) -> None:
    """Do as `until_there`, but block."""
    asyncio.run(until_there(gate))


class Probe(Environment):
    """A task may hold ``question``, ``image`` (bool), ``tools`` (names of task tools) and ``folder``, a path."""

    name = "probe"

    async def reset(self, task: Task, *, seed: int) -> Prompt:
        blocks: list[TextBlock | ImageBlock] = [TextBlock(task.get("question", ""))]
        if task.get("image"):
            blocks.append(ImageBlock(PIXEL, "image/png"))
        return blocks

    @tool
    async def echo(self, text: str) -> StepResult:
        """Give the text back."""
        return StepResult(text)

    @tool
    async def image(self) -> StepResult:
        """Show one pixel."""
        return StepResult([ImageBlock(PIXEL, "image/png", {"pixels": 1})])

    @tool
    async def big(self, n: int) -> StepResult:
        """Give n characters."""
        return StepResult(digits(n))

    @tool
    async def spaces(self, n: int) -> StepResult:
        """Give n spaces."""
        return StepResult(" " * n)

    @tool(concurrent=True)
    async def sleep(self, seconds: float) -> StepResult:
        """Take some time, awaiting."""
        await asyncio.sleep(seconds)
        return StepResult("slept")

    @tool
    def block(self, seconds: float) -> StepResult:
        """Take some time, blocking."""
        time.sleep(seconds)
        return StepResult("blocked")

    @tool
    async def fail(self) -> StepResult:
        """Raise an error of two lines."""
        raise RuntimeError("the first line\nthe second line")

    @tool
    async def raise_empty(self) -> StepResult:
        """Raise an error without a message."""
        raise RuntimeError

    @tool
    async def wrong_type(self) -> StepResult:
        """Return what no tool may return."""
        return "text"  # type: ignore[return-value]  # the mistake is the point

    @tool
    async def secret(self, name: str) -> StepResult:
        """Tell a secret."""
        return StepResult(self.secrets.get(name, ""))

    @tool(concurrent=True)
    async def count(self, token: str) -> StepResult:
        """Note the token in the ledger; return how often it stands there."""
        return StepResult(str(self._note(token)))

    @tool(concurrent=True)
    async def hold(self, token: str) -> StepResult:
        """Note the token in the ledger, then wait until its gate is there."""
        times = self._note(token)
        await until_there(f"{self._folder}/{token}.gate")
        return StepResult(str(times))

    @tool
    def hold_blocking(self, token: str) -> StepResult:
        """Do as hold, but block."""
        times = self._note(token)
        block_until_there(f"{self._folder}/{token}.gate")
        return StepResult(str(times))

    @tool
    async def score(self, reward: float | None) -> StepResult:
        """Give a reward, or none, and go on."""
        return StepResult("scored", reward=reward)

    @tool
    async def note(self) -> StepResult:
        """Answer with a detail and metadata."""
        return StepResult([TextBlock("noted", {"k": 1})], metadata={"depth": {"n": [1, 2.5, None, "é"]}})

    @tool
    async def finish(self, reward: float) -> StepResult:
        """End the episode."""
        return StepResult("finished", reward=reward, finished=True)

    @tool(concurrent=True)
    async def pid(self) -> StepResult:
        """Tell the number of the process that runs this."""
        return StepResult(str(os.getpid()))

    def task_tools(self, task: Task) -> list[Callable[[], StepResult]]:
        return [self.hint] if "hint" in task.get("tools", ()) else []

    def hint(self) -> StepResult:
        """Give a hint."""
        return StepResult("look closer")

    @property
    def _folder(self) -> Path:
        return Path(self.task["folder"])

    def _note(self, token: str) -> int:
        with (self._folder / "ledger").open("a+") as ledger:
            ledger.write(token + "\n")
            ledger.seek(0)
            return ledger.read().split().count(token)


if __name__ == "__main__":
    serve(Probe)

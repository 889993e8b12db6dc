"""Riddles with one word for an answer: an environment as users of ``openreward`` write it."""

import asyncio
import os
import signal
import sys
from typing import Any

from openreward.environments import Environment, Server, Split, TextBlock, ToolOutput, tool
from pydantic import BaseModel

WORDS = ("river", "candle", "shadow", "mirror", "echo", "lantern", "harbour", "ladder", "feather", "compass")
SPLITS = {"train": WORDS[:7], "test": WORDS[7:]}


class Answer(BaseModel):
    text: str


class SecretName(BaseModel):
    name: str


class Seconds(BaseModel):
    seconds: float


class Sandbox:
    """A stand-in for the sandbox that runs the toolsets' commands; it only returns the command."""

    async def run(self, command: str) -> tuple[str, int]:
        return f"told to run {command}", 0


class Riddles(Environment):  # type: ignore[misc]  # the package hides its types
    def __init__(self, task_spec: Any = {}, secrets: dict[str, str] = {}) -> None:  # noqa: B006  # their signature
        super().__init__(task_spec, secrets)
        self.word = task_spec["word"]
        self.given = dict(secrets)
        self.sandbox = Sandbox()

    @classmethod
    def list_splits(cls) -> list[Any]:
        return [Split(name="train", type="train"), Split(name="test", type="test")]

    @classmethod
    def list_tasks(cls, split: str) -> list[Any]:
        return [{"id": f"{split}-{at}", "word": word} for at, word in enumerate(SPLITS[split])]

    def get_prompt(self) -> list[Any]:
        return [TextBlock(text=f"Say the word {self.word!r}.")]

    @tool  # type: ignore[untyped-decorator]
    async def answer(self, params: Answer) -> ToolOutput:
        """Answer the riddle, which ends the episode."""
        right = params.text.strip() == self.word
        return ToolOutput(blocks=[TextBlock(text="right" if right else "wrong")], reward=float(right), finished=True)

    @tool  # type: ignore[untyped-decorator]
    async def has_secret(self, params: SecretName) -> ToolOutput:
        """Tell whether a secret of that name was given, and not what it is."""
        return ToolOutput(blocks=[TextBlock(text="yes" if params.name in self.given else "no")])

    @tool  # type: ignore[untyped-decorator]
    async def wait(self, params: Seconds) -> ToolOutput:
        """Take some time."""
        await asyncio.sleep(params.seconds)
        return ToolOutput(blocks=[TextBlock(text="waited")])

    @tool  # type: ignore[untyped-decorator]
    async def step(self, params: Seconds) -> ToolOutput:
        """Wait, under a name that OpenEnv's protocol uses itself."""
        return await self.wait(params)

    @tool  # type: ignore[untyped-decorator]
    async def crash(self) -> ToolOutput:
        """End the process, for tests of what runs it."""
        os.kill(os.getpid(), signal.SIGKILL)
        os._exit(137)  # a container's first process is immune to its own signals


if __name__ == "__main__":
    Server([Riddles]).run(host="0.0.0.0", port=int(sys.argv[1]) if sys.argv[1:] else 8080)

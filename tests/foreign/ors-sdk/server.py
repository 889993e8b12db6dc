"""Riddles with one word for an answer: an environment as users of ``ors-sdk`` write it."""

import asyncio
import os
import signal
import sys
from typing import Any

from ors import Environment, Server, Split, TextBlock, ToolOutput, tool
from pydantic import BaseModel

WORDS = ("river", "candle", "shadow", "mirror", "echo", "lantern", "harbour", "ladder", "feather", "compass")
SPLITS = {"train": WORDS[:7], "test": WORDS[7:]}


class Answer(BaseModel):
    text: str


class SecretName(BaseModel):
    name: str


class Seconds(BaseModel):
    seconds: float


class Riddles(Environment):
    def __init__(self, task_spec: Any = {}, secrets: dict[str, str] = {}) -> None:  # noqa: B006  # their signature
        super().__init__(task_spec, secrets)
        self.word = task_spec["word"]
        self.given = dict(secrets)

    @classmethod
    def list_splits(cls) -> list[Any]:  # type: ignore[override]  # theirs is wrapped in a cache
        return [Split(name="train", type="train"), Split(name="test", type="test")]

    @classmethod
    def list_tasks(cls, split: str) -> list[Any]:
        return [{"id": f"{split}-{at}", "word": word} for at, word in enumerate(SPLITS[split])]

    def get_prompt(self) -> list[Any]:
        return [TextBlock(text=f"Say the word {self.word!r}.")]

    @tool
    async def answer(self, params: Answer) -> ToolOutput:
        """Answer the riddle, which ends the episode."""
        right = params.text.strip() == self.word
        return ToolOutput(blocks=[TextBlock(text="right" if right else "wrong")], reward=float(right), finished=True)

    @tool
    async def has_secret(self, params: SecretName) -> ToolOutput:
        """Tell whether a secret of that name was given, and not what it is."""
        return ToolOutput(blocks=[TextBlock(text="yes" if params.name in self.given else "no")])

    @tool
    async def wait(self, params: Seconds) -> ToolOutput:
        """Take some time."""
        await asyncio.sleep(params.seconds)
        return ToolOutput(blocks=[TextBlock(text="waited")])

    @tool
    async def step(self, params: Seconds) -> ToolOutput:
        """Wait, under a name that OpenEnv's protocol uses itself."""
        await asyncio.sleep(params.seconds)
        return ToolOutput(blocks=[TextBlock(text="waited")])

    @tool
    async def crash(self) -> ToolOutput:
        """End the process, for tests of what runs it."""
        os.kill(os.getpid(), signal.SIGKILL)
        os._exit(137)  # a container's first process is immune to its own signals


if __name__ == "__main__":
    Server([Riddles]).run(host="0.0.0.0", port=int(sys.argv[1]) if sys.argv[1:] else 8080)

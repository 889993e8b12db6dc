"""``counting``: the counter of OpenEnv's examples on the gateway's server (``official.py``: on OpenEnv's server)."""

import asyncio
import os
from pathlib import Path
from typing import Literal

from envserver import Environment, Prompt, StepResult, Task, TextBlock, serve, tool


class Counting(Environment):
    """A task holds ``config.target`` (int). The episode is won when the counter reaches it.

    ``config.refuse`` (str) is the message with which the setup fails.
    """

    name = "counting"
    default_tool = "act"
    config_keys = ("level",)

    async def reset(self, task: Task, *, seed: int) -> Prompt:
        config = task.get("config") or {}
        if config.get("refuse"):
            raise ValueError(config["refuse"])
        self.value = 0
        self.target: int = config["target"]
        return TextBlock("ready", {"observation": {"value": 0, "target": self.target}})

    @tool
    async def act(self, op: Literal["inc", "dec", "raise", "noop"], by: int = 1, padding: int = 0) -> StepResult:
        """Move the counter, or fail; padding adds characters to the observation."""
        if op == "raise":
            raise RuntimeError("boom from env")
        self.value += {"inc": by, "dec": -by, "noop": 0}[op]
        won = self.value == self.target
        standing = {"value": self.value, "target": self.target}
        text = f"value={self.value}" + "x" * padding
        return StepResult(text, reward=1.0 if won else 0.0, finished=won, data=standing)

    @tool
    async def echo_message(self, message: str) -> StepResult:
        """Echo back the provided message."""
        return StepResult(message)

    @tool
    async def count(self, text: str) -> StepResult:
        """Count characters."""
        return StepResult(str(len(text)))

    @tool(concurrent=True)
    async def sleep(self, seconds: float, began: str = "") -> StepResult:
        """Take some time; make the file *began* first."""
        if began:
            Path(began).touch()  # noqa: ASYNC240  # takes microseconds
        await asyncio.sleep(seconds)
        return StepResult("slept")

    @tool
    async def given(self) -> StepResult:
        """Tell what the trainer gave besides the task."""
        return StepResult("given", data={"seed": self.seed, "config": dict(self.config), "task": dict(self.task)})

    @tool
    async def die(self) -> StepResult:
        """End the whole process, as an out-of-memory kill would."""
        os._exit(1)


if __name__ == "__main__":
    serve(Counting)

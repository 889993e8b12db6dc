"""``slowsetup``: an episode whose setup waits until a test releases it, or fails."""

import asyncio
import os
from pathlib import Path

from envserver import Environment, Prompt, StepResult, Task, serve, tool


class SlowSetup(Environment):
    """A task may hold ``setup_s`` (seconds), ``gate`` (a path to wait for), ``error`` (the message of the failure)."""

    name = "slowsetup"

    async def reset(self, task: Task, *, seed: int) -> Prompt:
        await asyncio.sleep(task.get("setup_s", 0))
        if gate := task.get("gate"):
            await until_there(gate)
        if error := task.get("error"):
            raise RuntimeError(error)
        return "Ready."

    @tool
    async def count(self, token: str) -> StepResult:
        """Note the token in the ledger."""
        with (Path(self.task["folder"]) / "ledger").open("a") as ledger:
            ledger.write(token + "\n")
        return StepResult("counted")


async def until_there(gate: str) -> None:
    """Wait, for at most a minute, until the test has made the file *gate*."""
    for _ in range(3000):
        if os.path.exists(gate):  # noqa: ASYNC240  # takes microseconds
            return
        await asyncio.sleep(0.02)
    raise TimeoutError(f"nobody opened {gate}")


if __name__ == "__main__":
    serve(SlowSetup)

"""An environment whose tasks have the mistakes that `gateway tasks prove` finds."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from envserver import Environment, SessionFailed, StepResult, Task, serve, tool

WON: Counter[str] = Counter()
"""How often each task was answered rightly, in this process."""


class Scored(Environment):
    name = "scored"

    async def reset(self, task: Task, *, seed: int) -> str:
        self.ended = asyncio.Event()
        return f"Say {task['config']['answer']}."

    async def close(self) -> None:
        self.ended.set()

    @tool
    async def answer(self, text: str) -> StepResult:
        """Give the answer, which ends the episode."""
        mistake = self.task["config"].get("mistake")
        if mistake == "raises":
            raise KeyError("toop")
        if mistake == "no judge":
            raise SessionFailed("the judge failed")
        if mistake == "holds":
            Path(self.task["config"]["marked"]).touch()  # noqa: ASYNC240  # takes microseconds
            await self.ended.wait()
        reward = float(text == self.task["config"]["answer"])
        WON[str(self.task.id)] += int(reward)
        if mistake == "wins once" and WON[str(self.task.id)] > 1:
            reward = 0.0
        return StepResult("Heard.", reward=reward, finished=True)

    @tool
    async def wait(self) -> StepResult:
        """Do nothing."""
        if self.task["config"].get("mistake") == "pays for nothing":
            return StepResult("Well done.", reward=0.5, finished=True)
        return StepResult("Nothing happened.")


if __name__ == "__main__":
    serve(Scored)

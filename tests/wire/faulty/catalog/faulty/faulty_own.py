"""An environment whose author made a mistake in the part that the task names."""

import subprocess

from envserver import Environment, SessionFailed, SessionLost, StepResult, Task, ToolError, serve, tool

REWARDS: dict[str, list[float | None]] = {
    "no rewards": [None, None],
    "late reward": [None, 1.0],
    "early reward": [1.0, None],
}
"""The rewards of an episode's steps. The last step ends the episode."""
ODD = {
    "no text": KeyError(),
    "long text": RuntimeError("x" * 10_000_000),
    "control characters": RuntimeError("\0\x1b[31mred\r\nevent: end\r\ndata: 1\u2028\x85\ud800"),
}
"""Exceptions whose texts are hard to report, by the second part of the task's name."""


class Faulty(Environment):
    name = "faulty"

    def __init__(self) -> None:
        self.fails = self.task["config"]["fails"]
        if self.fails == "constructor":
            raise KeyError("toop")

    async def reset(self, task: Task, *, seed: int) -> str:
        self.rewards = list(REWARDS.get(self.fails, []))
        self.stumble("reset")
        if self.fails == "reset":
            raise KeyError("toop")
        return "Answer."

    @tool
    async def answer(self, text: str) -> StepResult:
        """Answer, which ends the episode."""
        self.stumble("tool")
        if self.fails in ("tool", "tool once"):
            self.fails = "nothing" if self.fails == "tool once" else self.fails
            raise KeyError("toop")
        if self.fails == "tool error":
            raise ToolError("there is no such answer")
        if self.fails == "box":
            raise SessionLost("the box is gone")
        if self.fails in REWARDS:
            reward = self.rewards.pop(0)
            return StepResult("Heard.", reward=reward, finished=not self.rewards)
        return StepResult("judged", reward=self.judged(text), finished=True)

    def close(self) -> None:
        self.stumble("close")

    def stumble(self, place: str) -> None:
        at, _, text = self.fails.partition(", ")
        if at == place and text:
            raise ODD[text]

    def judged(self, text: str) -> float:
        try:
            self.stumble("judge")
        except (KeyError, RuntimeError) as error:
            raise SessionFailed(str(error)) from error
        if self.fails in ("reward", "infinite reward"):
            return float("nan" if self.fails == "reward" else "inf")
        program = {"program": "no-such-judge", "judge": "false"}.get(self.fails, "true")
        try:
            subprocess.run([program, text], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SessionFailed("the judge failed") from error
        return 1.0


if __name__ == "__main__":
    serve(Faulty)

"""As ``faulty``, as users of ``ors-sdk`` write it: an exception is all that a server of theirs can tell."""

import sys
from typing import Any

from ors import Environment, Server, Split, TextBlock, ToolOutput, tool
from pydantic import BaseModel

REWARDS: dict[str, list[float | None]] = {
    "reward": [float("nan")],  # which this class takes, and their server writes as null
    "no rewards": [None, None],
    "late reward": [None, 1.0],
    "early reward": [1.0, None],
}
"""What the steps of an episode give, the last of which ends it."""


class Answer(BaseModel):
    text: str


class Faulty(Environment):
    def __init__(self, task_spec: Any = {}, secrets: dict[str, str] = {}) -> None:  # noqa: B006  # their signature
        super().__init__(task_spec, secrets)
        self.fails = task_spec["config"]["fails"]
        self.rewards = list(REWARDS[self.fails]) if self.fails in REWARDS else None

    @classmethod
    def list_splits(cls) -> list[Any]:  # type: ignore[override]  # theirs is wrapped in a cache
        return [Split(name="train", type="train")]

    @classmethod
    def list_tasks(cls, split: str) -> list[Any]:
        return []

    def get_prompt(self) -> list[Any]:
        if self.fails == "reset":
            raise KeyError("toop")
        return [TextBlock(text="Answer.")]

    @tool
    async def answer(self, params: Answer) -> ToolOutput:
        """Answer, which ends the episode."""
        if self.rewards is None:
            raise KeyError("toop")
        reward = self.rewards.pop(0) if self.rewards else None
        return ToolOutput(blocks=[TextBlock(text="Heard.")], reward=reward, finished=not self.rewards)


if __name__ == "__main__":
    Server([Faulty]).run(host="127.0.0.1", port=int(sys.argv[1]))

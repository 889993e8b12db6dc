"""The environment ``faulty`` as users of ``ors-sdk`` write it: their server can report only an exception.

The second argument names the package: ``ors``, or ``openreward.environments``, which has the same classes.
"""

import importlib
import sys
from typing import Any

from pydantic import BaseModel

sdk: Any = importlib.import_module(sys.argv[2] if sys.argv[2:] else "ors")
Split, TextBlock, ToolOutput = sdk.Split, sdk.TextBlock, sdk.ToolOutput

REWARDS: dict[str, list[float | None]] = {
    "reward": [float("nan")],  # this class accepts it, and the server writes it as null
    "no rewards": [None, None],
    "late reward": [None, 1.0],
    "early reward": [1.0, None],
}
"""The rewards of an episode's steps. The last step ends the episode."""


class Answer(BaseModel):
    text: str


class Faulty(sdk.Environment):  # type: ignore[misc]  # known when it runs
    def __init__(self, task_spec: Any = {}, secrets: dict[str, str] = {}) -> None:  # noqa: B006  # their signature
        super().__init__(task_spec, secrets)
        self.fails = task_spec["config"]["fails"]
        if self.fails == "constructor":
            raise KeyError("toop")
        self.rewards = list(REWARDS[self.fails]) if self.fails in REWARDS else None

    @classmethod
    def list_splits(cls) -> list[Any]:
        return [Split(name="train", type="train")]

    @classmethod
    def list_tasks(cls, split: str) -> list[Any]:
        return []

    def get_prompt(self) -> list[Any]:
        if self.fails == "reset":
            raise KeyError("toop")
        return [TextBlock(text="Answer.")]

    @sdk.tool  # type: ignore[untyped-decorator]
    async def answer(self, params: Answer) -> ToolOutput:  # type: ignore[valid-type]  # known when it runs
        """Answer, which ends the episode."""
        if self.rewards is None:
            raise KeyError("toop")
        reward = self.rewards.pop(0) if self.rewards else None
        return ToolOutput(blocks=[TextBlock(text="Heard.")], reward=reward, finished=not self.rewards)  # type: ignore[no-any-return]


if __name__ == "__main__":
    sdk.Server([Faulty]).run(host="127.0.0.1", port=int(sys.argv[1]))

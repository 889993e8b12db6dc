"""As ``faulty``, as users of ``ors-sdk`` write it: an exception is all that a server of theirs can tell."""

import sys
from typing import Any

from ors import Environment, Server, Split, TextBlock, ToolOutput, tool
from pydantic import BaseModel


class Answer(BaseModel):
    text: str


class Faulty(Environment):
    def __init__(self, task_spec: Any = {}, secrets: dict[str, str] = {}) -> None:  # noqa: B006  # their signature
        super().__init__(task_spec, secrets)
        self.fails = task_spec["config"]["fails"]

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
        raise KeyError("toop")


if __name__ == "__main__":
    Server([Faulty]).run(host="127.0.0.1", port=int(sys.argv[1]))

"""``counting``: the smallest OpenEnv environment on this project's server. ``bench/references`` has the official one.

There are two versions: the usual plain ``def``, which runs in a thread, and a tool on the server's own loop.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from envserver import Environment, Prompt, StepResult, Task, TextBlock, serve, tool


class Counting(Environment):
    """A counter that only its trainer's actions change."""

    name = "counting"
    default_tool = "act"

    @classmethod
    def splits(cls) -> Sequence[str]:
        """Return the only split."""
        return ["train"]

    @classmethod
    def tasks(cls, split: str) -> Sequence[Mapping[str, Any]]:
        """Return the only task."""
        return [{"id": "only"}]

    def reset(self, task: Task, *, seed: int) -> Prompt:
        """Set the counter to zero."""
        self.value = 0
        return TextBlock("ready", {"observation": {"value": 0}})

    @tool
    def act(self, op: Literal["inc", "dec"]) -> StepResult:
        """Move the counter."""
        return self._moved(op)

    @tool  # a long text takes its time, which an inline tool must not
    def give(self, characters: int) -> StepResult:
        """Return a text of this length."""
        return StepResult("x" * characters, reward=0.0)

    def _moved(self, op: str) -> StepResult:
        self.value += 1 if op == "inc" else -1
        return StepResult("moved", reward=0.0, data={"value": self.value})


class CountingInline(Counting):
    """The same counter on the server's own loop."""

    name = "counting-inline"
    default_tool = "act"

    @tool(inline=True)
    def act(self, op: Literal["inc", "dec"]) -> StepResult:
        """Move the counter."""
        return self._moved(op)


if __name__ == "__main__":
    serve(Counting, CountingInline)

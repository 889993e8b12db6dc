"""``noop``: tools that do nothing but give their text back, so that what is measured is everything around a tool."""

from collections.abc import Mapping, Sequence
from typing import Any

from envserver import Environment, Prompt, StepResult, Task, serve, tool

PROMPT = "Say something."


class Noop(Environment):
    """One task, which says nothing."""

    name = "noop"

    @classmethod
    def splits(cls) -> Sequence[str]:
        """Name the one split."""
        return ["train"]

    @classmethod
    def tasks(cls, split: str) -> Sequence[Mapping[str, Any]]:
        """List the one task."""
        return [{"id": "only"}]

    async def reset(self, task: Task, *, seed: int) -> Prompt:
        """Do nothing."""
        return PROMPT

    @tool
    async def echo(self, text: str) -> StepResult:
        """Give the text back, from where authors' code runs by default: beside the server's loop."""
        return StepResult(text, reward=0.0)

    @tool(inline=True)
    async def echo_inline(self, text: str) -> StepResult:
        """Give the text back, on the server's own loop."""
        return StepResult(text, reward=0.0)


if __name__ == "__main__":
    serve(Noop)

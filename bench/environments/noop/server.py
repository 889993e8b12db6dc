"""``noop``: tools that only return their text, so that a measurement shows all costs around a tool."""

from collections.abc import Mapping, Sequence
from typing import Any

from envserver import Environment, Prompt, StepResult, Task, serve, tool

PROMPT = "Say something."


class Noop(Environment):
    """One task with a fixed prompt."""

    name = "noop"

    @classmethod
    def splits(cls) -> Sequence[str]:
        """Return the only split."""
        return ["train"]

    @classmethod
    def tasks(cls, split: str) -> Sequence[Mapping[str, Any]]:
        """Return the only task."""
        return [{"id": "only"}]

    async def reset(self, task: Task, *, seed: int) -> Prompt:
        """Return the fixed prompt."""
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

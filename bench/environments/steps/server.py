"""``steps``: a step takes as long as it is told to, says how often it ran, and notes when its session ended.

What is measured with it is not the environment: a step waits and does nothing else.
"""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envserver import Environment, Prompt, StepResult, Task, TextBlock, ToolCall, serve, tool

ENDS = Path(os.environ.get("ENVSERVER_SOCKET", "/run/envserver/http.sock")).parent / "ends"
"""Lines of a session's number and the Unix time of its end, of sessions that have a number."""


class Steps(Environment):
    """A task may hold ``n``, the number of its session."""

    name = "steps"
    default_tool = "act"
    lanes = "shared"  # thousands of sessions, and one thread
    doubled = 0
    """Steps that ran more than once, in all sessions of this worker: always 0, or somebody sent one again."""

    @classmethod
    def splits(cls) -> Sequence[str]:
        """Name the one split."""
        return ["train"]

    @classmethod
    def tasks(cls, split: str) -> Sequence[Mapping[str, Any]]:
        """List the one task."""
        return [{"id": "only"}]

    async def reset(self, task: Task, *, seed: int) -> Prompt:
        """Begin at zero."""
        self.tokens: set[str] = set()
        return TextBlock("ready", {"observation": {"count": 0}})

    @tool(inline=True)
    async def act(self, token: str, seconds: float = 0.0) -> StepResult:
        """Take the step called *token*, which no other step of the session is."""
        Steps.doubled += token in self.tokens
        self.tokens.add(token)
        if seconds:
            await asyncio.sleep(seconds)
        data = {"token": token, "count": len(self.tokens), "doubled": Steps.doubled}
        return StepResult(f"{token} {len(self.tokens)} {Steps.doubled}", reward=1.0, data=data)

    def parse_text(self, text: str) -> ToolCall:
        """Read a token and, behind a space, seconds."""
        token, _, seconds = text.partition(" ")
        return ToolCall("act", {"token": token, "seconds": float(seconds or 0)})

    async def close(self) -> None:
        """Note the end."""
        if "n" in self.task:
            with ENDS.open("a") as ends:
                ends.write(f"{self.task['n']} {time.time()}\n")


if __name__ == "__main__":
    serve(Steps)

"""``steps``: a step takes the requested time, reports its counts, and the worker records the end of each session.

The environment itself is not measured: a step only waits.
"""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envserver import Environment, Prompt, StepResult, Task, TextBlock, ToolCall, serve, tool

ENDS = Path(os.environ.get("ENVSERVER_SOCKET", "/run/envserver/http.sock")).parent / "ends"
"""File with a line for each session that has a number: the number and the Unix time of its end."""


class Steps(Environment):
    """Counts steps. A task may contain ``n``, the number of its session."""

    name = "steps"
    default_tool = "act"
    lanes = "shared"  # thousands of sessions in one thread
    doubled = 0
    """Number of steps that ran more than once, in all sessions of this worker: 0 unless a step was sent again."""

    @classmethod
    def splits(cls) -> Sequence[str]:
        """Return the only split."""
        return ["train"]

    @classmethod
    def tasks(cls, split: str) -> Sequence[Mapping[str, Any]]:
        """Return the only task."""
        return [{"id": "only"}]

    async def reset(self, task: Task, *, seed: int) -> Prompt:
        """Start with a count of zero."""
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
        """Parse a token and, after a space, seconds."""
        token, _, seconds = text.partition(" ")
        return ToolCall("act", {"token": token, "seconds": float(seconds or 0)})

    async def close(self) -> None:
        """Record the end of a session with a number."""
        if "n" in self.task:
            with ENDS.open("a") as ends:
                ends.write(f"{self.task['n']} {time.time()}\n")


if __name__ == "__main__":
    serve(Steps)

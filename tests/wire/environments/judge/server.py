"""``judge``: a conversation that ends with a final message, and a judge of whole groups."""

import json
from collections.abc import Sequence

from envserver import (
    Environment,
    GroupCandidate,
    GroupScore,
    Message,
    ReasoningBlock,
    StepResult,
    Task,
    TextBlock,
    ToolCallBlock,
    ToolResultBlock,
    serve,
    tool,
)


class Judge(Environment):
    """A task may hold ``question``; ``strict`` (bool) makes the judge fail."""

    name = "judge"
    default_tool = "answer"

    async def reset(self, task: Task, *, seed: int) -> None:
        """Prepare nothing, because the opening is a conversation."""

    def messages(self) -> list[Message]:
        return [
            Message("system", [TextBlock("Be brief.")]),
            Message("user", [TextBlock(self.task.get("question", ""))]),
            Message("assistant", [ReasoningBlock("hm", "sig"), ToolCallBlock("c1", "look", {"at": "it"})]),
            Message("user", [ToolResultBlock("c1", [TextBlock("seen")])]),
        ]

    @tool(terminal=True)
    async def answer(self, text: str) -> StepResult:
        """Take the final message."""
        return StepResult(f"{len(text)} characters", reward=1 / (1 + len(text)), finished=True)

    @tool
    async def given(self) -> StepResult:
        """Tell what the trainer gave besides the task."""
        return StepResult(json.dumps({"seed": self.seed, "config": dict(self.config)}, sort_keys=True))

    async def score_group(self, candidates: Sequence[GroupCandidate]) -> list[GroupScore | float]:
        if self.task.get("strict"):
            raise RuntimeError("the judge is unwell")
        return [GroupScore(len(candidate.messages), candidate.metadata) for candidate in candidates]


if __name__ == "__main__":
    serve(Judge)

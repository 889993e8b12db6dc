"""``unsteady``: a judge that errs in one of ten episodes on tasks with ``flaky``."""

import random

from envserver import Environment, StepResult, Task, serve, tool

chance = random.Random(7)


class Unsteady(Environment):
    """The right answer is ``right``. A task may hold ``flaky`` (bool)."""

    name = "unsteady"
    default_tool = "answer"

    async def reset(self, task: Task, *, seed: int) -> str:
        """Return the question."""
        return str(task["question"])

    @tool(terminal=True)
    async def answer(self, text: str) -> StepResult:
        """Judge the answer."""
        errs = bool(self.task.get("flaky")) and chance.random() < 0.1
        return StepResult("judged", reward=float((text == "right") != errs), finished=True)


if __name__ == "__main__":
    serve(Unsteady)

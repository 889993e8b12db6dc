"""``unsteady``: a judge that errs in one of ten episodes, or in the first one only, and texts that never repeat."""

import base64
import itertools
import random

from envserver import Environment, ImageBlock, StepResult, Task, TextBlock, serve, tool

chance = random.Random(7)
clock, judged = itertools.count(), itertools.count()
PICTURE = base64.b64encode(b"\x89PNG" + random.Random(7).randbytes(20_000)).decode()
"""More than one chunk of a stream holds."""


class Unsteady(Environment):
    """The right answer is ``right``. A task may hold ``flaky``, ``first``, ``clock`` and ``picture`` (bool)."""

    name = "unsteady"
    default_tool = "answer"

    async def reset(self, task: Task, *, seed: int) -> str:
        """Return the question."""
        return str(task["question"])

    @tool(terminal=True)
    async def answer(self, text: str) -> StepResult:
        """Judge the answer."""
        errs = bool(self.task.get("flaky")) and chance.random() < 0.1
        errs |= bool(self.task.get("first")) and next(judged) == 0
        said = f"answered\nat {next(clock)}" if self.task.get("clock") else "judged"
        picture = [ImageBlock(PICTURE, "image/png")] if self.task.get("picture") else []
        return StepResult([TextBlock(said), *picture], reward=float((text == "right") != errs), finished=True)


if __name__ == "__main__":
    serve(Unsteady)

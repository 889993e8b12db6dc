"""The math environment: one question and one tool for the answer.

The scorer of the question's family judges the answer, or a reward function that the task names. There is no calculator
among the tools, because in most families the calculation is the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from envserver import Environment, Prompt, StepResult, Task, ToolCall, serve, tool
from envserver.answers import final_answer
from math_scorers import Evaluation

if TYPE_CHECKING:  # imported for the tasks that need it
    from math_named import Named

MOST_ATTEMPTS = 10
"""The upper bound of a task's `max_attempts`: more attempts would let a model search instead of think."""


class Math(Environment):
    """A session is one question; it ends with a right answer or with the last attempt."""

    name = "math"
    env_types = ("reasoning_gym", "reasoning_gym_env")
    default_tool = "submit"

    _evaluation: Evaluation | Named
    _attempts_left: int

    def reset(self, task: Task, *, seed: int) -> Prompt:
        """Read the question; *seed* is unused, because the task determines everything.

        Raises:
            ValueError: The task cannot be asked or scored; no session starts.
        """
        question, self._evaluation, self._attempts_left = read_task(task)
        return instructions(question, attempts=self._attempts_left)

    @classmethod
    def check_task(cls, task: Task) -> None:
        """Refuse a task that cannot be asked or scored."""
        read_task(task)

    @tool(inline=True)  # the slowest answer tried takes 0.2 ms, a thread's turn about as much
    async def submit(self, answer: str) -> StepResult:
        """Submit your answer: the final answer alone, in the form that the question asks for."""
        self._attempts_left -= 1
        if isinstance(self._evaluation, Evaluation):
            verdict = self._evaluation.judge(answer)
        else:
            verdict = await self._evaluation.judge(answer)
        if verdict.score < 1.0 and self._attempts_left > 0:
            # No score before the end: the score of an attempt would lead to the answer.
            return StepResult(f"Not right. Attempts left: {self._attempts_left}.")
        return StepResult(
            verdict.text,
            reward=verdict.score,
            finished=True,
            metadata={"family": self._evaluation.family, "score": verdict.score, "answer": answer},
        )

    def parse_text(self, text: str) -> ToolCall:
        """Treat the marked answer as the answer, or else the whole text after the reasoning."""
        return ToolCall("submit", {"answer": final_answer(text)})


def read_task(task: Task) -> tuple[str, Evaluation | Named, int]:
    """Return a task's question, what judges the answer, and the number of attempts.

    Raises:
        ValueError: The task cannot be asked or scored.
    """
    question = task.get("instruction")
    if not isinstance(question, str) or not question.strip():
        raise ValueError("the task has no instruction")
    return question, evaluation_of(task.get("evaluation")), max_attempts(task.get("config"))


def evaluation_of(data: object) -> Evaluation | Named:
    """Read a task's `evaluation`: a family's, or a reward function's.

    Raises:
        InvalidEvaluation: It is neither; this is a ValueError.
    """
    if isinstance(data, Mapping) and data.get("reward_function") not in (None, "reasoning_gym"):
        from math_named import Named

        return Named.read(data)
    return Evaluation.read(data)


def instructions(question: str, *, attempts: int) -> str:
    """Return the question and the way to answer."""
    how_often = "one attempt" if attempts == 1 else f"{attempts} attempts"
    return (
        f"{question}\n\n"
        "Answer with the tool `submit`: the final answer alone, in the form that the question asks for, without "
        "working or any other text. If you cannot call tools, write it between <answer> and </answer>. "
        f"You have {how_often}."
    )


def max_attempts(config: object) -> int:
    """Return `max_attempts` of a task's configuration, by default 1.

    Raises:
        ValueError: The value is not an integer from 1 to `MOST_ATTEMPTS`.
    """
    given: Mapping[str, Any] = config if isinstance(config, Mapping) else {}
    attempts = given.get("max_attempts", 1)
    if not isinstance(attempts, int) or isinstance(attempts, bool) or not 1 <= attempts <= MOST_ATTEMPTS:
        raise ValueError(f"config.max_attempts must be an integer from 1 to {MOST_ATTEMPTS}")
    return attempts


if __name__ == "__main__":
    serve(Math)

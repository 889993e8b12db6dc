"""The environment of a whole library: every family of reasoning-gym by name, seed and parameters; one tool, submit.

The library's own scorer of the family judges the answer, in a child of the fork server (`puzzle_child`).
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envserver import Environment, Prompt, StepResult, Task, ToolCall, serve, tool
from envserver.answers import final_answer
from puzzle_forks import Forks, JobFailed
from reasoning_families import check_family

MAKE_CPU_S, MAKE_WITHIN_S = 10, 25.0
"""The CPU time of a generation, and its deadline with the wait for a free child, in seconds."""
SCORE_CPU_S, SCORE_WITHIN_S = 5, 25.0
MAX_ANSWER_CHARS = 100_000
"""The longest answer that a scorer reads. The longest reference answers have about 5,000 characters."""
MAX_SEED = 2**32 - 1001
"""The largest seed: numpy takes 32 bits, and a puzzle without a sound reference gives way to one of the next seeds."""
NO_CREDIT = 0.05
"""The most that counts as nothing: scorers give 0.01 or 0.05 for any text, or for one of the right form."""
MOST_KEPT = 16
"""Puzzles that are kept for the next sessions on the same: a task is checked before it begins, and groups share one."""


@dataclass(frozen=True)
class Order:
    """What a task asks for."""

    family: str
    seed: int | None
    """None: the session's own."""
    parameters: Mapping[str, Any]

    @classmethod
    def read(cls, task: Task) -> Order:
        """Read a task's `family`, `seed` and `parameters`, from the task itself or from its `config`.

        Raises:
            ValueError: The family is not offered, or a value has a wrong type.
        """
        config = task.get("config")
        given = {**(config if isinstance(config, Mapping) else {}), **{key: task[key] for key in KEYS if key in task}}
        if unknown := sorted(given.keys() - KEYS):
            raise ValueError(f"config.{unknown[0]}: there is no such key; known: {', '.join(sorted(KEYS))}")
        if task.get("evaluation"):
            raise ValueError("evaluation: the family's own scorer judges; leave it out, or use the environment math")
        family, parameters, seed = check_family(given.get("family")), given.get("parameters"), given.get("seed")
        if not isinstance(parameters, Mapping | None):
            raise ValueError(f'parameters: {parameters!r:.100} is not an object; write {{"name": value}}')
        if seed is not None and (type(seed) is not int or not 0 <= seed <= MAX_SEED):
            raise ValueError(f"seed: {seed!r:.100} is not a whole number from 0 to {MAX_SEED}")
        return cls(family, seed, parameters or {})


KEYS = frozenset({"family", "seed", "parameters"})


@dataclass(frozen=True)
class Puzzle:
    """A puzzle as a child made it."""

    family: str
    seed: int
    parameters: Mapping[str, Any]
    question: str
    reference: str
    entry: str
    """What the scorer needs, for a child."""


def read_answer(puzzle: Puzzle, answer: str) -> tuple[str, str]:
    """Return *answer* as the scorer gets it, and the reason why it is wrong without a scorer, if it is."""
    if puzzle.reference == puzzle.reference.strip():
        answer = answer.strip()
    if not answer.strip():
        return answer, "Incorrect: the answer is empty."
    if len(answer) > MAX_ANSWER_CHARS:
        return answer, f"Incorrect: the answer is longer than {MAX_ANSWER_CHARS} characters."
    if puzzle.question.strip() in answer:  # many scorers pay a part for a text that contains the right answer
        return answer, "Incorrect: the answer repeats the question."
    return answer, ""


def reward_of(score: float, puzzle: Puzzle, answer: str) -> float:
    """Return the reward for what the library's scorer gave for *answer*.

    Most scorers give a text that contains the right answer the share of its length: 0.67 for -16 where 16 is right.
    Such a text is no answer, so it earns nothing here.
    """
    if not math.isfinite(score) or not NO_CREDIT < score <= 1.0 or (score < 1.0 and puzzle.reference in answer):
        return 0.0
    return score


class Puzzles:
    """Makes puzzles and judges answers, by jobs of the fork server."""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks
        self._kept: OrderedDict[str, Puzzle] = OrderedDict()

    async def make(self, order: Order, *, seed: int) -> Puzzle:
        """Return the puzzle of *order*; *seed* applies if the order has none.

        Raises:
            ValueError: There is no puzzle with these parameters.
            RuntimeError: The library or the machine is at fault.
        """
        seed = seed % (MAX_SEED + 1) if order.seed is None else order.seed
        what: dict[str, Any] = {"family": order.family, "seed": seed, "parameters": dict(order.parameters)}
        key = json.dumps(what, sort_keys=True)
        if (kept := self._kept.pop(key, None)) is None:
            try:
                made = await self._forks.run({"do": "make", **what}, cpu_s=MAKE_CPU_S, within_s=MAKE_WITHIN_S)
            except JobFailed as error:
                text = f"{order.family} makes no puzzle of seed {seed}: {error}"
                if order.parameters:
                    raise ValueError(
                        f"parameters: {json.dumps(what['parameters'])[:300]}: {text}; choose others"
                    ) from None
                raise RuntimeError(text) from None
            kept = Puzzle(**what, question=made["question"], reference=made["reference"], entry=made["entry"])
        self._kept[key] = kept
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return kept

    async def judge(self, puzzle: Puzzle, answer: str) -> tuple[float, str]:
        """Return the reward of *answer* and a sentence.

        Raises:
            RuntimeError: The library or the machine is at fault.
        """
        answer, refusal = read_answer(puzzle, answer)
        if refusal:
            return 0.0, refusal
        try:
            score = await self._score(puzzle, answer)
        except JobFailed as error:
            # The library fails by the answer if it still judges its reference.
            try:
                is_sound = await self._score(puzzle, puzzle.reference) == 1.0
            except JobFailed:
                is_sound = False
            if not is_sound:
                raise RuntimeError(f"the scorer of {puzzle.family} fails: {error}") from error
            return 0.0, f"Incorrect: the family's scorer cannot read the answer ({error})."[:300]
        reward = reward_of(score, puzzle, answer)
        if 0.0 < reward < 1.0:
            return reward, f"Partly correct: the answer scores {reward:.2f} of 1."
        return reward, "Correct." if reward else "Incorrect."

    async def _score(self, puzzle: Puzzle, answer: str) -> float:
        job = {
            "do": "score",
            "family": puzzle.family,
            "parameters": puzzle.parameters,
            "entry": puzzle.entry,
            "answer": answer,
        }
        return float((await self._forks.run(job, cpu_s=SCORE_CPU_S, within_s=SCORE_WITHIN_S))["score"])


FORKS = Forks()
PUZZLES = Puzzles(FORKS)


class ReasoningGym(Environment):
    """A session is one puzzle with one answer."""

    name = "reasoning_gym"
    default_tool = "submit"
    lanes = "shared"  # one loop for all sessions, because they share the fork server

    _puzzle: Puzzle

    async def reset(self, task: Task, *, seed: int) -> Prompt:
        """Make the puzzle; *seed* applies if the task has no seed.

        Raises:
            ValueError: The task names no puzzle; no session starts.
        """
        self._puzzle = await PUZZLES.make(Order.read(task), seed=seed)
        asked = str(task.get("instruction") or "").strip()
        return (
            f"{asked}\n\n{self._puzzle.question}".lstrip() + "\n\n"
            "Answer with the tool `submit`: the final answer alone, in the form that the question asks for. If you "
            "cannot call tools, write it between <answer> and </answer>. You have one attempt."
        )

    @classmethod
    async def check_task(cls, task: Task) -> None:
        """Refuse a task whose puzzle cannot be made."""
        await PUZZLES.make(Order.read(task), seed=0)

    @tool
    async def submit(self, answer: str) -> StepResult:
        """Submit your answer: the final answer alone, in the form that the question asks for."""
        reward, text = await PUZZLES.judge(self._puzzle, answer)
        metadata = {"family": self._puzzle.family, "seed": self._puzzle.seed, "score": reward, "answer": answer}
        return StepResult(text, reward=reward, finished=True, metadata=metadata)

    def parse_text(self, text: str) -> ToolCall:
        """Treat the marked answer as the answer, or else the whole text after the reasoning."""
        return ToolCall("submit", {"answer": final_answer(text)})


if __name__ == "__main__":
    FORKS.start()  # before the server is ready: no session waits for the import
    try:
        serve(ReasoningGym)
    finally:
        FORKS.stop()

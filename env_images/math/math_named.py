"""Questions that a named reward function of `envserver.generic` judges instead of a family's scorer.

Further keys of `evaluation` are the function's arguments. The function judges the submitted answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envserver import SessionFailed
from envserver.generic import RewardCall, RewardError, read_reward
from math_scorers import MAX_ANSWER_CHARS, InvalidEvaluation, Verdict, describe


@dataclass(frozen=True, slots=True)
class Named:
    """A question's reward function with its arguments; `Named.read` creates and checks it."""

    call: RewardCall

    @property
    def family(self) -> str:
        """The function's name, in place of another task's family."""
        return self.call.name

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Named:
        """Read and check the `evaluation` of a task.

        Raises:
            InvalidEvaluation: There is no such function, or the arguments do not fit it.
        """
        try:
            return cls(read_reward(data))
        except ValueError as error:
            raise InvalidEvaluation(f"evaluation.reward_function: {error}") from error

    async def judge(self, answer: str) -> Verdict:
        """Score *answer*; an empty answer, or an answer longer than `MAX_ANSWER_CHARS`, scores 0.

        Raises:
            SessionFailed: The function broke, so there is no reward.
        """
        answer = answer.strip()
        if not answer or len(answer) > MAX_ANSWER_CHARS:
            return Verdict(0.0, describe(0.0))
        try:
            score = await asyncio.to_thread(self.call, answer)  # a pattern may take a second
        except RewardError as error:
            raise SessionFailed(f"the reward function failed: {error}") from error
        return Verdict(score, describe(score))

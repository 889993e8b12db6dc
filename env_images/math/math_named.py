"""Questions that are judged by a named reward function of `envserver.generic` instead of a family's scorer.

Further keys of `evaluation` are the function's arguments; what is judged is the answer as it was submitted.
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
    """A question's reward function with its arguments; made by `Named.read`, which checks both."""

    call: RewardCall

    @property
    def family(self) -> str:
        """The function's name, where other tasks have a family."""
        return self.call.name

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Named:
        """Check the `evaluation` of a task.

        Raises:
            InvalidEvaluation: there is no such function, or the arguments do not fit it.
        """
        try:
            return cls(read_reward(data))
        except ValueError as error:
            raise InvalidEvaluation(f"evaluation.reward_function: {error}") from error

    async def judge(self, answer: str) -> Verdict:
        """Score *answer*; an empty one, and one longer than `MAX_ANSWER_CHARS`, is worth nothing.

        Raises:
            SessionFailed: the function broke, so there is no reward.
        """
        answer = answer.strip()
        if not answer or len(answer) > MAX_ANSWER_CHARS:
            return Verdict(0.0, describe(0.0))
        try:
            score = await asyncio.to_thread(self.call, answer)  # a pattern may take a second
        except RewardError as error:
            raise SessionFailed(f"the reward function failed: {error}") from error
        return Verdict(score, describe(score))

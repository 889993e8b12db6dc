"""Scores the agent's final message by the task's reward functions.

`python3 chat_scoring.py FILE…` checks tasks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chat_dialogue import Dialogue, InvalidChat
from envserver.generic import RewardCall, parse_task, read_reward

MAX_CALLS = 20
COMBINATIONS = ("mean", "least")


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a message."""

    reward: float
    """The reward in [0, 1]."""
    parts: Sequence[float]
    """The score of each function, in the task's order."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The scoring of a task's final message; `read` creates and checks it."""

    calls: Sequence[RewardCall]
    weights: Sequence[float]
    combine: str
    """`mean`, by weight, or `least`, for which all must hold."""
    references: Sequence[str]
    """The replies that earn 1, in their order; empty if the task has no reference."""

    @classmethod
    def read(cls, evaluation: Mapping[str, Any]) -> Evaluation:
        """Read a task's `evaluation`.

        One function: `{"reward_function": "exact_match('x')"}`. Several: `{"all": [{"reward_function": …, "weight": 2},
        …], "combine": "mean"}`. Either form may have a `reference`: a reply that earns 1, or a list whose last reply
        earns 1.

        Raises:
            InvalidChat: The form is wrong, a function does not exist, its arguments do not fit, or the reference does
                not earn 1.
        """
        rest = dict(evaluation)
        references = _references(rest.pop("reference", None))
        if "all" in rest:
            several, combine = rest.pop("all"), rest.pop("combine", "mean")
            if rest:
                raise InvalidChat(f"evaluation.{min(rest)}: unknown key beside all; there are combine, reference")
            if combine not in COMBINATIONS:
                raise InvalidChat(f"evaluation.combine: must be one of {', '.join(COMBINATIONS)}")
            if not isinstance(several, list) or not 1 <= len(several) <= MAX_CALLS:
                raise InvalidChat(f"evaluation.all: must be a list of 1 to {MAX_CALLS} entries")
            read = [_weighted(entry, f"evaluation.all[{place}]") for place, entry in enumerate(several)]
        else:
            read, combine = [(_call(rest, "evaluation"), 1.0)], "mean"
        made = cls([call for call, _ in read], [weight for _, weight in read], combine, references)
        if references and made.score(references[-1]).reward != 1.0:
            raise InvalidChat("evaluation.reference: does not earn 1")
        return made

    def score(self, message: str) -> Score:
        """Return the score of the final message.

        Raises:
            RewardError: A function broke, which is not a reward of 0.
        """
        parts = [call(message) for call in self.calls]
        if self.combine == "least":
            return Score(min(parts), parts)
        weighted = sum(part * weight for part, weight in zip(parts, self.weights, strict=True))
        # Rounded, because weights such as 0.1 do not sum exactly: all right must be 1.
        return Score(min(1.0, round(weighted / sum(self.weights), 9)), parts)


def _weighted(entry: object, where: str) -> tuple[RewardCall, float]:
    if not isinstance(entry, Mapping):
        raise InvalidChat(f"{where}: must be an object with reward_function")
    weight = entry.get("weight", 1.0)
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight <= 1_000:
        raise InvalidChat(f"{where}.weight: must be a number above 0, at most 1000")
    return _call({key: value for key, value in entry.items() if key != "weight"}, where), float(weight)


def _call(evaluation: Mapping[str, Any], where: str) -> RewardCall:
    try:
        return read_reward(evaluation)
    except ValueError as error:
        raise InvalidChat(f"{where}.reward_function: {error}") from error


def _references(data: object) -> list[str]:
    replies = [] if data is None else data if isinstance(data, list) else [data]
    if not all(isinstance(reply, str) for reply in replies):
        raise InvalidChat("evaluation.reference: must be a text or a list of texts")
    return list(replies)


def main(paths: Iterable[str]) -> int:
    """Check the tasks of *paths*, JSON lines with references; return 1 if a task is invalid or cannot be won."""
    faults = tasks = 0
    for line in (line for path in paths for line in Path(path).read_text("utf-8").split("\n") if line):
        tasks += 1
        task = parse_task(json.loads(line))
        try:
            dialogue = Dialogue(task.instruction, task.config)
            replies = list(Evaluation.read(task.evaluation).references)
            if not replies or any(dialogue.answer(reply) is None for reply in replies[:-1]):
                raise InvalidChat("evaluation.reference: has no reply, or more than the conversation has turns")
        except InvalidChat as error:
            faults += 1
            print(f"{task.id}: {error}")
    print(f"{tasks} tasks, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

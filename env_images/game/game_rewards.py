"""The reward functions that a task's `evaluation` may name; each maps the outcome of a game to [0, 1]."""

from __future__ import annotations

from collections.abc import Mapping

from envserver.generic import RewardCall, RewardError, read_reward, reward_function
from game_play import InvalidGame, Outcome

DEFAULT = "won"
NAMES = ("won", "progress", "efficiency")

_SAMPLE = Outcome(is_won=True, progress=1.0, turns=2, optimal_turns=1)


@reward_function("won")
def won(outcome: Outcome) -> float:
    """Return 1 for a won game, else 0."""
    return float(outcome.is_won)


@reward_function("progress")
def progress(outcome: Outcome) -> float:
    """Return 1 for a won game, else the player's progress by the game's own measure, below 1."""
    return outcome.progress


@reward_function("efficiency")
def efficiency(outcome: Outcome, slack: float = 1.0) -> float:
    """Return 1 for a win in at most *slack* times the fewest turns, less for more turns, and 0 without a win.

    Beyond that number the reward falls in proportion to the turns.
    """
    if not isinstance(slack, int | float) or isinstance(slack, bool) or not 1 <= slack <= 100:
        raise ValueError("slack must be a number from 1 to 100")
    if not outcome.is_won or outcome.optimal_turns is None:
        return 0.0
    return min(1.0, slack * outcome.optimal_turns / outcome.turns)


def read_evaluation(evaluation: Mapping[str, object], *, optimal_turns: int | None) -> RewardCall:
    """Read a task's `evaluation`: `{"reward_function": "efficiency(slack=1.5)"}`, or the arguments as further keys.

    Args:
        optimal_turns: The fewest turns of the judged game, if known.

    Raises:
        InvalidGame: There is no such function, the arguments do not fit, or `efficiency` is used for a game whose
            fewest turns are unknown.
    """
    try:
        call = read_reward({"reward_function": DEFAULT, **evaluation})
        if call.name not in NAMES:
            raise ValueError(f"{call.name} judges no game; there are {', '.join(NAMES)}")
        call(_SAMPLE)
    except (ValueError, RewardError) as error:
        raise InvalidGame(f"evaluation.reward_function: {error}") from error
    if call.name == "efficiency" and optimal_turns is None:
        raise InvalidGame(
            "evaluation.reward_function: the fewest turns of this game are not known: use won or progress"
        )
    return call

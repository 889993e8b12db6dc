"""The game environment: a game for one player with one tool for moves; grid worlds and games of TextArena."""

from __future__ import annotations

from typing import Any, ClassVar

from envserver import Environment, Prompt, StepResult, Task, TextBlock, ToolCall, serve, tool
from envserver.generic import RewardCall, parse_task
from envserver.textarena import move_of, rules_of
from game_config import read_task
from game_play import Game, outcome_of
from game_textarena import load


class GameWorld(Environment):
    """A session is one game; it ends by the game's own rules or with the last of its turns."""

    name = "game"
    env_types: ClassVar[tuple[str, ...]] = ("grid_world", "grid_world_env")
    default_tool = "act"

    _game: Game
    _reward: RewardCall
    _rules: frozenset[str]
    _turns: int
    _max_turns: int

    def reset(self, task: Task, *, seed: int) -> Prompt:
        """Set up the game; *seed* applies if the task's configuration has no seed.

        Raises:
            ValueError: The task has no game that can be played and judged; no session starts.
        """
        given = parse_task(task)
        self._game, self._max_turns, self._reward = read_task(given, seed=seed)
        self._turns = 0
        asked = f"{given.instruction.strip()}\n\n" if given.instruction.strip() else ""
        text = (
            f"{asked}{self._game.opening()}\n\n"
            f"Make one move at a time with the tool `act`: {self._game.move_form}. "
            "If you cannot call tools, write your move in square brackets; of several, the last one counts. "
            f"You have {self._max_turns} turns; an invalid move costs one, too."
        )
        self._rules = rules_of(text)
        return [TextBlock(text, {"observation": self._observation()})]

    @classmethod
    def check_task(cls, task: Task) -> None:
        """Refuse a task that has no game that can be played and judged."""
        read_task(parse_task(task), seed=0)

    @tool
    def act(self, message: str) -> StepResult:
        """Make one move of the game: its text in square brackets, such as [up]."""
        self._turns += 1
        seen = self._game.play(move_of(message, self._rules))
        is_last = self._turns >= self._max_turns
        if not self._game.is_over and not is_last:
            left = self._max_turns - self._turns
            return StepResult(f"{seen}\n\nTurns left: {left}.", data=self._observation())
        if not self._game.is_over:
            seen = f"{seen}\n\nThat was the last turn: the game is over."
        outcome = outcome_of(self._game, turns=self._turns)
        return StepResult(
            seen,
            reward=self._reward(outcome),
            finished=True,
            metadata={
                "game": self._game.name,
                "won": outcome.is_won,
                "turns": self._turns,
                "status": "completed" if self._game.is_over else "task limit reached",
            },
            data={**self._observation(), "won": outcome.is_won},
        )

    def parse_text(self, text: str) -> ToolCall:
        """Pass on the whole text, in which `act` finds the move."""
        return ToolCall("act", {"message": text})

    def _observation(self) -> dict[str, Any]:
        observation: dict[str, Any] = {"game": self._game.name, "turn": self._turns, "max_turns": self._max_turns}
        if moves := list(self._game.valid_moves()):
            observation["valid_moves"] = moves
        return observation


if __name__ == "__main__":
    load()  # before the server is ready: no session waits for the import
    serve(GameWorld)

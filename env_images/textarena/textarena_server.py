"""The textarena environment: every single-player game of TextArena by its registered name, with one tool for moves."""

from __future__ import annotations

from typing import Any, ClassVar

from envserver import Environment, Prompt, SessionFailed, StepResult, Task, TextBlock, ToolCall, serve, tool
from envserver.generic import parse_task
from textarena_names import read_task
from textarena_play import Play, arguments, load


class TextArena(Environment):
    """A session is one game; it ends by the library's rules or with the last of its moves."""

    name = "textarena"
    env_types: ClassVar[tuple[str, ...]] = ("textarena_env",)
    default_tool = "move"

    _play: Play

    def reset(self, task: Task, *, seed: int) -> Prompt:
        """Draw the game; *seed* applies if the task has none.

        Raises:
            ValueError: The task has no game that can be played; no session starts.
        """
        given = parse_task(task)
        self._play = Play(read_task(given, seed=seed))
        asked = f"{given.instruction.strip()}\n\n" if given.instruction.strip() else ""
        text = (
            f"{asked}{self._play.opening}\n\n"
            f"Make one move at a time with the tool `move`: {self._play.form}. "
            "If you cannot call tools, write your move in square brackets; of several, the last one counts. "
            f"The game ends after {self._play.max_moves} moves at the latest; an invalid move costs one, too."
        )
        self._play.hide(text)
        return [TextBlock(text, {"observation": self._observation()})]

    @classmethod
    def check_task(cls, task: Task) -> None:
        """Refuse a task whose game is not offered, or whose parameters are unknown or out of bounds."""
        arguments(read_task(parse_task(task), seed=0))

    @tool
    def move(self, text: str) -> StepResult:
        """Make one move of the game: its text in square brackets, as the game asks for it, such as [apple]."""
        play = self._play
        try:
            seen = play.move(text)
        except Exception as error:  # the library's; no known move makes it fail, so the game's state is unknown
            raise SessionFailed(f"{play.name} failed on a move: {type(error).__name__}: {error}") from error
        if not play.is_over:
            return StepResult(seen, data=self._observation())
        try:
            reward = play.reward()
        except ValueError as error:
            raise SessionFailed(str(error)) from error
        status = "invalid move" if play.has_failed else "completed" if play.has_ended else "task limit reached"
        return StepResult(
            seen,
            reward=reward,
            finished=True,
            metadata={"game": play.name, "moves": play.moves, "status": status},
            data=self._observation(),
        )

    def parse_text(self, text: str) -> ToolCall:
        """Pass on the whole text, in which `move` finds the move."""
        return ToolCall("move", {"text": text})

    def _observation(self) -> dict[str, Any]:
        return {"game": self._play.name, "move": self._play.moves, "max_moves": self._play.max_moves}


if __name__ == "__main__":
    load()  # before the server is ready: no session waits for the import
    serve(TextArena)

"""One game of TextArena in progress, by the library's own code; `python3 textarena_play.py FILE…` checks tasks."""

from __future__ import annotations

import inspect
import json
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from envserver.generic import parse_task
from envserver.textarena import DICE, game_module, moves_of, new_messages, rules_of
from textarena_games import GAMES, checked
from textarena_names import Chosen, InvalidGame, read_task
from textarena_words import word_module

MOST_DRAWS = 100
"""The maximum number of boards drawn from one seed, for games that may draw a board that is over at the start."""
_MEASURES = ("_get_percentage_completion", "_progress", "_calculate_progress")
"""Names of the method by which the library's games measure how much of them is done."""


def load() -> None:
    """Import every offered game, and read the dictionary that their words need; a second call does nothing.

    Raises:
        ImportError: TextArena or wonderwords is not installed, or a game is not in its place.
    """
    for folder in GAMES:
        _module(folder)
    _module("Wordle").WordleEnv()


def arguments(chosen: Chosen) -> dict[str, Any]:
    """Return all arguments of the class of a chosen game.

    Raises:
        InvalidGame: The parameters do not fit together.
    """
    made = getattr(_module(chosen.named.folder), chosen.named.class_name)
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(made).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    values = {**defaults, **chosen.parameters}
    if (fault := GAMES[chosen.named.folder].fault(values)) is not None:
        raise InvalidGame(f"config.parameters: {fault}")
    return values


class Play:
    """A game, from its opening to its reward."""

    def __init__(self, chosen: Chosen) -> None:
        """Draw the game.

        Raises:
            InvalidGame: The parameters do not fit together, or no board can be drawn from the seed.
        """
        self.name = chosen.name
        self.moves = 0
        self._title = GAMES[chosen.named.folder]
        self._generator = random.Random(chosen.seed)
        values = arguments(chosen)
        with DICE.of(self._generator):
            self._game = getattr(_module(chosen.named.folder), chosen.named.class_name)(**values)
            self._draw(chosen.seed)
        state = self._game.state
        state.set_invalid_move = _in_order(state.set_invalid_move)
        self.opening = new_messages(self._game)
        self._rules = rules_of(self.opening)

    def hide(self, prompt: str) -> None:
        """Read no move from a line that repeats one of *prompt*, the text that the agent sees first."""
        self._rules = rules_of(prompt)

    def _draw(self, seed: int) -> None:
        for attempt in range(MOST_DRAWS):
            try:
                self._game.reset(1, seed=seed + (attempt << 64))
            except (ZeroDivisionError, RuntimeError):  # lights that are out already; a room that cannot be built
                continue
            if not self._game.state.done:
                return
        raise InvalidGame(f"config.seed: no board can be drawn from {seed} with these parameters")

    @property
    def max_moves(self) -> int:
        return self._title.max_moves

    @property
    def is_over(self) -> bool:
        return self.has_ended or self.moves >= self.max_moves

    @property
    def has_ended(self) -> bool:
        """True if the game is over by the library's own rules."""
        return bool(self._game.state.done)

    def move(self, text: str) -> str:
        """Make the move in *text*, which has several in some games, and return the player's view.

        Raises:
            Exception: The library failed on the move. No known move makes it fail, so that its state is unknown then.
        """
        moves = moves_of(text, self._rules, most=self._title.at_once)
        action = ", ".join(f"[{self._title.move(move)}]" for move in moves)
        with DICE.of(self._generator):
            self._game.step(action.encode("ascii", "replace").decode())
        self.moves += 1
        self._game.state.logs.clear()  # nothing reads them, and they would grow for the whole game
        seen = new_messages(self._game)
        if self.has_ended:
            seen = f"{seen}\n{self._game.state.game_info[0].get('reason') or 'The game is over.'}".strip()
        elif self.is_over:
            seen = f"{seen}\nThat was the last of {self.max_moves} moves: the game is over.".strip()
        return seen

    def reward(self) -> float:
        """Return the reward of a game that is over: the library's own, or after the last move its measure of progress.

        Raises:
            ValueError: The library gives none from -1 to 1.
        """
        state = self._game.state
        if self.has_ended:
            return checked(self._title.reward(state.rewards[0]))
        measure = next((getattr(self._game, name) for name in _MEASURES if hasattr(self._game, name)), lambda: 0.0)
        with DICE.of(self._generator):
            return checked(self._title.reward(measure()))

    @property
    def form(self) -> str:
        """The form of a move, for the player."""
        return self._title.form

    @property
    def has_failed(self) -> bool:
        """True if the game ended by an invalid move."""
        return bool(self._game.state.game_info[0]["invalid_move"])


def _module(folder: str) -> Any:
    module: Any = word_module(folder) if GAMES[folder].needs_words else game_module(folder)
    module.print = _say_nothing  # the library writes notes for debugging to the standard output
    if GAMES[folder].at_once > 1:
        module.set = lambda moves: tuple(dict.fromkeys(moves))  # the order of a set of texts differs between processes
    if folder == "RushHour":
        module.RushHourEnv._is_solvable = _can_leave
    return module


def _in_order(set_invalid_move: Callable[..., None]) -> Callable[..., None]:
    """Return the library's function for an invalid move; four of its games give it reason and reward the wrong way."""

    def ordered(reason: Any, reward: Any = -1.0) -> None:
        if isinstance(reward, str):
            reason, reward = reward, reason
        set_invalid_move(reason=reason, reward=reward)

    return ordered


def _can_leave(game: Any, vehicles: Sequence[Any]) -> bool:
    """Return True if the red car can leave. The library gives up after 1,000 positions, which take it a second."""
    side = game.BOARD_SIZE
    cars = [(car.row * side + car.col, 1 if car.horizontal else side, car.length) for car in vehicles]
    red = next(place for place, car in enumerate(vehicles) if car.vid == "X")
    ends = [side - car.length - (car.col if car.horizontal else car.row) for car in vehicles]
    begins = [-(car.col if car.horizontal else car.row) for car in vehicles]
    shapes = [
        {by: sum(1 << (at + (by + cell) * step) for cell in range(length)) for by in range(begin, end + 1)}
        for (at, step, length), begin, end in zip(cars, begins, ends, strict=True)
    ]
    start = (0,) * len(cars)
    known, waiting = {start}, deque([start])
    while waiting:
        moved = waiting.popleft()
        if moved[red] == ends[red]:
            return True
        full = sum(shape[by] for shape, by in zip(shapes, moved, strict=True))
        for car, by in enumerate(moved):
            free = ~(full ^ shapes[car][by])
            for after in (by - 1, by + 1):
                if (cells := shapes[car].get(after)) is not None and cells & free == cells:
                    position = (*moved[:car], after, *moved[car + 1 :])
                    if position not in known:
                        known.add(position)
                        waiting.append(position)
    return False


def _say_nothing(*_: object, **__: object) -> None:
    pass


def main(paths: Iterable[str]) -> int:
    """Open the games of all lines of *paths*, tasks as JSON; return 1 if a game cannot be played."""
    faults = tasks = 0
    for line in (line for path in paths for line in Path(path).read_text("utf-8").split("\n") if line):
        tasks += 1
        task = parse_task(json.loads(line))
        try:
            Play(read_task(task, seed=0))
        except InvalidGame as error:
            faults += 1
            print(f"{task.id}: {error}")
    print(f"{len(GAMES)} games, {tasks} task lines, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The offered games of TextArena: their modules, their parameters with bounds, and their peculiarities.

Some games run without a download but are not offered. `FifteenPuzzle`: every other board is unsolvable, and solving a
board raises. `PegJump`: its jumps differ from its displayed board. `Bandit`: the worse of two wrong answers scores
more. `Sokoban` needs numpy, `RushHour` may offer a board without a solution, and `Blackjack` is luck.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from game_play import MAX_TURNS, InvalidGame
from game_progress import (
    Measure,
    cells_filled,
    cells_uncovered,
    clues_met,
    columns_added_up,
    disks_in_place,
    lights_turned_off,
    numbers_excluded,
    pegs_placed,
    target_approached,
    tiles_doubled,
    way_covered,
)

DIRECTIONS = ("[up]", "[down]", "[left]", "[right]")


@dataclass(frozen=True, slots=True)
class Number:
    """A parameter that is a whole number."""

    default: int
    least: int
    most: int

    def read(self, value: object) -> int:
        """Return *value* as a parameter of this kind.

        Raises:
            ValueError: *value* is not of this kind; this also applies to the other kinds.
        """
        if not isinstance(value, int) or isinstance(value, bool) or not self.least <= value <= self.most:
            raise ValueError(f"must be a whole number from {self.least} to {self.most}")
        return value


@dataclass(frozen=True, slots=True)
class Flag:
    """A parameter that is true or false."""

    default: bool

    def read(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value


@dataclass(frozen=True, slots=True)
class Numbers:
    """A parameter that is a list of whole numbers."""

    default: tuple[int, ...]
    most: int
    largest: int

    def read(self, value: object) -> list[int]:
        numbers = value if isinstance(value, list) else []
        fit = all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= self.largest for n in numbers)
        if not 2 <= len(numbers) <= self.most or not fit:
            raise ValueError(f"must be a list of 2 to {self.most} whole numbers from 1 to {self.largest}")
        return list(numbers)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A text parameter that must match a pattern."""

    default: str
    form: str
    """A regular expression for the whole text."""

    def read(self, value: object) -> str:
        if not isinstance(value, str) or len(value) > 60 or not re.fullmatch(self.form, value):
            raise ValueError("must be an addition of two to four words in capitals, such as 'SEND + MORE = MONEY'")
        return value


Parameter: TypeAlias = Number | Flag | Numbers | Pattern


def never_lost(_: Any, __: str) -> None:
    """Return None: the game's own code ends it."""


def never_wrong(_: Mapping[str, Any]) -> None:
    """Return None: each parameter is checked on its own."""


@dataclass(frozen=True, slots=True)
class Title:
    """One game of TextArena."""

    module: str
    """Its folder below `textarena.envs`."""
    class_name: str
    move_form: str
    parameters: Mapping[str, Parameter]
    max_turns: int
    """The default of the task's `max_turns`."""
    measure: Measure
    """Measures the player's progress."""
    moves: Sequence[str] = ()
    """The moves, if the game always offers the same moves."""
    takes_turn_limit: bool = True
    """True if the game shows the limit to the player, through its parameter `max_turns`."""
    optimal_turns: Callable[[Mapping[str, Any]], int | None] = field(default=lambda _: None)
    """Returns the fewest turns that win with these parameters, if known."""
    fault: Callable[[Mapping[str, Any]], str | None] = never_wrong
    """Returns the fault in a combination of parameters that are valid one by one, or None."""
    is_won: Callable[[Any], bool] = field(default=lambda game: bool(game.state.rewards[0] >= 1))
    """Returns True if a game that ended, and not by an invalid move, is won."""
    lost_by: Callable[[Any, str], str | None] = never_lost
    """Returns why a move loses the game at once, or None. For losses that TextArena takes for an invalid move."""


def _guesses(given: Mapping[str, Any]) -> str | None:
    return None if given["min_number"] < given["max_number"] else "min_number must be below max_number"


def _code(given: Mapping[str, Any]) -> str | None:
    if given["duplicate_numbers"] or given["code_length"] <= given["num_numbers"]:
        return None
    return "a code without duplicates cannot be longer than num_numbers"


def _holes(given: Mapping[str, Any]) -> str | None:
    most = given["size"] ** 2 // 3
    return None if given["num_holes"] <= most else f"num_holes must be at most {most} for this size"


def _mines(given: Mapping[str, Any]) -> str | None:
    most = given["rows"] * given["cols"] // 3
    return (
        None
        if given["num_mines"] <= most and given["rows"] * given["cols"] - 9 > most
        else (f"num_mines must be at most {most} for this size, and the board have more than 13 cells")
    )


def _mine(game: Any, move: str) -> str | None:
    """Return that *move* opens a mine. TextArena would keep the cell covered, and let the player try another one."""
    found = re.fullmatch(r"(\d+)\s(\d+)", move)
    if found is None or game.first_move:
        return None
    row, column = int(found[1]), int(found[2])
    is_mine = row < game.rows and column < game.cols and game.grid[row][column] == -1
    return f"You hit a mine at ({row}, {column}). The game is lost." if is_mine else None


def _letters(given: Mapping[str, Any]) -> str | None:
    letters = set(re.findall("[A-Z]", given["equation"]))
    return None if len(letters) <= 10 else "equation must have at most 10 different letters"


def _tile(given: Mapping[str, Any]) -> str | None:
    return None if given["target_tile"].bit_count() == 1 else "target_tile must be a power of two"


TITLES: Mapping[str, Title] = {
    "guess_the_number": Title(
        "GuessTheNumber",
        "GuessTheNumberEnv",
        "a number in square brackets, such as [5]",
        {"min_number": Number(1, 0, 10_000), "max_number": Number(20, 1, 10_000)},
        max_turns=10,
        measure=numbers_excluded,
        fault=_guesses,
    ),
    "tower_of_hanoi": Title(
        "TowerOfHanoi",
        "TowerOfHanoiEnv",
        "the source tower and the target tower, such as [A C]",
        {"num_disks": Number(3, 2, 8)},
        max_turns=100,
        measure=disks_in_place,
        optimal_turns=lambda given: int(2 ** given["num_disks"]) - 1,
    ),
    "frozen_lake": Title(
        "FrozenLake",
        "FrozenLakeEnv",
        "one of " + ", ".join(DIRECTIONS),
        {"size": Number(4, 3, 10), "num_holes": Number(3, 0, 33)},
        max_turns=100,
        measure=way_covered,
        moves=DIRECTIONS,
        takes_turn_limit=False,
        fault=_holes,
    ),
    "mastermind": Title(
        "Mastermind",
        "MastermindEnv",
        "the digits with spaces between, such as [2 1 4 5]",
        {"code_length": Number(4, 2, 8), "num_numbers": Number(6, 2, 9), "duplicate_numbers": Flag(False)},
        max_turns=20,
        measure=pegs_placed,
        fault=_code,
    ),
    "lights_out": Title(
        "LightsOut",
        "LightsOutEnv",
        "the row and the column of a light, such as [0 2]",
        {"size": Number(5, 2, 9)},
        max_turns=50,
        measure=lights_turned_off,
    ),
    "2048": Title(
        "Game2048",
        "Game2048Env",
        "one of " + ", ".join(DIRECTIONS),
        {"target_tile": Number(128, 8, 2048), "board_size": Number(4, 3, 6)},
        max_turns=MAX_TURNS,
        measure=tiles_doubled,
        moves=DIRECTIONS,
        takes_turn_limit=False,
        fault=_tile,
        # The game's own reward can be 1 for a lost board with a high score.
        is_won=lambda game: bool(max(map(max, game.state.game_state["board"])) >= game.target_tile),
    ),
    "minesweeper": Title(
        "Minesweeper",
        "MinesweeperEnv",
        "the row and the column of a cell, such as [3 2]",
        {"rows": Number(8, 4, 16), "cols": Number(8, 4, 16), "num_mines": Number(10, 1, 60)},
        max_turns=100,
        measure=cells_uncovered,
        fault=_mines,
        lost_by=_mine,
    ),
    "sudoku": Title(
        "Sudoku",
        "SudokuEnv",
        "row, column and digit, each from 1 to 9, such as [5 3 7]",
        # With 30 clues, the game's own default, its search for a puzzle with one solution may take a second.
        {"clues": Number(50, 36, 80)},
        max_turns=100,
        measure=cells_filled,
    ),
    "cryptarithm": Title(
        "Cryptarithm",
        "CryptarithmEnv",
        "a letter and its digit, such as [A 5]",
        {"equation": Pattern("SEND + MORE = MONEY", r"[A-Z]{1,8}( \+ [A-Z]{1,8}){1,3} = [A-Z]{1,9}")},
        max_turns=100,
        measure=columns_added_up,
        fault=_letters,
    ),
    "slitherlink": Title(
        "Slitherlink",
        "SlitherlinkEnv",
        "h or v, row and column of the edge, such as [h 0 1]",
        {"rows": Number(4, 2, 8), "cols": Number(4, 2, 8)},
        max_turns=100,
        measure=clues_met,
    ),
    "countdown": Title(
        "Countdown",
        "CountdownEnv",
        "two indices and an operator out of + - * /, such as [0 2 *]",
        {"numbers": Numbers((100, 75, 6, 4, 3, 2), 8, 100), "target": Number(532, 1, 9_999)},
        max_turns=12,
        measure=target_approached,
    ),
}

ALIASES: Mapping[str, str] = {
    **{f"{title.module}-v0".lower(): name for name, title in TITLES.items()},
    **{title.module.lower(): name for name, title in TITLES.items()},
    "2048-v0": "2048",
}
"""TextArena's own ids, in lower case."""


def read_parameters(name: str, given: object) -> dict[str, Any]:
    """Read `config.parameters` of the game *name*; missing parameters have their defaults.

    Raises:
        InvalidGame: A parameter is unknown, or a value is out of bounds.
    """
    title = TITLES[name]
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise InvalidGame("config.parameters: must be an object")
    for key in given:
        if key not in title.parameters:
            offered = ", ".join(title.parameters)
            raise InvalidGame(f"config.parameters: {name} has no parameter {key!r}; there are {offered}")
    read: dict[str, Any] = {}
    for key, parameter in title.parameters.items():
        default = list(parameter.default) if isinstance(parameter, Numbers) else parameter.default
        try:
            read[key] = parameter.read(given.get(key, default))
        except ValueError as error:
            raise InvalidGame(f"config.parameters.{key}: {error}") from error
    if wrong := title.fault(read):
        raise InvalidGame(f"config.parameters: {wrong}")
    return read

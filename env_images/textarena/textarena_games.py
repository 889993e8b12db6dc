"""The single-player games of TextArena: which are offered, how a move looks, and the bounds of their parameters.

A game is a folder below `textarena.envs`; `textarena_names` has the registered names, of which one game has several.
The bounds keep every board small enough to be drawn in a session: the library itself accepts any values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

MAX_MOVES = 600
"""The maximum number of moves of a game, with invalid ones: more than twice any limit that the library itself sets."""


@dataclass(frozen=True, slots=True)
class Number:
    """A parameter that is a whole number from *least* to *most*."""

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

    def read(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value


@dataclass(frozen=True, slots=True)
class OneOf:
    """A parameter that is one of some texts."""

    texts: tuple[str, ...]

    def read(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.texts:
            raise ValueError(f"must be one of {', '.join(self.texts)}")
        return value


@dataclass(frozen=True, slots=True)
class Several:
    """A parameter that is a list of *least* to *most* numbers."""

    kind: Number
    least: int
    most: int

    def read(self, value: object) -> list[int]:
        if not isinstance(value, list | tuple) or not self.least <= len(value) <= self.most:
            raise ValueError(f"must be a list of {self.least} to {self.most} numbers")
        return [self.kind.read(one) for one in value]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A text parameter that matches a regular expression as a whole."""

    form: str
    example: str

    def read(self, value: object) -> str:
        if not isinstance(value, str) or len(value) > 60 or not re.fullmatch(self.form, value):
            raise ValueError(f"must be a text such as {self.example!r}")
        return value


Parameter: TypeAlias = Number | Flag | OneOf | Several | Pattern
Given: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Title:
    """One game."""

    form: str
    """A move, for an agent whose move could not be read."""
    parameters: Mapping[str, Parameter]
    needs_words: bool = False
    """True if its module asks for nltk's lists of words (see `textarena_words`)."""
    max_moves: int = MAX_MOVES
    at_once: int = 1
    """The most moves in one text. The library takes more of them in all games, and in these they are needed."""
    fault: Callable[[Given], str | None] = field(default=lambda _: None)
    """Returns the fault in a combination of parameters that are valid one by one, or None."""
    move: Callable[[str], str] = field(default=lambda move: move)
    """Returns the move that the library gets."""
    reward: Callable[[float], float] = field(default=lambda reward: reward)
    """Returns the reward of a game for which the library gives *reward*."""


def _two_of(given: Given, lower: str, upper: str) -> str | None:
    return None if given[lower] <= given[upper] else f"{lower} must not be above {upper}"


def _share(given: Given, number: str, of: int) -> str | None:
    most = of // 3
    return None if given[number] <= most else f"{number} must be at most {most}, a third of the cells"


def _power(given: Given) -> str | None:
    return None if given["target_tile"].bit_count() == 1 else "target_tile must be a power of two"


def _code(given: Given) -> str | None:
    if given["duplicate_numbers"] or given["code_length"] <= given["num_numbers"]:
        return None
    return "a code without duplicates cannot be longer than num_numbers"


def _letters(given: Given) -> str | None:
    letters = set(re.findall("[A-Z]", given["equation"]))
    return None if len(letters) <= 10 else "equation must have at most 10 different letters"


def _room(given: Given) -> str | None:
    return None if given["num_boxes"] <= min(given["dim_room"]) - 3 else "dim_room is too small for num_boxes"


def _three_cards(move: str) -> str:
    """Return *move*, or a move that the library refuses if it names a card twice: the library takes it for a set."""
    cards = [number.strip().lstrip("0") for number in move.split(",")]
    return move if len(set(cards)) == len(cards) else "a card twice"


def _direction(move: str) -> str:
    """Return *move*, or one that the library refuses: it takes any text with the word "a" for a slide to the left."""
    return move if move.lower() in ("up", "down", "left", "right", "w", "a", "s", "d") else "no direction"


TURNS = Number(1, 290)
COORDINATES = "the row and the column, such as [3 2]"
DIRECTIONS = "one of [up], [down], [left], [right]"

GAMES: Mapping[str, Title] = {
    "Game2048": Title(
        DIRECTIONS,
        {"target_tile": Number(8, 131_072), "board_size": Number(2, 10)},
        max_moves=10_000,
        fault=_power,
        move=_direction,
    ),
    "Blackjack": Title("[Hit] or [Stand]", {"num_hands": Number(1, 25)}),
    "Countdown": Title(
        "two indices and an operator, such as [0 2 *]",
        {"numbers": Several(Number(1, 100), 2, 8), "target": Number(1, 9_999), "max_turns": TURNS},
    ),
    "Crosswords": Title(
        "row, column and letter, such as [0 2 e]",
        {"hardcore": Flag(), "max_turns": TURNS, "num_words": Number(1, 8)},
        at_once=100,
    ),
    "Cryptarithm": Title(
        "a letter and its digit, such as [A 5]",
        {
            "equation": Pattern(r"[A-Z]{1,8}( \+ [A-Z]{1,8}){1,3} = [A-Z]{1,9}", "SEND + MORE = MONEY"),
            "max_turns": TURNS,
        },
        fault=_letters,
    ),
    "FrozenLake": Title(
        DIRECTIONS,
        {"size": Number(3, 10), "num_holes": Number(0, 33), "randomize_start_goal": Flag()},
        fault=lambda given: _share(given, "num_holes", given["size"] ** 2),
    ),
    "GuessTheNumber": Title(
        "a number, such as [5]",
        {"min_number": Number(0, 10_000), "max_number": Number(0, 10_000), "max_turns": TURNS},
        fault=lambda given: _two_of(given, "min_number", "max_number"),
    ),
    "Hangman": Title("a letter or the word, such as [e]", {"hardcore": Flag()}, needs_words=True, max_moves=50),
    "LightsOut": Title(
        COORDINATES,
        {"size": Number(2, 9), "max_turns": TURNS},
        reward=lambda reward: max(-1.0, reward),  # from 1 light at the start to 25 the library counts -24
    ),
    "LogicPuzzle": Title(
        "an item of each side and O or X, such as [alice park X]",
        {"difficulty": OneOf(("easy", "medium", "hard")), "max_turns": TURNS},
        at_once=100,
    ),
    "Mastermind": Title(
        "the numbers with spaces between, such as [2 1 4 5]",
        {
            "code_length": Number(2, 12),
            "num_numbers": Number(2, 20),
            "duplicate_numbers": Flag(),
            "max_turns": TURNS,
        },
        fault=_code,
    ),
    "Minesweeper": Title(
        COORDINATES,
        {"rows": Number(4, 16), "cols": Number(4, 16), "num_mines": Number(1, 85), "max_turns": TURNS},
        fault=lambda given: _share(given, "num_mines", given["rows"] * given["cols"]),
    ),
    "PegJump": Title("from which hole to which, such as [4 1]", {"initial_empty": Number(1, 15)}),
    "RushHour": Title(
        "a car and + or -, such as [A+]", {"difficulty": OneOf(("easy", "medium", "hard"))}, max_moves=200
    ),
    "Secretary": Title("[accept] or [continue]", {"N": Number(2, 100)}),
    "Set": Title(
        "three different cards, such as [1, 4, 11]",
        {},
        move=_three_cards,
        reward=lambda score: score / 20 if score > 0 else score,  # the library's score of 20 turns
    ),
    "Slitherlink": Title(
        "h or v, row and column of an edge, such as [h 0 1]",
        {"rows": Number(2, 8), "cols": Number(2, 8), "max_turns": TURNS},
    ),
    "Sokoban": Title(
        DIRECTIONS,
        {"dim_room": Several(Number(5, 6), 2, 2), "num_boxes": Number(1, 3), "max_turns": TURNS},
        fault=_room,
    ),
    "Sudoku": Title("row, column and digit, such as [5 3 7]", {"clues": Number(36, 80), "max_turns": TURNS}),
    "ThreeCardMonte": Title("a cup, such as [1]", {"num_cups": Number(3, 20), "steps": Number(0, 100)}),
    "TowerOfHanoi": Title(
        "the source and the target tower, such as [A C]", {"num_disks": Number(1, 8), "max_turns": TURNS}
    ),
    "WordLadder": Title(
        "a word, such as [word]",
        {"min_distance": Number(1, 15), "max_distance": Number(1, 19), "max_turns": TURNS},
        needs_words=True,
        fault=lambda given: _two_of(given, "min_distance", "max_distance"),
    ),
    "Wordle": Title(
        "a word, such as [apple]",
        {"word_length": Number(3, 10), "num_guesses": Number(1, 50), "hardcore": Flag()},
        needs_words=True,
    ),
    "WordSearch": Title(
        "row and column of the first and of the last letter, such as [1 1 1 5]",
        {"hardcore": Flag(), "max_turns": TURNS},
        needs_words=True,
        max_moves=100,
    ),
}

EXCLUDED: Mapping[str, str] = {
    "BabyAiText": "it needs the packages gym, babyai and babyai_text, which TextArena does not require",
    "Bandit": "the library gives the right button 0 and a wrong one more: it compares a button with the table of all",
    "FifteenPuzzle": "every other board has no solution, and to solve a board raises in the library",
    "GuessWho": "a language model answers the player's questions over the network",
    "Klondike": "its module is no valid Python, so that it cannot be imported",
    "TwentyQuestions": "a language model answers the player's questions over the network",
}
"""Single-player games that are not offered, with the reason."""

EXCLUDED_NAMES: Mapping[str, str] = {
    "Sokoban-v0-medium": "the library takes minutes to draw a room of 8 x 8 with five boxes",
    "Sudoku-v0-hard": "the library takes half a minute and more to find a puzzle of 20 clues with one solution",
}
"""Names of offered games that are not offered, with the reason."""

FIXED = frozenset({"Countdown", "Cryptarithm", "PegJump", "TowerOfHanoi"})
"""Games that begin alike with every seed: their names and parameters say everything about the board."""


def checked(reward: object) -> float:
    """Return *reward* as a number from -1 to 1.

    Raises:
        ValueError: It is no such number, so that the game has no reward.
    """
    if isinstance(reward, int | float) and math.isfinite(reward) and -1 <= reward <= 1:
        return float(reward)
    raise ValueError(f"the game ended with the reward {reward!r}, which is no number from -1 to 1")

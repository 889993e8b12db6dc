"""Rewards of `textarena`: a reference wins each name, and a player that looks at nothing earns what is listed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pytest

from tests.answers.groups import CONSTANT_AT_MOST, IS_WHOLE, best_cycle, module
from tests.answers.textarena import cycle_moves, cycle_reward, has_reference, opened, win
from tests.envs.bundled import RecordProperty
from tests.runner.lanes import CERTIFIED

NAMES: Final = module("textarena", "textarena_names")
FOLDERS: Final[dict[str, str]] = {name: NAMES.registered()[name].folder for name in NAMES.offered()}
SAMPLE: Final = sorted({folder: name for name, folder in reversed(FOLDERS.items())}.values())
"""One name of each game. The cycles are tried in these, because the names of a game differ in its size only."""
PLAYED: Final = sorted(FOLDERS) if IS_WHOLE else SAMPLE
SEEDS: Final = range(8)

PAID: Final[Mapping[str, float]] = {
    "Countdown": 0.57,
    "Game2048": 0.07,
    "PegJump": 0.08,
    "RushHour": 0.5,
    "Slitherlink": 0.75,
    "WordLadder": 0.8,
}
"""The most that a player without a valid move earns, in games whose progress counts the board at the start too."""

CYCLES: Final[Mapping[str, tuple[float, str]]] = {
    "Blackjack": (0.6, "to stand at once wins four hands in ten"),
    "Countdown": (1.0, "each seed has the same numbers and target, and the first move comes close"),
    "Cryptarithm": (0.5, "letters that are assigned wrongly count as progress"),
    "FrozenLake": (0.9, "the goal is always in the same corner, and the way to a hole counts"),
    "Game2048": (1.0, "the tile of the smallest name is made by any moves"),
    "GuessTheNumber": (1.0, "the progress is the distance of the last guess"),
    "Hangman": (0.5, "frequent letters are letters of most words"),
    "LightsOut": (0.3, "a press turns more lights off than on in some boards"),
    "Mastermind": (0.7, "right numbers in wrong places count"),
    "Minesweeper": (0.4, "a first cell is never a mine and opens many others"),
    "PegJump": (0.5, "each seed has the same board, and each jump counts"),
    "RushHour": (0.5, "the board at the start counts"),
    "Secretary": (0.6, "the first value is the best of five in a fifth of the games"),
    "Slitherlink": (0.8, "clues of an empty board count"),
    "Sokoban": (0.5, "some boxes need one push"),
    "ThreeCardMonte": (0.7, "there are three cups"),
    "TowerOfHanoi": (0.4, "each seed has the same towers, and each disk on the last one counts"),
    "WordLadder": (0.8, "letters that both words share count"),
    "WordSearch": (0.3, "long words lie in the middle of the board"),
    "Wordle": (0.5, "letters of the last guess count, also in wrong places"),
}
"""Games in which a cycle of at most four moves earns more than `CONSTANT_AT_MOST` on average: the most, and why."""


@pytest.mark.parametrize("name", [name for name in PLAYED if has_reference(name)])
def test_a_reference_wins(name: str) -> None:
    assert [win(name, seed)[0] for seed in SEEDS[:2]] == [1.0, 1.0]


@pytest.mark.parametrize("name", PLAYED)
def test_a_player_without_a_valid_move_earns_what_the_library_gives_for_the_start(name: str) -> None:
    for seed in SEEDS:
        assert cycle_reward(name, seed, ["no move"]) <= PAID.get(FOLDERS[name], 0.0), seed
        assert cycle_reward(name, seed, [""]) <= PAID.get(FOLDERS[name], 0.0), seed


@pytest.mark.parametrize("name", PLAYED)
def test_an_echo_of_the_opening_earns_what_a_move_that_is_not_valid_earns(name: str) -> None:
    play = opened(name, 1)
    while not play.is_over:
        play.move(play.opening)

    assert play.reward() <= PAID.get(FOLDERS[name], 0.0)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_player_that_looks_at_nothing_earns_what_is_listed(name: str, record_property: RecordProperty) -> None:
    moves = cycle_moves(name, range(1000, 1008))

    mean, cycle = best_cycle(SEEDS, moves, lambda seed, cycle: cycle_reward(name, seed, cycle))

    cycled = {"group": f"textarena: {name}", "tasks": len(SEEDS), "constant": ", ".join(cycle), "mean": mean}
    record_property(CERTIFIED, cycled)
    assert mean <= CYCLES.get(FOLDERS[name], (CONSTANT_AT_MOST, ""))[0], cycle

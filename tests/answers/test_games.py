"""Rewards of `game`: a player that looks at nothing does not win, and one that opens mines does not either."""

from __future__ import annotations

from typing import Any

import pytest

from tests.answers.groups import (
    CONSTANT_AT_MOST,
    CYCLE_AT_MOST,
    IS_WHOLE,
    SEVERAL_GUESSES,
    best_cycle,
    cycle_moves,
    game_tasks,
    module,
)
from tests.envs.bundled import RecordProperty
from tests.runner.lanes import CERTIFIED

TASKS = game_tasks()
FEW_MOVES = ("grid", "frozen_lake", "2048")
"""Titles in which `make certify` tries every cycle."""


def mines_reward(task: dict[str, Any]) -> float:
    """Return the reward of a player that opens a mine before each further safe cell."""
    game, max_turns = module("game", "game_config").read_game(task["config"], seed=0)
    board = game._game
    game.play(f"{board.rows // 2} {board.cols // 2}")
    cells = [(row, column) for row in range(board.rows) for column in range(board.cols)]
    mines = [cell for cell in cells if board.grid[cell[0]][cell[1]] == -1]
    turns = 1
    for row, column in cells:
        if board.grid[row][column] == -1 or board.revealed[row][column]:
            continue
        for place in (mines[turns % len(mines)], (row, column)):
            if not game.is_over and turns < max_turns:
                game.play(f"{place[0]} {place[1]}")
                turns += 1
    outcome = module("game", "game_play").outcome_of(game, turns=turns)
    return float(module("game", "game_rewards").read_evaluation(task["evaluation"], optimal_turns=None)(outcome))


@pytest.mark.parametrize("title", sorted(TASKS))
def test_a_player_that_looks_at_nothing_earns_next_to_nothing(title: str, record_property: RecordProperty) -> None:
    tasks = TASKS[title]
    solvers = module("game", "game_solvers")
    moves = cycle_moves(title, tasks)

    if IS_WHOLE and title in FEW_MOVES:
        means = (
            (sum(solvers.cycle_reward(task, cycle) for task in tasks) / len(tasks), cycle)
            for cycle in solvers.cycles(moves)
        )
        mean, cycle = max(means)
    else:
        mean, cycle = best_cycle(tasks, moves, solvers.cycle_reward)

    cycled = {"group": f"game: {title}", "tasks": len(tasks), "constant": ", ".join(cycle), "mean": mean}
    record_property(CERTIFIED, cycled)
    assert mean <= (CYCLE_AT_MOST if title in SEVERAL_GUESSES else CONSTANT_AT_MOST), cycle


@pytest.mark.parametrize("title", sorted(TASKS))
def test_moves_that_are_not_valid_and_an_echo_earn_nothing(title: str) -> None:
    solvers = module("game", "game_solvers")

    for task in TASKS[title]:
        assert solvers.cycle_reward(task, ["nothing"]) == 0.0
        assert solvers.cycle_reward(task, [task["instruction"]]) == 0.0


@pytest.mark.parametrize("title", sorted(TASKS))
def test_an_echo_of_the_whole_prompt_earns_nothing(title: str) -> None:
    for task in TASKS[title]:
        world = module("game", "game_server").GameWorld()
        world.task = task
        (prompt,) = world.reset(task, seed=0)
        result = world.act(prompt.text)
        while not result.finished:
            result = world.act(prompt.text)

        assert result.reward == 0.0, task["id"]


@pytest.mark.parametrize("task", TASKS["minesweeper"], ids=lambda task: task["id"])
def test_a_player_that_opens_mines_earns_nothing(task: dict[str, Any]) -> None:
    assert mines_reward(task) == 0.0

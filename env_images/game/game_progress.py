"""The player's progress in TextArena's games: 0 at the start, and only for what is right.

TextArena's own measures are not used. They pay for letters that are assigned wrongly, for the given numbers of
`countdown` before any is combined, for a step into a hole, and for clues that an empty board satisfies.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import product
from typing import Any, TypeAlias

Place: TypeAlias = tuple[int, int]
Measure: TypeAlias = Callable[[Any], Callable[[], float]]
"""Takes a game at its start, and returns a function that measures the progress, in [0, 1]."""


def numbers_excluded(game: Any) -> Callable[[], float]:
    """Measure how far the answers narrow down the number: the share of its bits that are known."""

    def measured() -> float:
        least, most = game.min_number, game.max_number
        for guess, hint in game.state.game_state["guess_history"]:
            if hint == "lower":
                most = min(most, guess - 1)
            else:
                least = max(least, guess + 1)
        left, number = most - least + 1, game.max_number - game.min_number + 1
        return 1.0 - math.log(left) / math.log(number) if left > 0 else 0.0

    return measured


def pegs_placed(game: Any) -> Callable[[], float]:
    """Measure the share of right places in the last guess, above the share of a blind guess."""
    blind = 1 / game.num_numbers

    def measured() -> float:
        history = game.state.game_state["history"]
        share = history[-1]["black"] / game.code_length if history else 0.0
        return float(max(0.0, (share - blind) / (1.0 - blind)))

    return measured


def disks_in_place(game: Any) -> Callable[[], float]:
    """Measure the share of the disks that are where they end, from the largest."""

    def measured() -> float:
        placed = game.state.game_state["towers"]["C"]
        right = 0
        while right < len(placed) and placed[right] == game.num_disks - right:
            right += 1
        return float(right / game.num_disks)

    return measured


def way_covered(game: Any) -> Callable[[], float]:
    """Measure the share of the shortest way around the holes that the player has covered; 0 in a hole."""
    state = game.state.game_state
    grid, goal = state["grid"], tuple(state["goal_pos"])
    distances: dict[Place, int] = {goal: 0}
    queue = deque([goal])
    while queue:
        row, column = queue.popleft()
        for place in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            is_inside = 0 <= place[0] < len(grid) and 0 <= place[1] < len(grid)
            if is_inside and place not in distances and grid[place[0]][place[1]] != "H":
                distances[place] = distances[row, column] + 1
                queue.append(place)
    whole = distances[tuple(state["player_pos"])]

    def measured() -> float:
        left = distances.get(tuple(state["player_pos"]), whole)
        return max(0.0, 1.0 - left / whole)

    return measured


def lights_turned_off(game: Any) -> Callable[[], float]:
    """Measure the share of the lights that are off now and were on, less the lights that are on and were off."""
    grid = game.state.game_state["grid"]
    whole = sum(map(sum, grid))
    return lambda: max(0.0, 1.0 - sum(map(sum, game.state.game_state["grid"])) / whole)


def tiles_doubled(game: Any) -> Callable[[], float]:
    """Measure how much of the target tile the largest tile has gained since the start."""

    def largest() -> int:
        return int(max(map(max, game.state.game_state["board"])))

    first = largest()
    return lambda: max(0.0, (largest() - first) / (game.target_tile - first))


def cells_uncovered(game: Any) -> Callable[[], float]:
    """Measure the share of the safe cells that were uncovered after the first move, which is always safe."""

    def measured() -> float:
        if game.first_move:
            return 0.0
        given = _opened_at(game, game.initial_move_pos)
        safe = game.rows * game.cols - game.num_mines - len(given)
        opened = sum(
            game.revealed[row][column] and game.grid[row][column] != -1 and (row, column) not in given
            for row in range(game.rows)
            for column in range(game.cols)
        )
        return float(opened / safe) if safe else 0.0

    return measured


def _opened_at(game: Any, first: Place) -> set[Place]:
    """Return the cells that a first move opens."""
    opened, queue = {first}, deque([first])
    while queue:
        row, column = queue.popleft()
        if game.grid[row][column] != 0:
            continue
        for place in product(range(row - 1, row + 2), range(column - 1, column + 2)):
            if place not in opened and 0 <= place[0] < game.rows and 0 <= place[1] < game.cols:
                opened.add(place)
                queue.append(place)
    return opened


def cells_filled(game: Any) -> Callable[[], float]:
    """Measure the share of the empty cells that have their digit."""
    empty = [place for place in product(range(9), repeat=2) if game.game_board[place[0]][place[1]] == 0]

    def measured() -> float:
        board = game.state.game_state["board"]
        right = sum(board[row][column] == game.full_grid[row][column] for row, column in empty)
        return right / len(empty) if empty else 0.0

    return measured


def columns_added_up(game: Any) -> Callable[[], float]:
    """Measure the share of the sum's columns, from the right, that add up; 0 for a complete table, which is wrong."""
    length = max(map(len, (*game.addends, game.result)))

    def measured() -> float:
        if len(game.mapping) == len(game.letters):
            return 0.0
        carry = right = 0
        for column in range(1, length + 1):
            above = [word[-column] for word in game.addends if len(word) >= column]
            below = [game.result[-column]] if len(game.result) >= column else []
            if any(letter not in game.mapping for letter in (*above, *below)):
                break
            carry, digit = divmod(carry + sum(game.mapping[letter] for letter in above), 10)
            if digit != (game.mapping[below[0]] if below else 0):
                break
            right += 1
        return right / length

    return measured


def clues_met(game: Any) -> Callable[[], float]:
    """Measure the share of the clues that are met, without the clues that an empty board meets."""
    clues = [
        (row, column) for row, line in enumerate(game.clues) for column, clue in enumerate(line) if clue is not None
    ]

    def met() -> int:
        return sum(game._cell_edge_count(*place) == game.clues[place[0]][place[1]] for place in clues)

    first = met()
    return lambda: max(0.0, (met() - first) / (len(clues) - first)) if len(clues) > first else 0.0


def target_approached(game: Any) -> Callable[[], float]:
    """Measure how much closer the best result is to the target than the closest given number."""
    first = abs(game.best_value - game.target)
    return lambda: max(0.0, 1.0 - abs(game.best_value - game.target) / first) if first else 0.0

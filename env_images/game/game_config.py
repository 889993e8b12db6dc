"""Reads a task's `config` and makes its game; `python3 game_config.py FILE…` checks tasks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from envserver.generic import GenericTask, RewardCall, parse_task
from game_grid import Grid
from game_levels import read_level
from game_play import MAX_TURNS, Game, InvalidGame
from game_rewards import read_evaluation
from game_textarena import TextArenaGame
from game_titles import ALIASES, TITLES, read_parameters


def read_task(task: GenericTask, *, seed: int) -> tuple[Game, int, RewardCall]:
    """Return a task's game, its number of turns, and what gives the reward.

    Raises:
        ValueError: The task has no game that can be played and judged.
    """
    game, max_turns = read_game(task.config, seed=seed)
    return game, max_turns, read_evaluation(task.evaluation, optimal_turns=game.optimal_turns)


def read_game(config: Mapping[str, Any], *, seed: int) -> tuple[Game, int]:
    """Return the game of a task's `config` and its number of turns.

    Args:
        config: `{"game": "grid", "level": …}` or `{"game": <a title of game_titles>, "parameters": …}`; `seed` and
            `max_turns` go with both.
        seed: The seed if the configuration has no seed.

    Raises:
        InvalidGame: There is no such game, or a value is out of bounds.
    """
    named = config.get("game")
    title = ALIASES.get(str(named).lower(), named)
    if not isinstance(title, str) or (title != Grid.name and title not in TITLES):
        raise InvalidGame(f"config.game: no game {named!r:.80}; there are {', '.join((Grid.name, *TITLES))}")
    known = {"game", "seed", "max_turns", "num_players", "level" if title == Grid.name else "parameters"}
    if unknown := sorted(set(config) - known):
        raise InvalidGame(f"config.{unknown[0]}: unknown key; for {title} there are {', '.join(sorted(known))}")
    if config.get("num_players", 1) != 1:
        raise InvalidGame("config.num_players: every game here is for 1 player")
    seed = _whole(config, "seed", 0, 2**63, default=seed)
    if title == Grid.name:
        grid = Grid(read_level(config.get("level"), seed=seed))
        usual = min(MAX_TURNS, 2 * (grid.optimal_turns or 0) + 10)
        return grid, _whole(config, "max_turns", 1, MAX_TURNS, default=usual)
    max_turns = _whole(config, "max_turns", 1, MAX_TURNS, default=TITLES[title].max_turns)
    parameters = read_parameters(title, config.get("parameters"))
    return TextArenaGame(title, parameters, seed=seed, max_turns=max_turns), max_turns


def _whole(config: Mapping[str, Any], key: str, least: int, most: int, *, default: int) -> int:
    number = config.get(key, default)
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise InvalidGame(f"config.{key}: must be a whole number from {least} to {most}")
    return number


def main(paths: Iterable[str]) -> int:
    """Open the games of all tasks of *paths*, JSON lines; return 1 if a game cannot be played."""
    faults = tasks = 0
    for line in (line for path in paths for line in Path(path).read_text("utf-8").split("\n") if line):
        tasks += 1
        task = parse_task(json.loads(line))
        try:
            read_task(task, seed=0)
        except InvalidGame as error:
            faults += 1
            print(f"{task.id}: {error}")
    print(f"{len(TITLES) + 1} games, {tasks} tasks, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The registered names of TextArena's games, read from the library's own list, and the tasks that name them.

The list is a Python module that would import the judges and wrappers of all games, so it is parsed and not run.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from envserver.generic import GenericTask
from textarena_games import EXCLUDED, EXCLUDED_NAMES, GAMES

VARIANTS = ("-raw", "-train")
"""Endings of names for the same games in other wrappers, which change the texts only: the name itself here."""
_KEYS = ("game", "seed", "parameters")


class InvalidGame(ValueError):
    """The task names no game that can be played; the message names the place and the reason."""


class Named(NamedTuple):
    """A registered name."""

    folder: str
    class_name: str
    parameters: Mapping[str, Any]


class Chosen(NamedTuple):
    """The game of a task."""

    name: str
    named: Named
    parameters: Mapping[str, Any]
    """The name's own parameters and the task's. Others have the defaults of the game's class."""
    seed: int


@cache
def registered() -> Mapping[str, Named]:
    """Return all names that the library registers, also those of games that are not offered, without `VARIANTS`."""
    spec = importlib.util.find_spec("textarena")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("no package textarena", name="textarena")
    listing = Path(spec.submodule_search_locations[0], "envs", "__init__.py").read_text("utf-8")
    names: dict[str, Named] = {}
    for node in ast.walk(ast.parse(listing)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.startswith("register"):
            given = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
            place, _, class_name = ast.literal_eval(given["entry_point"]).partition(":")
            folder = place.split(".")[2]
            own = {key: value for key, value in given.items() if folder in GAMES and key in GAMES[folder].parameters}
            parameters = {key: ast.literal_eval(value) for key, value in own.items()}
            names[ast.literal_eval(given["id"])] = Named(folder, class_name, parameters)
    return names


@cache
def offered() -> tuple[str, ...]:
    """Return the names that tasks may have."""
    return tuple(name for name, named in registered().items() if named.folder in GAMES and name not in EXCLUDED_NAMES)


def read_task(task: GenericTask, *, seed: int) -> Chosen:
    """Return the game of *task*, whose keys stand in `config` or in the task itself.

    Args:
        task: The task.
        seed: The seed if the task has none.

    Raises:
        InvalidGame: There is no such game, or a value is out of bounds.
    """
    config = task.config or {key: task.extra[key] for key in _KEYS if key in task.extra}
    if unknown := sorted(set(config) - set(_KEYS)):
        raise InvalidGame(f"config.{unknown[0]}: unknown key; there are {', '.join(_KEYS)}")
    name = _known(config.get("game"))
    number = config.get("seed", seed)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**63:
        raise InvalidGame(f"config.seed: {number!r:.80} must be a whole number from 0 to {2**63 - 1}")
    return Chosen(name, registered()[name], _parameters(name, config.get("parameters")), number)


def _known(given: object) -> str:
    name = str(given)
    for ending in VARIANTS:
        name = name.removesuffix(ending)
    named = registered().get(name)
    if named is None:
        close = difflib.get_close_matches(name[:80], offered(), n=3, cutoff=0.5) or ["Wordle-v0", "Sudoku-v0"]
        raise InvalidGame(f"config.game: there is no game {given!r:.80}; similar names: {', '.join(close)}")
    if name in offered():
        return name
    several = "it is for several players, and a session has one"
    reason = EXCLUDED_NAMES.get(name) or EXCLUDED.get(named.folder, several)
    raise InvalidGame(f"config.game: {name} is not offered: {reason}")


def _parameters(name: str, given: object) -> dict[str, Any]:
    """Return the parameters of the game *name*: the name's own, and those of a task, which take precedence."""
    title = GAMES[registered()[name].folder]
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise InvalidGame("config.parameters: must be an object")
    values = {**registered()[name].parameters}
    for key, value in given.items():
        if key not in title.parameters:
            known = ", ".join(title.parameters) or "none"
            raise InvalidGame(f"config.parameters: {name} has no parameter {str(key)!r:.80}; known: {known}")
        try:
            values[key] = title.parameters[key].read(value)
        except ValueError as error:
            raise InvalidGame(f"config.parameters.{key}: {value!r:.80} {error}") from error
    return values

"""Plays the games of `game_titles` with TextArena's own code, loaded without the package around it.

A usual import of the package `textarena` loads its online play, its judges and their requirements (requests,
websockets, nltk, openai, chess). This module loads only the core and the modules of the offered games, under bare
parent packages whose `__init__` never runs. This takes 2 MiB and 15 ms, and needs no other package and no download.

Differences from TextArena's own loop: the session counts the turns, so an invalid move costs a turn too. The last turn
is the turn that the rules name (TextArena grants one more, if it counts at all). Only the last pair of brackets of a
message is a move. A mine ends `minesweeper`. Each game draws from its own generator (see `game_dice`).
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from game_dice import DICE
from game_play import InvalidGame
from game_titles import TITLES

PACKAGE = "textarena"

MOST_DRAWS = 100
"""The maximum number of boards drawn from one seed; every sixteenth of the smallest boards is already solved."""

_FROM_GAME = -1
"""TextArena's `GAME_ID`: the sender of the game's own messages."""


def load() -> None:
    """Import TextArena's core and every offered game; a second call does nothing.

    Raises:
        ImportError: TextArena is not installed, or a game is not in its place.
    """
    core = _core()
    for title in TITLES.values():
        _module(core, title.module)


class TextArenaGame:
    """One game of TextArena for one player."""

    def __init__(self, name: str, parameters: Mapping[str, Any], *, seed: int, max_turns: int) -> None:
        """Start a game.

        Args:
            name: A key of `TITLES`.
            parameters: The parameters from `read_parameters`.
            seed: The seed, which always gives the same game.
            max_turns: The number of turns for the rules' text; the caller counts the turns.

        Raises:
            InvalidGame: This seed and the seeds tried after it give games that are over at the start.
        """
        title = TITLES[name]
        self.name = name
        self.move_form = title.move_form
        self.optimal_turns = title.optimal_turns(parameters)
        self._title = title
        self._generator = random.Random(seed)
        self._is_lost = False
        limit = {"max_turns": max_turns} if title.takes_turn_limit else {}
        with DICE.of(self._generator):
            self._game = getattr(_module(_core(), title.module), title.class_name)(**parameters, **limit)
            self._draw(seed)
        self._measured = title.measure(self._game)

    def _draw(self, seed: int) -> None:
        for attempt in range(MOST_DRAWS):
            try:
                self._game.reset(1, seed=seed + (attempt << 64))
            except ZeroDivisionError:  # lights out: a scramble that undid itself, by which its measure divides
                continue
            return
        raise InvalidGame(f"config.seed: {seed} gives boards that are solved already")

    @property
    def is_over(self) -> bool:
        return self._is_lost or bool(self._game.state.done)

    @property
    def is_won(self) -> bool:
        state = self._game.state
        return bool(state.done) and not state.game_info[0]["invalid_move"] and self._title.is_won(self._game)

    def opening(self) -> str:
        return self._seen()

    def play(self, move: str) -> str:
        if (reason := self._title.lost_by(self._game, move)) is not None:
            self._is_lost = True
            return reason
        with DICE.of(self._generator):
            self._game.step(f"[{move}]")
            text = self._seen()
        if not self.is_over:
            return text
        reason = str(self._game.state.game_info[0].get("reason") or "The game is over.")
        return f"{text}\n{reason}" if text else reason

    def valid_moves(self) -> Sequence[str]:
        return () if self.is_over else self._title.moves

    def progress(self) -> float:
        return self._measured()

    def _seen(self) -> str:
        """Return the game's messages since the last call, without the player's own messages."""
        _, observations = self._game.get_observation()
        return "\n".join(str(message).strip("\n") for sender, message, _ in observations if sender == _FROM_GAME)


def _core() -> ModuleType:
    """Return the package `textarena` with the few names that its games use."""
    if PACKAGE in sys.modules and hasattr(sys.modules[PACKAGE], "SinglePlayerState"):
        return sys.modules[PACKAGE]
    package = _bare(PACKAGE)
    core = importlib.import_module(f"{PACKAGE}.core")
    for name in ("GAME_ID", "Env", "Info", "ObservationType", "State"):
        setattr(package, name, getattr(core, name))
    state = importlib.import_module(f"{PACKAGE}.state")
    package.SinglePlayerState = state.SinglePlayerState  # type: ignore[attr-defined]  # a bare module from `_bare`
    for drawing in (core, state):
        drawing.random = DICE  # type: ignore[attr-defined]  # see game_dice
    return package


def _module(core: ModuleType, folder: str) -> ModuleType:
    """Import the game in *folder* so that it draws from `DICE`."""
    envs = f"{core.__name__}.envs"
    if envs not in sys.modules:
        _bare(envs)
    module = importlib.import_module(f"{envs}.{folder}.env")
    if hasattr(module, "random"):
        module.random = DICE  # type: ignore[attr-defined]  # see game_dice
    return module


def _bare(name: str) -> ModuleType:
    """Make the package *name* importable without running its `__init__`."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"no package {name}", name=name)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    return module

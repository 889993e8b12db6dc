"""Plays the games of `game_titles` with TextArena's own code, loaded by `envserver.textarena`.

Differences from TextArena's own loop: the session counts the turns, so an invalid move costs a turn too. The last turn
is the turn that the rules name (TextArena grants one more, if it counts at all). Only the last pair of brackets of a
message is a move. A mine ends `minesweeper`. Each game draws from its own generator (see `envserver.textarena`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from envserver.textarena import DICE, game_module, new_messages
from game_play import InvalidGame
from game_titles import TITLES

MOST_DRAWS = 100
"""The maximum number of boards drawn from one seed; every sixteenth of the smallest boards is already solved."""


def load() -> None:
    """Import TextArena's core and every offered game; a second call does nothing.

    Raises:
        ImportError: TextArena is not installed, or a game is not in its place.
    """
    for title in TITLES.values():
        game_module(title.module)


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
            self._game = getattr(game_module(title.module), title.class_name)(**parameters, **limit)
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
        return new_messages(self._game)

    def play(self, move: str) -> str:
        if (reason := self._title.lost_by(self._game, move)) is not None:
            self._is_lost = True
            return reason
        with DICE.of(self._generator):
            self._game.step(f"[{move}]")
            text = new_messages(self._game)
        if not self.is_over:
            return text
        reason = str(self._game.state.game_info[0].get("reason") or "The game is over.")
        return f"{text}\n{reason}" if text else reason

    def valid_moves(self) -> Sequence[str]:
        return () if self.is_over else self._title.moves

    def progress(self) -> float:
        return self._measured()

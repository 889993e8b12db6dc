"""The interface of every game of this environment, and what a game ends with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_TURNS = 500
"""The upper bound of a task's `max_turns`."""


class InvalidGame(ValueError):
    """The task's game cannot be played; the message names the place and the reason."""


class Game(Protocol):
    """One game in progress. The session, not the game, counts the turns and ends the game at its limit."""

    name: str
    """The game's name in `config.game`."""
    optimal_turns: int | None
    """The fewest turns that win, if known."""
    move_form: str
    """The form of a move, for the player."""

    @property
    def is_over(self) -> bool:
        """True if the game ended by its own rules."""

    @property
    def is_won(self) -> bool:
        """True if the player reached the game's aim; never True before `is_over`."""

    def opening(self) -> str:
        """Return the rules and the start."""

    def play(self, move: str) -> str:
        """Make one *move*, in the form of `move_of`, and return the player's view."""

    def valid_moves(self) -> Sequence[str]:
        """Return the moves that are possible now, or an empty list if the game does not list them."""

    def progress(self) -> float:
        """Return the player's progress, in [0, 1); 1 only if the game is won."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a game, which reward functions judge."""

    is_won: bool
    progress: float
    """The progress in [0, 1]; 1 only if the game is won."""
    turns: int
    """The number of turns, including invalid moves; at least 1."""
    optimal_turns: int | None
    """The fewest turns that win, if known."""


def outcome_of(game: Game, *, turns: int) -> Outcome:
    """Return the outcome of *game* after *turns* turns."""
    return Outcome(game.is_won, 1.0 if game.is_won else min(0.99, max(0.0, game.progress())), turns, game.optimal_turns)

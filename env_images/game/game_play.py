"""What every game of this environment is, and how a message becomes a move."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_MOVE_CHARS = 100
"""Longer than any move of any game; what is longer is cut, and then no game knows it."""

MAX_TURNS = 500
"""Upper bound of a task's `max_turns`."""

_MARKED = re.compile(r"\[([^\[\]]*)\]")


class InvalidGame(ValueError):
    """The task's game cannot be played; says where in the task and why."""


class Game(Protocol):
    """One game in progress. It counts no turns: the session does, and ends the game at its limit."""

    name: str
    """As in `config.game`."""
    optimal_turns: int | None
    """The fewest turns that win, where that is known."""
    move_form: str
    """What a move looks like, for the player."""

    @property
    def is_over(self) -> bool:
        """Whether the game ended by its own rules."""

    @property
    def is_won(self) -> bool:
        """Whether the player reached the game's aim; never true before `is_over`."""

    def opening(self) -> str:
        """Tell the rules and show the start."""

    def play(self, move: str) -> str:
        """Make one move, *move* as `move_of` gives it, and tell what the player sees then."""

    def valid_moves(self) -> Sequence[str]:
        """List the moves that are possible now; empty where the game does not list them."""

    def progress(self) -> float:
        """Say how far the player came, in [0, 1); 1 only where the game is won."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a game ended; what reward functions judge."""

    is_won: bool
    progress: float
    """In [0, 1]; 1 only where the game is won."""
    turns: int
    """Turns taken, those with invalid moves included; at least 1."""
    optimal_turns: int | None
    """The fewest turns that win, where that is known."""


def outcome_of(game: Game, *, turns: int) -> Outcome:
    """Sum up *game* as it stands after *turns* turns."""
    return Outcome(game.is_won, 1.0 if game.is_won else min(0.99, max(0.0, game.progress())), turns, game.optimal_turns)


def move_of(message: str) -> str:
    """Find the move in *message*: what its last pair of square brackets holds, or else all of it.

    White space becomes single spaces. The last pair, since models think aloud before they decide.
    """
    marked = None
    for marked in _MARKED.finditer(message):  # noqa: B007 - the last one is what is wanted
        pass
    text = message if marked is None else marked[1]
    return " ".join(text[: 10 * MAX_MOVE_CHARS].split())[:MAX_MOVE_CHARS]

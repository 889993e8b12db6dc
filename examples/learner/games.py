"""Two games as the policy sees them: a number to be guessed, and a lake to be crossed.

It is told neither what "higher" means, nor that holes are bad: it chooses among moves by what they look like, and has
to find out. All levels of a game look alike to it but for their size, so what a small one teaches holds on a large one;
but a large one needs nearly every move to be good, and so teaches nothing to a policy that knows none yet.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

from examples.learner.client import Session
from examples.learner.policy import Attempt, Decision, Features, Policy

TAGS: Final = ("guess_the_number", "frozen_lake")
MOST_TURNS: Final = 200
"""More than any task has: a game that goes on for longer is given up."""

Place = tuple[int, int]
"""Row and column, from the top left corner."""

_RANGE = re.compile(r"between (\d+) and (\d+)")
_HINT = re.compile(r"target number is (higher|lower)")
STEPS: Final[Mapping[str, Place]] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
PARTS: Final = tuple(Fraction(part, 8) for part in range(9))
"""Where between two ends a guess may be."""


def play(session: Session, policy: Policy, chance: random.Random) -> Attempt:
    """Play one game to its end.

    Raises:
        ValueError: it is neither of `TAGS`, or does not end.
    """
    seen = session.prompt()
    game: Guessing | Crossing = Guessing.begun(seen) if _RANGE.search(seen) else Crossing.begun(seen)
    decisions: list[Decision] = []
    for _ in range(MOST_TURNS):
        move, decided = game.move(policy, chance)
        decisions += decided
        answer = session.call("act", {"message": f"[{move}]"})
        if answer.finished:
            return Attempt(tuple(decisions), answer.reward)
        game.see(answer.text)
    raise ValueError(f"a game did not end within {MOST_TURNS} turns")


@dataclass(slots=True)
class Guessing:
    """A number is to be found from "higher" and "lower"."""

    least: int
    most: int
    told: list[tuple[int, str]] = field(default_factory=list)
    """Guesses that were answered, with their answers."""
    guessed: int = 0

    @classmethod
    def begun(cls, prompt: str) -> Guessing:
        """The game that *prompt* opens."""
        found = _RANGE.search(prompt)
        if found is None:
            raise ValueError(f"no range in {prompt[:200]!r}")
        return cls(int(found[1]), int(found[2]))

    def move(self, policy: Policy, chance: random.Random) -> tuple[str, list[Decision]]:
        """Choose two ends, and where between them to guess."""
        lows, highs = self.ends(is_low=True), self.ends(is_low=False)
        low = policy.decide([self._end("low", name) for name in lows], chance)
        high = policy.decide([self._end("high", name) for name in highs], chance)
        left, right = list(lows.values())[low.taken], list(highs.values())[high.taken]
        width = min(abs(right - left).bit_length(), 4)
        part = policy.decide([(f"guess at {part}", f"guess at {part} of {width}") for part in PARTS], chance)
        guess = left + int((right - left) * PARTS[part.taken])
        self.guessed = max(self.least, min(self.most, guess))
        return str(self.guessed), [low, high, part]

    def see(self, text: str) -> None:
        """Take the answer to the last guess."""
        if found := _HINT.search(text):
            self.told.append((self.guessed, found[1]))

    def ends(self, *, is_low: bool) -> dict[str, int]:
        """What may be taken for one end of where the number is, by name; without guesses all are the range's."""
        usual = self.least if is_low else self.most
        step = 1 if is_low else -1  # one beside a guess, towards the other end
        ends = {"range": usual, "last": self.told[-1][0] + step if self.told else usual}
        for hint in ("higher", "lower"):
            guesses = [guess for guess, answer in self.told if answer == hint]
            ends[f"largest {hint}"] = max(guesses) + step if guesses else usual
            ends[f"smallest {hint}"] = min(guesses) + step if guesses else usual
        return ends

    def _end(self, side: str, name: str) -> Features:
        last = self.told[-1][1] if self.told else "nothing"
        return (f"{side} {name}", f"{side} {name} after {last}")


@dataclass(slots=True)
class Crossing:
    """A lake is to be crossed to its far corner, round the holes."""

    board: list[list[str]]
    been: dict[Place, int] = field(default_factory=dict)
    """How often the player was at a place."""
    last: str = ""

    @classmethod
    def begun(cls, prompt: str) -> Crossing:
        """The game that *prompt* opens. Raises ``ValueError``: it shows no board."""
        crossing = cls(read_board(prompt))
        crossing.been[crossing.at] = 1
        return crossing

    @property
    def at(self) -> Place:
        """Where the player is."""
        return _found(self.board, "P")

    def move(self, policy: Policy, chance: random.Random) -> tuple[str, list[Decision]]:
        """Choose a direction."""
        decision = policy.decide([self.features(step) for step in STEPS], chance)
        self.last = list(STEPS)[decision.taken]
        return self.last, [decision]

    def see(self, text: str) -> None:
        """Take the board as it is now."""
        self.board = read_board(text)
        self.been[self.at] = self.been.get(self.at, 0) + 1

    def features(self, step: str) -> Features:
        """What is seen of a step: what is there, whether the goal is nearer, whether it leads on, how often been."""
        to = _beside(self.at, step)
        cell = self._cell(to)
        if cell in ("hole", "wall"):
            return (cell, f"{cell} {step}")
        exits = sum(self._cell(_beside(to, way)) in ("ice", "goal") for way in STEPS)
        size = len(self.board)
        nearer = "nearer" if sum(to) > sum(self.at) else "farther"  # the goal is in the last corner
        been = min(self.been.get(to, 0), 3)
        return (cell, nearer, f"been {been}", f"exits {exits}", f"{nearer} been {been}", f"{nearer} of {size}", step)

    def _cell(self, place: Place) -> str:
        row, column = place
        if not (0 <= row < len(self.board) and 0 <= column < len(self.board[row])):
            return "wall"
        return {"H": "hole", "G": "goal"}.get(self.board[row][column], "ice")


def read_board(text: str) -> list[list[str]]:
    """The cells of the last board in *text*. Raises ``ValueError``: there is none with a player on it."""
    board: list[list[str]] = []
    lines = text.splitlines()
    for line in lines[_last_board(lines) :]:
        if line.startswith("|"):
            board.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    if not any("P" in row for row in board):
        raise ValueError(f"no board in {text[:200]!r}")
    return board


def _last_board(lines: Sequence[str]) -> int:
    return max((at for at, line in enumerate(lines) if line.startswith("Current Board")), default=0)


def _found(board: Sequence[Sequence[str]], what: str) -> Place:
    return next((r, c) for r, row in enumerate(board) for c, cell in enumerate(row) if cell == what)


def _beside(place: Place, step: str) -> Place:
    return place[0] + STEPS[step][0], place[1] + STEPS[step][1]

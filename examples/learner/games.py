"""The policy's view of grid worlds: walls, hazards, keys and doors, and a goal that ends the game.

A decision is one of the six moves. Its features are its effects: whether it changes anything, the kind of the cell, the
number of past visits there, and the visible things that it leads nearer to. The policy does not know which things are
worth reaching, that hazards are bad, or the use of keys. No feature depends on the size of a world, so lessons from a
small world apply to a large one. Only the goal has a reward. An untrained player finds it once in twenty games of the
smallest worlds, and hardly ever in larger worlds.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from examples.learner.client import Session
from examples.learner.policy import Attempt, Decision, Features, Policy

TAGS: Final = ("grid",)
MOST_TURNS: Final = 500
"""Turns after which a game is given up. No task has so many."""

Place = tuple[int, int]
"""Row and column from the top left corner, or from the start if the player does not see the whole map."""
Distances = Mapping[Place, int]
"""Steps from a place to the nearest of some other places. Unreachable places are missing."""

STEPS: Final[Mapping[str, Place]] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
MOVES: Final = (*STEPS, "pick", "open")
PLAYER, FLOOR, WALL, HAZARD, GOAL, UNSEEN = "@.#^G?"
KEYS, DOORS = "abc", "ABC"
THINGS: Final = ("goal", "key", "door")
"""Things that a player can use once it is there. One feature, "thing", is common to all of them."""
MANY: Final = 3
"""Number of visits from which the count is no longer distinguished."""

_ROW = re.compile(r"^[#.^@GA-Ca-c]{3,}$")
_FAR = re.compile(r"You see (\d+) cells far")
_HELD = re.compile(r"Keys that you have: ([a-c](?:, [a-c])*)\.")
_UNDER = re.compile(r"You stand on key ([a-c])\.")


def play(session: Session, policy: Policy, chance: random.Random) -> Attempt:
    """Play one game to its end.

    Raises:
        ValueError: The game shows no map, or does not end.
    """
    world = World.begun(session.prompt())
    decisions: list[Decision] = []
    for _ in range(MOST_TURNS):
        decision = world.decide(policy, chance)
        decisions.append(decision)
        answer = session.call("act", {"message": f"[{world.moved}]"})
        if answer.finished:
            return Attempt(tuple(decisions), answer.reward)
        world.see(answer.text)
    raise ValueError(f"a game did not end within {MOST_TURNS} turns")


@dataclass(slots=True)
class World:
    """The known state of a grid world."""

    is_whole: bool = True
    """True if every map shows the whole world."""
    cells: dict[Place, str] = field(default_factory=dict)
    """The last seen state of each cell, without the player."""
    at: Place = (0, 0)
    """The player's place."""
    held: frozenset[str] = frozenset()
    """Keys that the player has."""
    been: dict[Place, int] = field(default_factory=dict)
    """Number of the player's visits to each place."""
    moved: str = ""
    """The last move."""

    @classmethod
    def begun(cls, prompt: str) -> World:
        """Return the world of *prompt*. Raises ``ValueError`` if it shows no map."""
        world = cls(is_whole=_FAR.search(prompt) is None)
        world._look(prompt)
        return world

    def decide(self, policy: Policy, chance: random.Random) -> Decision:
        """Choose a move, and store it."""
        ways = self.ways()
        decision = policy.decide([self.features(move, ways) for move in MOVES], chance)
        self.moved = MOVES[decision.taken]
        return decision

    def see(self, text: str) -> None:
        """Update the world after the last move. Raises ``ValueError`` if *text* shows no map."""
        if self.moved in STEPS and text.startswith("You went"):
            self.at = _beside(self.at, self.moved)
        self._look(text)

    def ways(self) -> dict[str, Distances]:
        """Return the distances to the nearest thing of each kind with a known way."""
        places: dict[str, list[Place]] = {}
        for place, cell in self.cells.items():
            if kind := self._kind(cell):
                places.setdefault(kind, []).append(place)
            if not self.is_whole and self._is_free(place) and any(self._cell(to) == UNSEEN for to in _around(place)):
                places.setdefault("unseen", []).append(place)
        found = {kind: self._distances(ends) for kind, ends in places.items()}
        return {kind: far for kind, far in sorted(found.items()) if self.at in far}

    def features(self, move: str, ways: Mapping[str, Distances]) -> Features:
        """Return the features of *move*. *ways* come from `ways`."""
        if move == "pick":
            here = self._cell(self.at)
            return ("pick a key",) if here in KEYS and here not in self.held else ("vain", "vain pick")
        if move == "open":
            is_ready = any(self._kind(self._cell(place)) == "door" for place in _around(self.at))
            return ("open a door",) if is_ready else ("vain", "vain open")
        to = _beside(self.at, move)
        if self._cell(to) == HAZARD:
            return ("hazard",)
        if not self._is_free(to):
            return ("vain", "vain step")
        things = [ways[kind] for kind in THINGS if kind in ways]
        led = dict(ways)
        if things:
            led["thing"] = min(things, key=lambda far: far[self.at])
        leads = (f"{kind} {'nearer' if far[to] < far[self.at] else 'farther'}" for kind, far in led.items())
        return (f"been {min(self.been.get(to, 0), MANY)}", *leads)

    def _look(self, text: str) -> None:
        """Read the map and the keys in *text*."""
        rows = [line for line in text.splitlines() if _ROW.match(line)]
        seen = next(((r, row.index(PLAYER)) for r, row in enumerate(rows) if PLAYER in row), None)
        if seen is None:
            raise ValueError(f"no map with a player in {text[:200]!r}")
        if self.is_whole:
            self.at = seen
        top, left = self.at[0] - seen[0], self.at[1] - seen[1]
        for r, row in enumerate(rows):
            self.cells.update({(top + r, left + c): cell for c, cell in enumerate(row)})
        under, held = _UNDER.search(text), _HELD.search(text)
        self.cells[self.at] = under[1] if under else FLOOR
        self.held = frozenset(held[1].split(", ")) if held else frozenset()
        self.been[self.at] = self.been.get(self.at, 0) + 1

    def _cell(self, place: Place) -> str:
        return self.cells.get(place, WALL if self.is_whole else UNSEEN)

    def _is_free(self, place: Place) -> bool:
        return self._cell(place) in (FLOOR, GOAL, *KEYS)

    def _kind(self, cell: str) -> str | None:
        """Return the kind of the thing at a cell, or None."""
        if cell == GOAL:
            return "goal"
        if cell in KEYS:
            return None if cell in self.held else "key"
        if cell in DOORS:
            return "door" if cell.lower() in self.held else "locked door"
        return None

    def _distances(self, ends: Iterable[Place]) -> Distances:
        """Return the distances to the nearest of *ends*, over free cells."""
        far = dict.fromkeys(ends, 0)
        waiting = deque(far)
        while waiting:
            place = waiting.popleft()
            for beside in _around(place):
                if beside not in far and self._is_free(beside):
                    far[beside] = far[place] + 1
                    waiting.append(beside)
        return far


def _beside(place: Place, step: str) -> Place:
    return place[0] + STEPS[step][0], place[1] + STEPS[step][1]


def _around(place: Place) -> list[Place]:
    return [_beside(place, step) for step in STEPS]

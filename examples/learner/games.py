"""Grid worlds as the policy sees them: walls, hazards, keys and doors, and a goal that ends the game.

A decision is one of the six moves. It is told by what it comes to: whether it changes anything, what stands there, how
often the player was there, and to what of all that is in sight it leads nearer. The policy is not told what is worth
going to, that hazards are bad, or what keys are for. None of that has to do with the size of a world, so what a small
one teaches holds in a large one. Nothing but the goal is rewarded, which a player that knows nothing finds once in
twenty games of the smallest worlds, and hardly ever in larger ones.
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
"""More than any task has: a game that goes on for longer is given up."""

Place = tuple[int, int]
"""Row and column, from the top left corner; where the player does not see the whole map, from where it started."""
Distances = Mapping[Place, int]
"""Steps from a place to the nearest of some others; places without a way are missing."""

STEPS: Final[Mapping[str, Place]] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
MOVES: Final = (*STEPS, "pick", "open")
PLAYER, FLOOR, WALL, HAZARD, GOAL, UNSEEN = "@.#^G?"
KEYS, DOORS = "abc", "ABC"
THINGS: Final = ("goal", "key", "door")
"""What a player can do something with, once it is there: all of them look alike in one feature, "thing"."""
MANY: Final = 3
"""Visits to a place that are not told apart from more."""

_ROW = re.compile(r"^[#.^@GA-Ca-c]{3,}$")
_FAR = re.compile(r"You see (\d+) cells far")
_HELD = re.compile(r"Keys that you have: ([a-c](?:, [a-c])*)\.")
_UNDER = re.compile(r"You stand on key ([a-c])\.")


def play(session: Session, policy: Policy, chance: random.Random) -> Attempt:
    """Play one game to its end.

    Raises:
        ValueError: it shows no map, or does not end.
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
    """What is known of a grid world."""

    is_whole: bool = True
    """Whether every map shows all of it."""
    cells: dict[Place, str] = field(default_factory=dict)
    """As they were seen last, without the player."""
    at: Place = (0, 0)
    """Where the player is."""
    held: frozenset[str] = frozenset()
    """Keys that the player has."""
    been: dict[Place, int] = field(default_factory=dict)
    """How often the player was at a place."""
    moved: str = ""
    """The last move."""

    @classmethod
    def begun(cls, prompt: str) -> World:
        """The world that *prompt* opens. Raises ``ValueError``: it shows no map."""
        world = cls(is_whole=_FAR.search(prompt) is None)
        world._look(prompt)
        return world

    def decide(self, policy: Policy, chance: random.Random) -> Decision:
        """Choose a move, and remember it."""
        ways = self.ways()
        decision = policy.decide([self.features(move, ways) for move in MOVES], chance)
        self.moved = MOVES[decision.taken]
        return decision

    def see(self, text: str) -> None:
        """Take what the last move came to. Raises ``ValueError``: *text* shows no map."""
        if self.moved in STEPS and text.startswith("You went"):
            self.at = _beside(self.at, self.moved)
        self._look(text)

    def ways(self) -> dict[str, Distances]:
        """How far it is to the nearest of each kind of thing to which a way is known."""
        places: dict[str, list[Place]] = {}
        for place, cell in self.cells.items():
            if kind := self._kind(cell):
                places.setdefault(kind, []).append(place)
            if not self.is_whole and self._is_free(place) and any(self._cell(to) == UNSEEN for to in _around(place)):
                places.setdefault("unseen", []).append(place)
        found = {kind: self._distances(ends) for kind, ends in places.items()}
        return {kind: far for kind, far in sorted(found.items()) if self.at in far}

    def features(self, move: str, ways: Mapping[str, Distances]) -> Features:
        """What is seen of *move*; *ways* as `ways` gives them."""
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
        """Take the map and the keys that *text* shows."""
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
        """What there is at a cell to go to."""
        if cell == GOAL:
            return "goal"
        if cell in KEYS:
            return None if cell in self.held else "key"
        if cell in DOORS:
            return "door" if cell.lower() in self.held else "locked door"
        return None

    def _distances(self, ends: Iterable[Place]) -> Distances:
        """How far it is to the nearest of *ends*, over free cells."""
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

"""Levels of the grid world: read from a map, or drawn from a size and a seed. Pure data; `game_grid` plays them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from game_play import InvalidGame

Place: TypeAlias = tuple[int, int]
"""Row and column, from the top left corner."""

WALL, FLOOR, START, GOAL, HAZARD = "#", ".", "S", "G", "^"
KEYS, DOORS = "abc", "ABC"
"""Key `a` opens every door `A`."""

LARGEST_SIDE = 20
"""The maximum side in cells. With the doors' bound it limits the search to 25,600 states, a fifth of a second."""
MOST_DOORS = 3
SMALLEST_SIDE = 3
MOST_DRAWS = 200
"""The maximum number of levels drawn from one seed; any level of the tasks needed at most fifteen."""

STEPS: Mapping[str, Place] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
MOVES = (*STEPS, "pick", "open")


class State(NamedTuple):
    """A player's place and the changes since the start."""

    place: Place
    keys: frozenset[str] = frozenset()
    opened: frozenset[Place] = frozenset()


@dataclass(frozen=True)
class Level:
    """A map: `cells` by place, without walls, and the player's start."""

    rows: int
    columns: int
    start: Place
    cells: Mapping[Place, str] = field(repr=False)
    view: int | None = None
    """The player's view in each direction, in cells, or None for the whole map."""

    def after(self, state: State, move: str) -> State | None:
        """Return the state after *move*, one of `MOVES`, or None if the move changes nothing."""
        if move in STEPS:
            place = neighbour(state.place, move)
            return state._replace(place=place) if self._is_free(state, place) else None
        if move == "pick":
            key = self.cells[state.place]
            return state._replace(keys=state.keys | {key}) if key in KEYS and key not in state.keys else None
        doors = {place for place in around(state.place) if self.opens(state, place)} - state.opened
        return state._replace(opened=state.opened | doors) if doors else None

    def opens(self, state: State, place: Place) -> bool:
        """Return True if there is a door at *place* whose key the player has."""
        cell = self.cells.get(place, WALL)
        return cell in DOORS and cell.lower() in state.keys

    def is_won(self, state: State) -> bool:
        return self.cells[state.place] == GOAL

    def is_lost(self, state: State) -> bool:
        return self.cells[state.place] == HAZARD

    def distance(self, start: State) -> int | None:
        """Return the fewest moves from *start* to a goal, or None if there is no way."""
        known, waiting = {start}, deque([(start, 0)])
        while waiting:
            state, moves = waiting.popleft()
            if self.is_won(state):
                return moves
            for move in MOVES:
                after = self.after(state, move)
                if after is not None and after not in known and not self.is_lost(after):
                    known.add(after)
                    waiting.append((after, moves + 1))
        return None

    def _is_free(self, state: State, place: Place) -> bool:
        cell = self.cells.get(place, WALL)
        return cell != WALL and (cell not in DOORS or place in state.opened)


def neighbour(place: Place, direction: str) -> Place:
    """Return the place next to *place*, which may be outside the map."""
    return place[0] + STEPS[direction][0], place[1] + STEPS[direction][1]


def around(place: Place) -> Iterable[Place]:
    """Return the four places next to *place*."""
    return (neighbour(place, direction) for direction in STEPS)


def read_level(data: object, *, seed: int) -> Level:
    """Read `config.level`: `{"map": [row, …]}`, or `{"width", "height", "walls", "doors", "hazards", "seed"}`.

    Args:
        data: The JSON value; `view` (in cells, by default the whole map) goes with both forms.
        seed: The seed of a drawn level whose data has no `seed`.

    Raises:
        InvalidGame: The form is wrong, or no goal can be reached.
    """
    if not isinstance(data, Mapping):
        raise InvalidGame("config.level: must be an object with a map, or with width and height")
    known = {"map", "view"} if "map" in data else {"width", "height", "walls", "doors", "hazards", "seed", "view"}
    if unknown := sorted(set(data) - known):
        raise InvalidGame(f"config.level: unknown key {unknown[0]!r}; there are {', '.join(sorted(known))}")
    view = None if data.get("view") is None else _number(data, "view", 1, LARGEST_SIDE)
    if "map" in data:
        level = parse_map(data["map"], view=view)
        if level.distance(State(level.start)) is None:
            raise InvalidGame("config.level.map: no goal can be reached")
        return level
    width = _number(data, "width", SMALLEST_SIDE, LARGEST_SIDE)
    height = _number(data, "height", SMALLEST_SIDE, LARGEST_SIDE)
    doors = _number(data, "doors", 0, min(MOST_DOORS, (width - 1) // 3), default=0)
    hazards = _number(data, "hazards", 0, width * height // 4, default=0)
    walls = _number(data, "walls", 0, 40, default=20)
    drawn = _number(data, "seed", 0, 2**63, default=seed)
    return parse_map(draw_map(width, height, walls=walls, doors=doors, hazards=hazards, seed=drawn), view=view)


def parse_map(rows: object, *, view: int | None = None) -> Level:
    """Read a map, a list of rows of equal length; all places outside of it are walls.

    Raises:
        InvalidGame: The map is too large, ragged, has an unknown cell, or not exactly one start.
    """
    if not isinstance(rows, list) or not 1 <= len(rows) <= LARGEST_SIDE:
        raise InvalidGame(f"config.level.map: must be a list of 1 to {LARGEST_SIDE} rows")
    cells: dict[Place, str] = {}
    for r, row in enumerate(rows):
        where = f"config.level.map[{r}]"
        if not isinstance(row, str) or not 1 <= len(row) <= LARGEST_SIDE or len(row) != len(rows[0]):
            raise InvalidGame(f"{where}: must be a text of 1 to {LARGEST_SIDE} characters, as long as the other rows")
        for c, cell in enumerate(row):
            if cell not in WALL + FLOOR + START + GOAL + HAZARD + KEYS + DOORS:
                raise InvalidGame(f"{where}: unknown cell {cell!r} in column {c}")
            if cell != WALL:
                cells[r, c] = cell
    starts = [place for place, cell in cells.items() if cell == START]
    if len(starts) != 1:
        raise InvalidGame(f"config.level.map: must have one start, {START}; it has {len(starts)}")
    if sum(cell in DOORS for cell in cells.values()) > MOST_DOORS:
        raise InvalidGame(f"config.level.map: must have at most {MOST_DOORS} doors")
    return Level(len(rows), len(rows[0]), starts[0], cells, view)


def draw_map(width: int, height: int, *, walls: int, doors: int, hazards: int, seed: int) -> list[str]:
    """Draw a solvable map: rooms side by side with a door between neighbors, each key before its door.

    Args:
        walls: The share of the rooms' cells that are walls, in percent.
        doors: The number of doors; each takes its own column.
        hazards: The number of deadly cells.

    Raises:
        InvalidGame: None of `MOST_DRAWS` maps could be solved.
    """
    generator = random.Random(seed)
    for _ in range(MOST_DRAWS):
        rows = _drawn(generator, width, height, walls=walls, doors=doors, hazards=hazards)
        if rows is not None:
            level = parse_map(rows)
            shortest = level.distance(State(level.start))
            if shortest is not None and shortest > 1:
                return rows
    raise InvalidGame(f"config.level: {MOST_DRAWS} draws gave no level that can be solved: fewer walls or hazards")


def _drawn(
    generator: random.Random, width: int, height: int, *, walls: int, doors: int, hazards: int
) -> list[str] | None:
    """Draw a map that may have no solution; return None if the objects do not fit in."""
    borders = [round((number + 1) * width / (doors + 1)) - 1 for number in range(doors)]
    cells = {(r, c): WALL if c in borders else FLOOR for r in range(height) for c in range(width)}
    rooms: list[list[Place]] = [[] for _ in range(doors + 1)]
    for place in cells:
        if place[1] not in borders:
            rooms[sum(place[1] > border for border in borders)].append(place)
    for room in rooms:
        generator.shuffle(room)
    if any(len(room) < 2 for room in rooms):
        return None
    cells[rooms[0].pop()] = START
    cells[rooms[-1].pop()] = GOAL
    for border, key, door in zip(borders, KEYS, DOORS, strict=False):
        cells[generator.randrange(height), border] = door
        cells[rooms[borders.index(border)].pop()] = key
    rest = [place for room in rooms for place in room]
    generator.shuffle(rest)
    for place in rest[:hazards]:
        cells[place] = HAZARD
    for place in rest[hazards : hazards + len(rest) * walls // 100]:
        cells[place] = WALL
    return ["".join(cells[r, c] for c in range(width)) for r in range(height)]


def _number(data: Mapping[str, Any], key: str, least: int, most: int, *, default: int | None = None) -> int:
    number = data.get(key, default)
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise InvalidGame(f"config.level.{key}: must be a whole number from {least} to {most}")
    return number

"""The grid world: one player, who must reach the goal, on a map of walls, keys, doors and hazards."""

from __future__ import annotations

from game_levels import DOORS, FLOOR, GOAL, HAZARD, KEYS, MOVES, WALL, Level, Place, State, neighbour
from game_play import InvalidGame

PLAYER = "@"


class Grid:
    """A level being played."""

    name = "grid"
    move_form = f"one of [{'], ['.join(MOVES)}]"

    def __init__(self, level: Level) -> None:
        """Start the level.

        Raises:
            InvalidGame: No goal can be reached.
        """
        self._level = level
        self._state = State(level.start)
        optimal = level.distance(self._state)
        if optimal is None:
            raise InvalidGame("config.level: no goal can be reached")
        self.optimal_turns: int | None = optimal

    @property
    def is_over(self) -> bool:
        return self._level.is_won(self._state) or self._level.is_lost(self._state)

    @property
    def is_won(self) -> bool:
        return self._level.is_won(self._state)

    def opening(self) -> str:
        view = self._level.view
        seen = "You see the whole map." if view is None else f"You see {view} cells far in each direction."
        return (
            f"You ({PLAYER}) are in a grid world. Reach the goal ({GOAL}).\n"
            f"{WALL} wall, {FLOOR} floor, {HAZARD} hazard: stepping on it ends the game. "
            f"{', '.join(KEYS)} are keys; {', '.join(DOORS)} are locked doors, each opened by the key of its letter; "
            "an open door is shown as floor.\n"
            "[up], [down], [left] and [right] take one step, [pick] picks up the key that you stand on, [open] opens "
            f"every door beside you (not diagonally) whose key you have. {seen}\n\n{self._shown()}"
        )

    def play(self, move: str) -> str:
        move = move.lower()
        if move not in MOVES:
            return f"Invalid move: there is no move {move!r}. A move is {self.move_form}.\n\n{self._shown()}"
        after = self._level.after(self._state, move)
        if after is None:
            return f"Invalid move: {self._hindrance(move)}\n\n{self._shown()}"
        self._state = after
        if self.is_won:
            return "You reached the goal."
        if self._level.is_lost(after):
            return "You stepped on a hazard. The game is lost."
        return f"{self._told(move)}\n\n{self._shown()}"

    def valid_moves(self) -> list[str]:
        if self.is_over:
            return []
        return [f"[{move}]" for move in MOVES if self._level.after(self._state, move) is not None]

    def progress(self) -> float:
        left = None if self._level.is_lost(self._state) else self._level.distance(self._state)
        return 0.0 if left is None or not self.optimal_turns else max(0.0, 1 - left / self.optimal_turns)

    def _hindrance(self, move: str) -> str:
        if move == "pick":
            return "there is no key here."
        if move == "open":
            return "there is no closed door beside you that you have the key for."
        cell = self._level.cells.get(neighbour(self._state.place, move), WALL)
        return f"a locked door is {move} of you." if cell in DOORS else f"a wall is {move} of you."

    def _told(self, move: str) -> str:
        if move == "pick":
            return f"You picked up key {self._cell(self._state.place, bare=True)}."
        return "You opened a door." if move == "open" else f"You went {move}."

    def _shown(self) -> str:
        """Draw the player's view, one line per row, and list the keys."""
        level, (row, column) = self._level, self._state.place
        far = level.view
        rows = range(level.rows) if far is None else range(row - far, row + far + 1)
        columns = range(level.columns) if far is None else range(column - far, column + far + 1)
        drawn = "\n".join("".join(self._cell((r, c)) for c in columns) for r in rows)
        under = self._cell(self._state.place, bare=True)
        here = f"You stand on key {under}. " if under in KEYS and under not in self._state.keys else ""
        return f"{drawn}\n{here}Keys that you have: {', '.join(sorted(self._state.keys)) or 'none'}."

    def _cell(self, place: Place, *, bare: bool = False) -> str:
        """Return the current character of a cell; *bare* omits the player and shows keys as at the start."""
        cell = self._level.cells.get(place, WALL)
        if bare:
            return cell
        if place == self._state.place:
            return PLAYER
        if cell in self._state.keys or place in self._state.opened or place == self._level.start:
            return FLOOR
        return cell

"""Players that win every offered game from a player's view; they prove that the tasks can be solved.

A player is a generator: it receives observations, first the opening, and yields moves without brackets. This module is
not in the image, because the server never needs it.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from game_config import read_game
from game_levels import MOVES, STEPS, Level, Place, State, neighbour, read_level
from game_play import outcome_of
from game_rewards import read_evaluation

Player: TypeAlias = Generator[str, str, None]
"""A generator that yields moves and receives observations."""
Parameters: TypeAlias = Mapping[str, Any]


def player_of(game: str, config: Mapping[str, Any], parameters: Parameters, opening: str) -> Player:
    """Return the player of *game*, ready for its first `next`."""
    if game == "grid":
        return _listed(way_through(read_level(config["level"], seed=config.get("seed", 0))))
    return PLAYERS[game](parameters, opening)


def play(player: Player, act: Callable[[str], tuple[str, bool]]) -> None:
    """Let *player* play: *act* makes a move and returns the observation and whether the game is over."""
    move, over = next(player), False
    while not over:
        seen, over = act(f"[{move}]")
        if not over:
            move = player.send(seen)


def cycles(moves: Sequence[str], *, length: int = 4) -> Iterator[tuple[str, ...]]:
    """Yield every cycle of at most *length* moves, as a player that looks at nothing would repeat it."""
    for number in range(1, length + 1):
        yield from itertools.product(moves, repeat=number)


def cycle_reward(task: Mapping[str, Any], cycle: Sequence[str]) -> float:
    """Return the reward of a player that repeats *cycle* until the game of *task* ends."""
    game, max_turns = read_game(task["config"], seed=0)
    turns = 0
    for move in itertools.cycle(cycle):
        if game.is_over or turns == max_turns:
            break
        game.play(move)
        turns += 1
    reward = read_evaluation(task["evaluation"], optimal_turns=game.optimal_turns)
    return reward(outcome_of(game, turns=max(1, turns)))


def way_through(level: Level) -> list[str]:
    """Return the shortest list of moves to a goal, which the level must have."""
    start = State(level.start)
    came: dict[State, tuple[State, str] | None] = {start: None}
    waiting = deque([start])
    while not level.is_won(state := waiting.popleft()):
        for move in MOVES:
            after = level.after(state, move)
            if after is not None and after not in came and not level.is_lost(after):
                came[after] = (state, move)
                waiting.append(after)
    moves = []
    while (step := came[state]) is not None:
        state = step[0]
        moves.append(step[1])
    return moves[::-1]


def _listed(moves: Iterable[str]) -> Player:
    """Play a list of moves, whatever the observations."""
    for move in moves:  # noqa: UP028 - an iterator cannot receive observations
        yield move


def _guesser(parameters: Parameters, _: str) -> Player:
    low, high = parameters["min_number"], parameters["max_number"]
    while True:
        guess = (low + high) // 2
        seen = yield str(guess)
        low, high = (guess + 1, high) if "higher" in seen else (low, guess - 1)


def _hanoi(parameters: Parameters, _: str) -> Player:
    def moves(disks: int, source: str, target: str, spare: str) -> Iterator[str]:
        if disks:
            yield from moves(disks - 1, source, spare, target)
            yield f"{source} {target}"
            yield from moves(disks - 1, spare, target, source)

    yield from moves(parameters["num_disks"], "A", "C", "B")


def _skater(_: Parameters, opening: str) -> Player:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in opening.splitlines() if line.startswith("|")]
    cells = {(r, c): cell for r, row in enumerate(rows) for c, cell in enumerate(row) if cell != "H"}
    (start,) = [place for place, cell in cells.items() if cell == "P"]
    came: dict[Place, list[str]] = {start: []}
    waiting = deque([start])
    while waiting:
        place = waiting.popleft()
        if cells[place] == "G":
            yield from _listed(came[place])
            return
        for step in STEPS:
            after = neighbour(place, step)
            if after in cells and after not in came:
                came[after] = [*came[place], step]
                waiting.append(after)


def _codebreaker(parameters: Parameters, _: str) -> Player:
    digits, length = range(1, parameters["num_numbers"] + 1), parameters["code_length"]
    draw = itertools.product(digits, repeat=length) if parameters["duplicate_numbers"] else None
    codes = list(draw or itertools.permutations(digits, length))

    def pegs(guess: Sequence[int], code: Sequence[int]) -> tuple[int, int]:
        black = sum(a == b for a, b in zip(guess, code, strict=True))
        return black, sum(min(guess.count(digit), code.count(digit)) for digit in set(guess)) - black

    while True:
        guess = codes[len(codes) // 3]
        seen = yield " ".join(map(str, guess))
        black, white = map(int, re.findall(r"(\d+) (?:black|white) peg", seen)[-2:])
        codes = [code for code in codes if pegs(guess, code) == (black, white)]


def _switcher(parameters: Parameters, opening: str) -> Player:
    """Solve the linear equations over two values: the presses around each light make its state."""
    size = parameters["size"]
    lit = [cell == "O" for row in re.findall(r"^\d+: (.*)$", opening, re.MULTILINE) for cell in row.split()]
    rows = []
    for light in range(size * size):
        near = [other for other in range(size * size) if _beside(light, other, size)]
        rows.append(sum(1 << other for other in near) | lit[light] << size * size)
    pivots: list[tuple[int, int]] = []
    for column in range(size * size):
        pivot = next((row for row in rows if row >> column & 1), None)
        if pivot is None:
            continue
        rows.remove(pivot)
        rows = [row ^ pivot if row >> column & 1 else row for row in rows]
        pivots = [(at, row ^ pivot if row >> column & 1 else row) for at, row in pivots] + [(column, pivot)]
    yield from (f"{column // size} {column % size}" for column, row in pivots if row >> size * size & 1)


def _beside(light: int, other: int, size: int) -> bool:
    return abs(light // size - other // size) + abs(light % size - other % size) <= 1


def _slider(_: Parameters, opening: str) -> Player:
    seen = opening
    while True:
        lines = [line.strip("|").split() for line in seen.splitlines() if line.startswith("|")]
        board = [[0 if cell == "." else int(cell) for cell in line] for line in lines]
        seen = yield max(STEPS, key=lambda step: _promise(board, step, depth=3))


def slid(board: list[list[int]], step: str) -> list[list[int]]:
    """Return a board of 2048 after a slide in one direction."""
    if step in ("up", "down"):
        turned = [list(column) for column in zip(*board, strict=True)]
        return [list(row) for row in zip(*slid(turned, "left" if step == "up" else "right"), strict=True)]
    rows = []
    for row in board:
        tiles = [tile for tile in (row if step == "left" else row[::-1]) if tile]
        merged: list[int] = []
        free = False
        for tile in tiles:
            if free and merged[-1] == tile:
                merged[-1], free = 2 * tile, False
            else:
                merged.append(tile)
                free = True
        merged += [0] * (len(row) - len(merged))
        rows.append(merged if step == "left" else merged[::-1])
    return rows


def _promise(board: list[list[int]], step: str, *, depth: int) -> float:
    """Rate a step by free cells and by large tiles along a corner's snake, some steps ahead without new tiles."""
    after = slid(board, step)
    if after == board:
        return -1e9
    flat = [tile for r, row in enumerate(after) for tile in (row if r % 2 == 0 else row[::-1])]
    rating = sum(tile * 0.6**place for place, tile in enumerate(flat)) + 3.0 * flat.count(0)
    return rating if depth == 1 else rating + 0.5 * max(_promise(after, next_, depth=depth - 1) for next_ in STEPS)


def _sweeper(parameters: Parameters, opening: str) -> Player:
    rows, columns = parameters["rows"], parameters["cols"]
    seen = yield f"{rows // 2} {columns // 2}"
    while True:
        drawn = [line[3:].split() for line in seen.splitlines() if re.match(r" ?\d+  ?[\d.*] ", line)]
        cells = {(r, c): cell for r, row in enumerate(drawn) for c, cell in enumerate(row)}
        hidden = {place for place, cell in cells.items() if cell == "."}
        safe = _safe(cells, hidden)
        # A guess if no cell is certain; the tasks are drawn so that no guess is necessary.
        row, column = min(safe or hidden)
        seen = yield f"{row} {column}"


def _safe(cells: Mapping[Place, str], hidden: set[Place]) -> set[Place]:
    """Return hidden cells without a mine, found from each number alone and from pairs of numbers."""
    facts: set[tuple[frozenset[Place], int]] = set()
    for (row, column), cell in cells.items():
        if cell.isdigit():
            near = {(row + r, column + c) for r in (-1, 0, 1) for c in (-1, 0, 1)} & hidden
            if near:
                facts.add((frozenset(near), int(cell)))
    while True:
        more = {
            (larger - smaller, mines - fewer)
            for (smaller, fewer), (larger, mines) in itertools.permutations(facts, 2)
            if smaller < larger
        }
        if more <= facts or len(facts) > 400:
            break
        facts |= more
    return {place for places, mines in facts if mines == 0 for place in places}


def _filler(_: Parameters, opening: str) -> Player:
    lines = re.findall(r"^R\d (.*)$", opening, re.MULTILINE)
    grid = [[0 if cell == "." else int(cell) for cell in line.replace("|", " ").split()] for line in lines]
    empty = [(r, c) for r in range(9) for c in range(9) if not grid[r][c]]

    def fits(r: int, c: int) -> set[int]:
        block = {grid[r // 3 * 3 + i // 3][c // 3 * 3 + i % 3] for i in range(9)}
        return {*range(1, 10)} - {*grid[r]} - {row[c] for row in grid} - block

    def fill() -> bool:
        left = [(len(fits(r, c)), r, c) for r, c in empty if not grid[r][c]]
        if not left:
            return True
        _, r, c = min(left)
        for digit in fits(r, c):
            grid[r][c] = digit
            if fill():
                return True
            grid[r][c] = 0
        return False

    fill()
    yield from (f"{r + 1} {c + 1} {grid[r][c]}" for r, c in empty)


def solutions(equation: str) -> list[dict[str, int]]:
    """Return every assignment of digits to letters that solves an addition of words."""
    *addends, total = re.findall("[A-Z]+", equation)
    weights: dict[str, int] = {}
    for word, sign in [*((word, 1) for word in addends), (total, -1)]:
        for power, letter in enumerate(reversed(word)):
            weights[letter] = weights.get(letter, 0) + sign * 10**power
    first = {word[0] for word in (*addends, total)}
    letters = sorted(weights, key=lambda letter: -abs(weights[letter]))
    found = []

    def assign(place: int, rest: int, digits: dict[str, int]) -> None:
        if abs(rest) > 9 * sum(abs(weights[letter]) for letter in letters[place:]):
            return
        if place == len(letters):
            found.append(digits)
            return
        letter = letters[place]
        for digit in range(letter in first, 10):
            if digit not in digits.values():
                assign(place + 1, rest + digit * weights[letter], {**digits, letter: digit})

    assign(0, 0, {})
    return found


def _decipherer(parameters: Parameters, _: str) -> Player:
    yield from (f"{letter} {digit}" for letter, digit in solutions(parameters["equation"])[0].items())


def _fencer(parameters: Parameters, opening: str) -> Player:
    """Try every rectangle, which is the shape that the game draws."""
    rows, columns = parameters["rows"], parameters["cols"]
    lines = opening.splitlines()
    below = [lines[place + 1] for place, line in enumerate(lines) if re.match(r" ?\d+: \+", line)][:rows]
    clues = {(r, c): line[6 + 4 * c] for r, line in enumerate(below) for c in range(columns)}
    for top, left in itertools.product(range(rows), range(columns)):
        for bottom, right in itertools.product(range(top + 1, rows + 1), range(left + 1, columns + 1)):
            across = {(row, c) for row in (top, bottom) for c in range(left, right)}
            down = {(r, column) for column in (left, right) for r in range(top, bottom)}
            counts = {
                (r, c): ((r, c) in across) + ((r + 1, c) in across) + ((r, c) in down) + ((r, c + 1) in down)
                for r, c in clues
            }
            if all(not clue.isdigit() or counts[place] == int(clue) for place, clue in clues.items()):
                yield from (f"{kind} {r} {c}" for kind, edges in (("h", across), ("v", down)) for r, c in sorted(edges))
                return


def combination(numbers: Sequence[int], target: int) -> list[str] | None:
    """Return moves of Countdown that make *target* from *numbers*, or None if there are no such moves."""
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = [number for place, number in enumerate(numbers) if place not in (i, j)]
        a, b = numbers[i], numbers[j]
        made = [(a - b, "-")] if a > b else []
        made += [(a + b, "+"), (a * b, "*")] if i < j else []
        made += [(a // b, "/")] if a % b == 0 and b > 1 else []
        for result, sign in made:
            move = f"{i} {j} {sign}"
            if result == target:
                return [move]
            if rest and (moves := combination([*rest, result], target)) is not None:
                return [move, *moves]
    return None


def _calculator(parameters: Parameters, _: str) -> Player:
    yield from _listed(combination(parameters["numbers"], parameters["target"]) or ())


PLAYERS: Mapping[str, Callable[[Parameters, str], Player]] = {
    "guess_the_number": _guesser,
    "tower_of_hanoi": _hanoi,
    "frozen_lake": _skater,
    "mastermind": _codebreaker,
    "lights_out": _switcher,
    "2048": _slider,
    "minesweeper": _sweeper,
    "sudoku": _filler,
    "cryptarithm": _decipherer,
    "slitherlink": _fencer,
    "countdown": _calculator,
}

"""Players that win the games of `textarena`: those of `game_solvers`, and others that read a game's own state.

A reward of 1 from a reference proves that a name's games can be won, and nothing about how hard that is.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Final, TypeAlias

from tests.answers.groups import module

Player: TypeAlias = Generator[str, str, None]
"""A generator that yields moves and receives the player's view."""

UNBEATEN: Final = {
    "Blackjack": "its cards decide: no player wins every hand",
    "Secretary": "only a player that knows the later values wins each time",
}
"""Games without a reference, with the reason."""
BEATEN_TILES: Final = 256
"""The largest tile of `2048` that the reference makes; larger ones take it minutes."""


def play_of(name: str, seed: int, **parameters: Any) -> Any:
    """Return the game *name* of *seed*, at its opening."""
    names, play = module("textarena", "textarena_names"), module("textarena", "textarena_play")
    task = {"config": {"game": name, "seed": seed, "parameters": parameters}}
    return play.Play(names.read_task(module("base", "envserver.generic").parse_task(task), seed=0))


@cache
def _drawn(name: str, seed: int) -> Any:
    return play_of(name, seed)


def opened(name: str, seed: int) -> Any:
    """Return a game as `play_of` does; boards that take long are drawn once and copied."""
    if module("textarena", "textarena_names").registered()[name].folder not in ("RushHour", "Sokoban"):
        return play_of(name, seed)
    play = copy.deepcopy(_drawn(name, seed))
    state = play._game.state
    ordered = module("textarena", "textarena_play")._in_order
    state.set_invalid_move = ordered(type(state).set_invalid_move.__get__(state))  # a copied function has the old state
    return play


def cycle_reward(name: str, seed: int, cycle: Sequence[str]) -> float:
    """Return the reward of a player that repeats *cycle* in the game *name* of *seed*."""
    play = opened(name, seed)
    for move in itertools.cycle(cycle):
        if play.is_over:
            return float(play.reward())
        play.move(f"[{move}]")
    raise AssertionError("a cycle has at least one move")


def win(name: str, seed: int) -> tuple[float, list[str]]:
    """Return the reward of the reference in the game *name* of *seed*, and its moves."""
    play = opened(name, seed)
    player = reference(name, play)
    moves = [next(player)]
    while True:
        seen = play.move(moves[-1])
        if play.is_over:
            return float(play.reward()), moves
        moves.append(player.send(seen))


def cycle_moves(name: str, seeds: Sequence[int]) -> list[str]:
    """Return the moves of which cycles are made: all of a game with few moves, else moves that win some game."""
    named = module("textarena", "textarena_names").registered()[name]
    match named.folder:
        case "Game2048" | "FrozenLake" | "Sokoban":
            return ["up", "down", "left", "right"]
        case "TowerOfHanoi":
            return [f"{a} {b}" for a in "ABC" for b in "ABC" if a != b]
        case "LightsOut" | "Minesweeper":
            return [f"{row} {column}" for row in range(4) for column in range(4)]
        case "Blackjack":
            return ["hit", "stand"]
        case "Secretary":
            return ["accept", "continue"]
        case "Hangman":
            return list("etaoinshrdlu")
        case "RushHour":
            return [f"{car}{sign}" for car in "XABCDFGHIJ" for sign in "+-"]
        case "ThreeCardMonte":
            return ["0", "1", "2"]
        case "Slitherlink":
            return [f"{kind} {row} {column}" for kind in "hv" for row in range(3) for column in range(3)]
        case "Cryptarithm":
            return [f"{letter} {digit}" for letter in "SENDMORY" for digit in (0, 1, 5, 9)]
        case "Countdown":
            return [f"{i} {j} {sign}" for i in range(4) for j in range(4) for sign in "+*-" if i != j]
        case "GuessTheNumber":
            return [str(number) for number in range(1, 21)]
    won = sorted({part for seed in seeds for move in win(name, seed)[1] for part in move[1:-1].split("] [")})
    return won[:: max(1, len(won) // 40)]


def has_reference(name: str) -> bool:
    """Return True if `win` wins the game *name*."""
    named = module("textarena", "textarena_names").registered()[name]
    return named.folder not in UNBEATEN and named.parameters.get("target_tile", 0) <= BEATEN_TILES


def reference(name: str, play: Any) -> Player:
    """Return the player that wins *play*, a game of *name*."""
    named = module("textarena", "textarena_names").registered()[name]
    if named.folder in KNOWING and not (named.folder == "Mastermind" and "extreme" not in name):
        return _listed(KNOWING[named.folder](play._game))
    title = module("game", "game_titles").ALIASES[named.folder.lower().replace("game2048", "2048-v0")]
    player = module("game", "game_solvers").PLAYERS[title](named.parameters, play.opening)
    return _bracketed(player)


def _listed(moves: Iterable[str]) -> Player:
    for move in moves:  # noqa: UP028 - an iterator cannot receive the player's view
        yield move


def _bracketed(player: Player) -> Player:
    move = next(player)
    while True:
        seen = yield f"[{move}]"
        move = player.send(seen)


def _mines(game: Any) -> Iterator[str]:
    yield f"[{game.rows // 2} {game.cols // 2}]"
    for row, column in itertools.product(range(game.rows), range(game.cols)):
        if game.grid[row][column] != -1 and not game.revealed[row][column]:
            yield f"[{row} {column}]"


def _letters(game: Any) -> list[str]:
    rows = enumerate(game.state.game_state["solution"])
    cells = [f"[{r} {c} {letter}]" for r, row in rows for c, letter in enumerate(row) if letter != "."]
    return [" ".join(cells)]


def _marks(game: Any) -> list[str]:
    """Mark every cell as the solution has it: a table with two items that share a name takes a second time."""
    marks = [
        f"[{row} {column} {mark}]"
        for table in game.game_board_solution.values()
        for row, cells in table.items()
        for column, mark in cells.items()
    ]
    return [" ".join(marks)]


def _found(game: Any) -> list[str]:
    moves = []
    for word, (row, column, direction) in game.placed_words.items():
        far = len(word) - 1
        end = (row, column + far) if direction == "across" else (row + far, column)
        moves.append(f"[{row} {column} {end[0]} {end[1]}]")
    return moves


def _ladder(game: Any) -> list[str]:
    length = len(game.target_word)
    spelled = {word for word in game.universal_word_list if len(word) == length and word.isascii() and word.isalpha()}
    came = {game.start_word: ""}
    waiting = deque([game.start_word])
    while game.target_word not in came:
        word = waiting.popleft()
        for place, letter in itertools.product(range(length), "abcdefghijklmnopqrstuvwxyz"):
            after = word[:place] + letter + word[place + 1 :]
            if after in spelled and after not in came:
                came[after] = word
                waiting.append(after)
    path = [game.target_word]
    while (before := came[path[-1]]) != game.start_word:
        path.append(before)
    return [f"[{word}]" for word in reversed(path)]


def _cars(game: Any) -> list[str]:
    def moves(cars: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        full = {cell for car in cars for cell in car.cells()}
        for place, car in enumerate(cars):
            for forward, sign in ((True, "+"), (False, "-")):
                row, column = car.front(forward)
                if (row, column) not in full and 0 <= row < 6 and 0 <= column < 6:
                    after = car.copy()
                    after.move(forward)
                    yield f"[{car.vid}{sign}]", (*cars[:place], after, *cars[place + 1 :])

    start = tuple(car.copy() for car in game.state.game_state["vehicles"].values())
    return _search(start, moves, lambda cars: any(car.vid == "X" and car.col == 4 for car in cars))


def _boxes(game: Any) -> list[str]:
    steps = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
    cells = {(r, c): int(cell) for r, row in enumerate(game.room_fixed) for c, cell in enumerate(row)}
    targets = {place for place, cell in cells.items() if cell == 2}
    state = {(r, c): int(cell) for r, row in enumerate(game.room_state) for c, cell in enumerate(row)}

    def moves(at: Any) -> Iterator[tuple[str, Any]]:
        (row, column), boxes = at
        for name, (down, right) in steps.items():
            place, beyond = (row + down, column + right), (row + 2 * down, column + 2 * right)
            if place not in boxes and cells.get(place):
                yield f"[{name}]", (place, boxes)
            elif place in boxes and cells.get(beyond) and beyond not in boxes:
                yield f"[{name}]", (place, boxes - {place} | {beyond})

    boxes = frozenset(place for place, cell in state.items() if cell in (3, 4))
    start = (next(place for place, cell in state.items() if cell == 5), boxes)
    return _search(start, moves, lambda at: at[1] == targets)


def _pegs(game: Any) -> list[str]:
    def moves(board: tuple[bool, ...]) -> Iterator[tuple[str, tuple[bool, ...]]]:
        for start, over, end in game.ALLOWED_MOVES:
            if board[start] and board[over] and not board[end]:
                after = list(board)
                after[start] = after[over] = False
                after[end] = True
                yield f"[{start} {end}]", tuple(after)

    return _search(tuple(game.state.game_state["board"]), moves, lambda board: sum(board) == 1)


def _search(start: Any, moves: Callable[[Any], Iterable[tuple[str, Any]]], is_end: Callable[[Any], bool]) -> list[str]:
    """Return the shortest list of moves from *start* to an end."""
    came: dict[Any, tuple[Any, str] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        here = waiting.popleft()
        if is_end(here):
            path = []
            while (step := came[here]) is not None:
                here = step[0]
                path.append(step[1])
            return path[::-1]
        for move, after in moves(here):
            if after not in came:
                came[after] = (here, move)
                waiting.append(after)
    raise AssertionError("no moves lead to an end")


def _sets(game: Any) -> Iterator[str]:
    """Name a set in each turn. A move that cannot be read takes no turn, and has cards dealt to a board without one."""
    while True:
        board = game.state.game_state["board"]
        for one, other, third in itertools.combinations(range(len(board)), 3):
            values = zip(board[one], board[other], board[third], strict=True)
            if all(len(set(value)) != 2 for value in values):
                yield f"[{one + 1}, {other + 1}, {third + 1}]"
                break
        else:
            yield "[deal]"


KNOWING: Final[dict[str, Callable[[Any], Iterable[str]]]] = {
    "Crosswords": _letters,
    "Hangman": lambda game: [f"[{game.state.game_state['target_word']}]"],
    "LogicPuzzle": _marks,
    "Mastermind": lambda game: [f"[{' '.join(map(str, game.state.game_state['secret_code']))}]"],
    "Minesweeper": _mines,
    "PegJump": _pegs,
    "RushHour": _cars,
    "Set": _sets,
    "Sokoban": _boxes,
    "ThreeCardMonte": lambda game: [f"[{game.ball_pos}]"],
    "WordLadder": _ladder,
    "WordSearch": _found,
    "Wordle": lambda game: [f"[{game.state.game_state['secret_word']}]"],
}
"""Games, and the moves that win them, from their own state."""

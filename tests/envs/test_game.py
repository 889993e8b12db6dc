"""The game environment: moves, levels, the grid world, TextArena's games and their randomness, rewards."""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.deadlines import COMMAND_S

ROOT = Path(__file__).resolve().parents[2]


def game_module(name: str) -> Any:
    """Import a module of the environment from its folder, as its server does."""
    for folder in ("env_images/base", "env_images/game"):
        if (path := str(ROOT / folder)) not in sys.path:
            sys.path.append(path)
    return importlib.import_module(name)


config = game_module("game_config")
grids = game_module("game_grid")
levels = game_module("game_levels")
playing = game_module("game_play")
rewards = game_module("game_rewards")
textarena = game_module("game_textarena")
base = game_module("envserver.textarena")
titles = game_module("game_titles")
InvalidGame = playing.InvalidGame

textarena.load()


def grid(rows: list[str], **level: Any) -> Any:
    return grids.Grid(levels.read_level({"map": rows, **level}, seed=0))


def walk(game: Any, *moves: str) -> str:
    """Make moves and return the observation after the last move."""
    return [game.play(move) for move in moves][-1]  # type: ignore[no-any-return]  # Any


# Moves


@pytest.mark.parametrize(
    ("message", "move"),
    [
        pytest.param("[up]", "up", id="brackets"),
        pytest.param("up", "up", id="no brackets"),
        pytest.param("  A \n C ", "A C", id="white space"),
        pytest.param("[left] is bad, so [ right ]", "right", id="the last of two"),
        pytest.param("[[3 4]]", "3 4", id="brackets in brackets"),
        pytest.param("[up", "[up", id="a bracket that never closes"),
        pytest.param("", "", id="nothing"),
        pytest.param("[]", "", id="empty brackets"),
        pytest.param("x" * 5_000, "x" * 100, id="a flood"),
        pytest.param("[" * 100_000, "[" * 100, id="nothing but brackets"),
    ],
)
def test_a_move_is_the_text_in_the_last_brackets_or_else_the_whole_message(message: str, move: str) -> None:
    assert base.move_of(message) == move


@pytest.mark.parametrize(
    ("message", "move"),
    [
        ("Guess a number, such as [5].", ""),
        ("> rules\n  Guess a number, such as [5].\nI guess [7].", "7"),
        ("I guess a number, such as [5].", "5"),
        ("[5]", "5"),
    ],
)
def test_an_example_in_the_rules_is_no_move_of_the_agent(message: str, move: str) -> None:
    rules = base.rules_of("Guess a number, such as [5].\n[5]\nYou have 3 turns.")

    assert base.move_of(message, rules) == move


# Levels


@pytest.mark.parametrize(
    ("level", "said"),
    [
        pytest.param(None, "config.level: must be an object", id="null"),
        pytest.param({"map": []}, "config.level.map: must be a list of 1 to 20 rows", id="no rows"),
        pytest.param({"map": ["S.G", ".."]}, "config.level.map[1]: must be a text", id="ragged"),
        pytest.param({"map": ["S.G", 3]}, "config.level.map[1]: must be a text", id="a row that is not a text"),
        pytest.param({"map": ["S.x"]}, "config.level.map[0]: unknown cell 'x' in column 2", id="an unknown cell"),
        pytest.param({"map": ["..G"]}, "must have one start, S; it has 0", id="no start"),
        pytest.param({"map": ["SSG"]}, "must have one start, S; it has 2", id="two starts"),
        pytest.param({"map": ["S.."]}, "config.level.map: no goal can be reached", id="no goal"),
        pytest.param({"map": ["S#G"]}, "config.level.map: no goal can be reached", id="a goal behind a wall"),
        pytest.param({"map": ["S^G"]}, "config.level.map: no goal can be reached", id="a goal behind a hazard"),
        pytest.param({"map": ["SAG"]}, "config.level.map: no goal can be reached", id="a door without a key"),
        pytest.param({"map": ["SAAAAG"]}, "at most 3 doors", id="too many doors"),
        pytest.param({"map": ["SG"], "depth": 3}, "config.level: unknown key 'depth'", id="an unknown key"),
        pytest.param(
            {"map": ["SG"], "view": 0}, "config.level.view: must be a whole number from 1 to 20", id="a view of 0"
        ),
        pytest.param({"width": 5}, "config.level.height: must be a whole number from 3 to 20", id="no height"),
        pytest.param({"width": 21, "height": 5}, "config.level.width: must be", id="too wide"),
        pytest.param({"width": 5, "height": 5, "doors": 2}, "config.level.doors: must be", id="no room for doors"),
        pytest.param({"width": 5, "height": 5, "seed": True}, "config.level.seed: must be", id="a seed of true"),
    ],
)
def test_an_unplayable_level_is_refused_with_the_place_of_the_fault(level: object, said: str) -> None:
    with pytest.raises(InvalidGame) as refused:
        levels.read_level(level, seed=0)

    assert said in str(refused.value)


@settings(max_examples=40)
@given(
    width=st.integers(7, 12),
    height=st.integers(4, 10),
    doors=st.integers(0, 2),
    hazards=st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_a_drawn_level_can_be_solved_and_is_the_same_for_the_same_seed(
    width: int, height: int, doors: int, hazards: int, seed: int
) -> None:
    drawn = [levels.draw_map(width, height, walls=20, doors=doors, hazards=hazards, seed=seed) for _ in range(2)]
    text = "".join(drawn[0])

    assert drawn[0] == drawn[1]
    assert (len(drawn[0]), {len(row) for row in drawn[0]}) == (height, {width})
    assert [text.count(cell) for cell in "SG^"] == [1, 1, hazards]
    assert sum(text.count(door) for door in "ABC") == doors
    assert grid(drawn[0]).optimal_turns >= 2


def test_a_level_without_its_own_seed_follows_the_sessions_seed() -> None:
    size = {"width": 8, "height": 8}

    first, again, other = (levels.read_level(size, seed=seed) for seed in (1, 1, 2))

    assert first == again != other


# The grid world


def test_the_fewest_turns_count_picking_and_opening() -> None:
    assert grid(["S.G"]).optimal_turns == 2
    assert grid(["SaAG"]).optimal_turns == 5  # right, pick, open, right, right
    assert grid(["S.", "#.", "G."]).optimal_turns == 4


def test_a_key_opens_its_door_and_the_way_to_the_goal() -> None:
    game = grid(["SaAG"])

    seen = [game.play(move) for move in ("right", "right", "open", "pick", "open", "right", "right")]

    assert [text.partition("\n")[0] for text in seen] == [
        "You went right.",
        "Invalid move: a locked door is right of you.",
        "Invalid move: there is no closed door beside you that you have the key for.",
        "You picked up key a.",
        "You opened a door.",
        "You went right.",
        "You reached the goal.",
    ]
    assert seen[0].split("\n")[2:] == [".@AG", "You stand on key a. Keys that you have: none."]
    assert seen[4].split("\n")[2:] == [".@.G", "Keys that you have: a."]
    assert (game.is_over, game.is_won) == (True, True)


def test_walls_and_the_edge_of_the_map_stop_the_player() -> None:
    game = grid(["S#.", "..G"])

    assert walk(game, "up").startswith("Invalid move: a wall is up of you.")
    assert walk(game, "right").startswith("Invalid move: a wall is right of you.")
    assert "there is no move 'jump'" in walk(game, "jump")
    assert game.valid_moves() == ["[down]"]
    assert (game.is_over, game.progress()) == (False, 0.0)


def test_a_hazard_ends_the_game_without_a_win_and_without_progress() -> None:
    game = grid(["S.^", "..G"])

    assert walk(game, "right", "right") == "You stepped on a hazard. The game is lost."
    assert (game.is_over, game.is_won, game.progress(), game.valid_moves()) == (True, False, 0.0, [])


def test_progress_is_the_completed_part_of_the_shortest_way() -> None:
    game = grid(["S...G"])

    assert [walk(game, move) and game.progress() for move in ("right", "right", "left", "right", "right")] == [
        0.25,
        0.5,
        0.25,
        0.5,
        0.75,
    ]


def test_a_player_with_a_short_view_sees_only_the_cells_in_view() -> None:
    game = grid(["S......", ".......", "......G"], view=1)

    opening, after = game.opening(), game.play("right")

    assert opening.endswith("\n###\n#@.\n#..\nKeys that you have: none.")
    assert after.endswith("\n###\n.@.\n...\nKeys that you have: none.")
    assert "You see 1 cells far in each direction." in opening


# TextArena's games


def started(name: str, *, seed: int = 5, **parameters: Any) -> Any:
    return config.read_game({"game": name, "seed": seed, "parameters": parameters}, seed=0)[0]


MOVES = {
    "guess_the_number": ["3", "17", "9", "12"],
    "tower_of_hanoi": ["A C", "A B", "B A", "C B"],
    "frozen_lake": ["right", "left", "down", "up"],
    "mastermind": ["1 2 3 4", "5 6 1 2", "3 4 5 6", "6 5 4 3"],
    "lights_out": ["0 0", "1 3", "4 4", "2 2"],
    "2048": ["up", "left", "down", "right", "up", "left", "down", "right"],
    "minesweeper": ["4 4", "0 0", "7 7", "0 7"],
    "sudoku": ["1 1 1", "9 9 9", "5 5 5"],
    "cryptarithm": ["S 9", "E 5", "N 6", "D 7"],
    "slitherlink": ["h 0 0", "v 0 0", "h 1 1", "v 2 2"],
    "countdown": ["0 1 +", "0 1 *", "0 1 -"],
}


def trajectory(game: Any, moves: list[str]) -> list[str]:
    seen = [game.opening()]
    for move in moves:
        if not game.is_over:
            seen.append(game.play(move))
    return seen


@pytest.mark.parametrize("name", sorted(titles.TITLES))
def test_a_game_is_the_same_for_the_same_seed_alone_or_next_to_other_games(name: str) -> None:
    alone = {seed: trajectory(started(name, seed=seed), MOVES[name]) for seed in (5, 6)}

    first, second = started(name, seed=5), started(name, seed=6)
    beside = {5: [first.opening()], 6: [second.opening()]}
    for move in MOVES[name]:
        for seed, game in ((5, first), (6, second)):
            if not game.is_over:
                beside[seed].append(game.play(move))
            random.seed(1)  # as other code of the process may do
        started("2048", seed=99).play("up")

    assert beside == alone


def test_a_mine_ends_the_game_which_is_lost_whatever_was_opened_before() -> None:
    game = started("minesweeper", rows=6, cols=6, num_mines=5)
    game.play("2 2")
    grid = game._game.grid
    mines = [f"{row} {column}" for row in range(6) for column in range(6) if grid[row][column] == -1]
    safe = [f"{row} {column}" for row in range(6) for column in range(6) if grid[row][column] != -1]

    seen = game.play(mines[0])

    assert seen == f"You hit a mine at ({mines[0].replace(' ', ', ')}). The game is lost."
    assert (game.is_over, game.is_won) == (True, False)
    other = started("minesweeper", rows=6, cols=6, num_mines=5)
    other.play("2 2")
    for move in safe:
        row, column = map(int, move.split())
        if not other._game.revealed[row][column]:  # a second opening of a cell is an invalid move
            other.play(move)
    assert (other.is_over, other.is_won) == (True, True)


def test_games_in_threads_do_not_disturb_each_other() -> None:
    alone = [trajectory(started("2048", seed=seed), MOVES["2048"] * 4) for seed in range(16)]

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda seed: trajectory(started("2048", seed=seed), MOVES["2048"] * 4), range(16)))

    assert together == alone


def test_playing_does_not_change_the_random_state_of_the_process() -> None:
    random.seed(7)
    before = random.getstate()

    for name in titles.TITLES:
        trajectory(started(name), MOVES[name])

    assert random.getstate() == before


def test_a_different_seed_gives_a_different_game() -> None:
    drawn = ("frozen_lake", "lights_out", "2048", "sudoku", "slitherlink")

    assert {name for name in drawn if started(name, seed=1).opening() == started(name, seed=2).opening()} == set()


def test_no_module_that_needs_a_download_or_a_network_is_loaded() -> None:
    program = "import sys, game_textarena; game_textarena.load(); print(*sys.modules)"
    paths = os.pathsep.join(str(ROOT / "env_images" / name) for name in ("base", "game"))

    done = subprocess.run(  # a process of its own: other tests load more of the package
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
        timeout=COMMAND_S,
    )

    loaded = {name for name in done.stdout.split() if name.startswith("textarena.")}
    assert {
        name for name in loaded if "online" in name or ".api" in name or ".agents" in name or ".utils" in name
    } == set()
    assert "textarena.core" in loaded


@settings(max_examples=60)
@given(data=st.data())
def test_no_message_breaks_a_game(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(titles.TITLES)))
    some = st.sampled_from([*MOVES[name], "0 0", "9 9", "-1", "99999999999999999999", "h 9 9", "A A", "0 0 /", "[", ""])
    messages = data.draw(st.lists(some | st.text(max_size=20), max_size=12))
    game = started(name)

    for message in messages:
        if not game.is_over:
            assert isinstance(game.play(base.move_of(message)), str)
            assert 0.0 <= playing.outcome_of(game, turns=1).progress <= 1.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param({}, "config.game: no game None", id="no game"),
        pytest.param({"game": ["grid"]}, "config.game: no game", id="a game that is not a text"),
        pytest.param({"game": "Wordle-v0"}, "config.game: no game 'Wordle-v0'", id="a game that needs a download"),
        pytest.param({"game": "2048", "level": {}}, "config.level: unknown key", id="a level of another game"),
        pytest.param({"game": "2048", "seed": -1}, "config.seed: must be a whole number", id="a negative seed"),
        pytest.param({"game": "2048", "max_turns": 501}, "config.max_turns: must be", id="too many turns"),
        pytest.param({"game": "2048", "num_players": 2}, "config.num_players: every game", id="two players"),
        pytest.param({"game": "2048", "parameters": []}, "config.parameters: must be an object", id="a list"),
        pytest.param({"game": "2048", "parameters": {"target_tile": 100}}, "a power of two", id="an impossible tile"),
        pytest.param({"game": "2048", "parameters": {"board_size": 100}}, "board_size: must be", id="a huge board"),
        pytest.param({"game": "sudoku", "parameters": {"clues": 17}}, "from 36 to 80", id="too few clues"),
        pytest.param({"game": "sudoku", "parameters": {"clue": 40}}, "has no parameter 'clue'", id="a misspelling"),
        pytest.param(
            {"game": "guess_the_number", "parameters": {"min_number": 9, "max_number": 9}}, "below", id="no choice"
        ),
        pytest.param(
            {"game": "minesweeper", "parameters": {"rows": 4, "cols": 4, "num_mines": 6}}, "num_mines", id="all mines"
        ),
        pytest.param({"game": "mastermind", "parameters": {"code_length": 8}}, "cannot be longer", id="a long code"),
        pytest.param(
            {"game": "mastermind", "parameters": {"duplicate_numbers": 1}}, "true or false", id="a number for a flag"
        ),
        pytest.param({"game": "frozen_lake", "parameters": {"num_holes": 9}}, "at most 5", id="all holes"),
        pytest.param({"game": "cryptarithm", "parameters": {"equation": "1 + 1 = 2"}}, "an addition", id="digits"),
        pytest.param(
            {"game": "cryptarithm", "parameters": {"equation": "ABCDEF + GHIJK = LMN"}}, "10 different", id="letters"
        ),
        pytest.param({"game": "countdown", "parameters": {"numbers": [1]}}, "a list of 2 to 8", id="one number"),
    ],
)
def test_an_unplayable_game_is_refused_with_the_place_of_the_fault(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidGame) as refused:
        config.read_game(given, seed=0)

    assert said in str(refused.value)


def test_a_board_that_is_already_solved_is_drawn_again() -> None:
    boards = [started("lights_out", seed=seed, size=2).opening() for seed in range(100)]

    # About six of the 100 seeds first draw a board without a light.
    assert [board for board in boards if "O" not in board.split("complete):")[1]] == []


def test_textarenas_own_ids_name_the_same_games() -> None:
    named, own = (
        config.read_game({"game": name, "seed": 3}, seed=0)[0].opening()
        for name in ("GuessTheNumber-v0", "guess_the_number")
    )

    assert named == own


def test_two_invalid_moves_in_a_row_lose_a_game_whose_rules_say_so() -> None:
    game = started("tower_of_hanoi")

    first, second = game.play("up"), game.play("A A A")

    assert "You attempted an invalid move" in first
    assert "Invalid Move" in second
    assert (game.is_over, game.is_won) == (True, False)


def test_all_clues_satisfied_without_a_loop_is_not_a_win() -> None:
    # A cross satisfies each clue of 2, so the game's own measure is 1. Two invalid moves then end the game with it.
    game = started("slitherlink", rows=2, cols=2)

    walk(game, "h 1 0", "h 1 1", "v 0 1", "v 1 1", "nonsense", "nonsense")

    assert game.progress() == 1.0
    assert (game.is_over, game.is_won, playing.outcome_of(game, turns=6).progress) == (True, False, 0.99)


@pytest.mark.parametrize("name", sorted(titles.TITLES))
def test_progress_is_0_at_the_start_and_after_moves_that_are_not_valid(name: str) -> None:
    for seed in range(20):
        game = started(name, seed=seed)
        before = game.progress()
        walk(game, "nonsense", "nonsense")

        assert (before, game.progress()) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "parameters", "moves", "progress"),
    [
        pytest.param("guess_the_number", {"max_number": 16}, ["16", "15"], 0.048, id="two bad guesses"),
        pytest.param("tower_of_hanoi", {}, ["A C", "A B"], 0.0, id="the smallest disk below all"),
        pytest.param("tower_of_hanoi", {}, ["A C", "A B", "C B", "A C"], 1 / 3, id="the largest disk in place"),
        pytest.param("cryptarithm", {"equation": "A + B = C"}, ["A 1", "B 2", "C 9"], 0.0, id="a wrong table"),
        pytest.param("cryptarithm", {"equation": "AB + CD = EF"}, ["B 1", "D 2", "F 3"], 0.5, id="a right column"),
        pytest.param("cryptarithm", {"equation": "AB + CD = EF"}, ["B 1", "D 2", "F 4"], 0.0, id="a wrong column"),
        pytest.param("countdown", {"numbers": [100, 75, 6, 4], "target": 105}, ["2 3 +"], 0.0, id="no closer result"),
        pytest.param("countdown", {"numbers": [100, 75, 6, 4], "target": 105}, ["0 3 +"], 0.8, id="a closer result"),
        pytest.param("countdown", {"numbers": [5, 6], "target": 5}, ["9 9 +"], 0.0, id="a target that is given"),
    ],
)
def test_only_what_is_right_is_progress(
    name: str, parameters: dict[str, Any], moves: list[str], progress: float
) -> None:
    game = started(name, **parameters)

    walk(game, *moves)

    assert game.progress() == pytest.approx(progress, abs=0.001)


def test_a_hole_takes_the_progress() -> None:
    game = started("frozen_lake", size=3, num_holes=3, seed=0)  # a hole in the middle

    seen = [(game.play(step), game.progress(), game.is_over)[1:] for step in ("right", "down")]

    assert seen == [(0.25, False), (0.0, True)]
    assert not game.is_won


# Rewards


def outcome(*, won: bool = True, progress: float = 1.0, turns: int = 10, optimal: int | None = 5) -> Any:
    return playing.Outcome(won, progress, turns, optimal)


@pytest.mark.parametrize(
    ("evaluation", "outcome", "reward"),
    [
        pytest.param({}, outcome(), 1.0, id="a win by default"),
        pytest.param({}, outcome(won=False, progress=0.9), 0.0, id="a loss by default"),
        pytest.param({"reward_function": "won"}, outcome(won=False, progress=0.9), 0.0, id="won"),
        pytest.param({"reward_function": "progress"}, outcome(won=False, progress=0.4), 0.4, id="progress"),
        pytest.param({"reward_function": "efficiency"}, outcome(), 0.5, id="twice the fewest turns"),
        pytest.param({"reward_function": "efficiency(slack=1.5)"}, outcome(), 0.75, id="with slack"),
        pytest.param({"reward_function": "efficiency", "slack": 2}, outcome(), 1.0, id="slack next to the call"),
        pytest.param({"reward_function": "efficiency"}, outcome(won=False), 0.0, id="an efficient loss"),
    ],
)
def test_a_reward_function_judges_the_end_of_the_game(evaluation: dict[str, Any], outcome: Any, reward: float) -> None:
    assert rewards.read_evaluation(evaluation, optimal_turns=5)(outcome) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("evaluation", "optimal"),
    [
        pytest.param({"reward_function": "exact_match('x')"}, 5, id="a function for texts"),
        pytest.param({"reward_function": "win"}, 5, id="an unknown function"),
        pytest.param({"reward_function": "won(1)"}, 5, id="a superfluous argument"),
        pytest.param({"reward_function": "efficiency(slack=0.1)"}, 5, id="a slack below 1"),
        pytest.param({"reward_function": "efficiency(slack='a')"}, 5, id="a slack that is not a number"),
        pytest.param({"reward_function": "efficiency"}, None, id="efficiency with unknown fewest turns"),
        pytest.param({"reward_function": "__import__('os')"}, 5, id="code"),
        pytest.param({"script": "exit 0"}, 5, id="a script"),
    ],
)
def test_an_invalid_evaluation_is_refused(evaluation: dict[str, Any], optimal: int | None) -> None:
    with pytest.raises(InvalidGame, match="evaluation"):
        rewards.read_evaluation(evaluation, optimal_turns=optimal)

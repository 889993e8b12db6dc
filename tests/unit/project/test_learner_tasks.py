"""The features of tasks that the learner example sees; a policy with the right weights solves the tasks."""

from __future__ import annotations

import importlib
import json
import random
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from examples.learner import arithmetic, games
from examples.learner.arithmetic import features, read, reducible, solve, written
from examples.learner.games import World
from examples.learner.policy import Policy

ROOT = Path(__file__).resolve().parents[3]
TASKS = ROOT / "tasks"
LATER = ("product after product", "sum after product", "sum before product", "sum after sum")
KNOWS = Policy(dict.fromkeys(("+ add", "- subtract", "* multiply", "/ divide"), 99.0) | dict.fromkeys(LATER, -40.0))
"""A trained policy: each operator's own procedure, products first, and equal precedence from the left."""
PLAYS = Policy(
    {"pick a key": 99.0, "open a door": 99.0, "vain": -99.0, "hazard": -99.0}
    | {"goal nearer": 60.0, "door nearer": 40.0, "key nearer": 25.0, "unseen nearer": 15.0}
)
"""A trained policy of a grid world: it prefers the goal, then doors, then keys, then unseen cells."""
HALL = """You (@) are in a grid world. Reach the goal (G). You see the whole map.

@.a#.
..#A.
^...G
Keys that you have: none."""
DARK = """You see 1 cells far in each direction.

###
#@.
#..
Keys that you have: none."""


def tasks(environment: str, tags: tuple[str, ...]) -> list[dict[str, Any]]:
    files = [TASKS / environment / f"{split}.jsonl" for split in ("train", "test")]
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [task for task in map(json.loads, lines) if set(task["tags"]) & set(tags)]


def grid_world(config: dict[str, Any]) -> Any:
    """Return the game that the environment's server plays; import it from the server's folder."""
    for folder in ("env_images/base", "env_images/game"):
        if (path := str(ROOT / folder)) not in sys.path:
            sys.path.append(path)
    game, _ = importlib.import_module("game_config").read_game(config, seed=0)
    return game


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        pytest.param("Calculate 8 - -1.", [8, "-", -1], id="a negative number"),
        pytest.param("the arithmetic problem: 13 + 73 - 46 =", [13, "+", 73, "-", 46], id="a chain"),
        pytest.param(
            "Calculate -( 2 * 3 ) + 1.", [-1, "*", "(", 2, "*", 3, ")", "+", 1], id="a minus sign before brackets"
        ),
        pytest.param("to 12 digits.\n(4.9-9.0) = ?", ["(", Fraction("4.9"), "-", 9, ")"], id="decimals"),
        pytest.param("Calculate ( 7 ).", [7], id="brackets around one number"),
    ],
)
def test_a_question_is_split_into_tokens(text: str, tokens: list[Any]) -> None:
    assert read(text) == tokens


def test_a_text_without_an_expression_is_refused() -> None:
    with pytest.raises(ValueError, match="no expression"):
        read("How many legs have they?")


def test_only_neighbouring_numbers_can_be_reduced() -> None:
    assert reducible(read("2 * ( 3 + 4 ) - 5")) == [4]


def test_the_features_of_a_choice_are_its_operator_its_neighbours_and_the_length_of_the_numbers() -> None:
    tokens = read("120 + 3 * 4")

    assert features(tokens, 1, "add") == ("+ add", "+ add 3", "sum after end", "sum before product")
    assert features(tokens, 3, "divide") == ("* divide", "* divide 1", "product after sum", "product before end")


@pytest.mark.parametrize(
    ("value", "text"), [(Fraction(-6), "-6"), (Fraction(1, 4), "0.25"), (Fraction(2, 3), "0.666666666667")]
)
def test_an_answer_is_written_exactly_or_with_twelve_digits(value: Fraction, text: str) -> None:
    assert written(value) == text


def test_a_policy_that_knows_the_rules_solves_every_task() -> None:
    offered = tasks("math", arithmetic.TAGS)
    chance = random.Random(1)

    wrong = []
    for task in offered:
        right, answer = (
            float(task["evaluation"]["entry"]["answer"]),
            float(solve(task["instruction"], KNOWS, chance)[0]),
        )
        if answer != pytest.approx(right, rel=1e-9):
            wrong.append(task["id"])

    assert len(offered) == 216
    assert wrong == []


def test_an_untrained_policy_decides_once_for_each_operator() -> None:
    _, decisions = solve("Calculate 1 + 2 * ( 3 - 4 ).", Policy(), random.Random(1))

    assert len(decisions) == 3
    assert len(decisions[0].options) == 2 * len(arithmetic.PROCEDURES)


def test_the_features_of_a_move_describe_its_effect() -> None:
    world = World.begun(HALL)
    ways = world.ways()

    assert {kind: far[world.at] for kind, far in ways.items()} == {"goal": 6, "key": 2, "locked door": 6}
    assert world.features("up", ways) == ("vain", "vain step")
    assert world.features("right", ways) == (
        "been 0", "goal nearer", "key nearer", "locked door nearer", "thing nearer",
    )  # fmt: skip
    assert world.features("down", ways) == (
        "been 0", "goal nearer", "key farther", "locked door nearer", "thing farther",
    )  # fmt: skip
    assert world.features("pick", ways) == ("vain", "vain pick")
    assert world.features("open", ways) == ("vain", "vain open")


def test_a_key_can_be_picked_up_and_is_no_longer_a_target_then() -> None:
    world = World.begun(HALL)
    for at in (1, 2):
        row = "".join("@" if column == at else cell for column, cell in enumerate("..a#."))
        under = "You stand on key a. " if at == 2 else ""
        world.moved = "right"
        world.see(f"You went right.\n\n{row}\n..#A.\n^...G\n{under}Keys that you have: none.")

    assert world.at == (0, 2)
    assert world.features("pick", world.ways()) == ("pick a key",)
    assert world.features("left", world.ways())[0] == "been 1"

    world.moved = "pick"
    world.see("You picked up key a.\n\n..@#.\n..#A.\n^...G\nKeys that you have: a.")

    assert world.held == {"a"}
    assert "key" not in world.ways()
    assert world.features("pick", world.ways()) == ("vain", "vain pick")


@pytest.mark.parametrize(
    ("held", "kind", "opening"),
    [
        pytest.param("none", "locked door", ("vain", "vain open"), id="without the key"),
        pytest.param("b, a", "door", ("open a door",), id="with the key"),
    ],
)
def test_a_door_can_be_opened_with_its_key(held: str, kind: str, opening: tuple[str, ...]) -> None:
    beside = World.begun(f"You see the whole map.\n\n...#G\n..@A.\n...#.\nKeys that you have: {held}.")

    assert beside.features("open", beside.ways()) == opening
    assert beside.features("right", beside.ways()) == ("vain", "vain step")
    assert beside.ways()[kind][beside.at] == 1
    assert "goal" not in beside.ways(), "no way leads through a closed door"


def test_a_hazard_is_distinguished_from_floor_and_no_path_crosses_it() -> None:
    world = World.begun("You see the whole map.\n\n@^G\n.#.\n...\nKeys that you have: none.")

    assert world.features("right", world.ways()) == ("hazard",)
    assert world.ways()["goal"][world.at] == 6


def test_cells_that_were_seen_are_remembered_on_a_partial_map() -> None:
    world = World.begun(DARK)
    assert world.features("down", world.ways()) == ("been 0", "unseen nearer")

    world.moved = "down"
    world.see("You went down.\n\n#..\n#@.\n##G\nKeys that you have: none.")
    assert world.at == (1, 0)
    assert world.ways()["goal"][0, 0] == 3

    world.moved = "left"
    world.see("Invalid move: a wall is left of you.\n\n#..\n#@.\n##G\nKeys that you have: none.")
    assert (world.at, world.been) == ((1, 0), {(0, 0): 1, (1, 0): 2})


def test_a_text_without_a_map_is_refused() -> None:
    with pytest.raises(ValueError, match="no map"):
        World.begun("You reached the goal.")


def test_a_trained_policy_wins_every_grid_world_in_few_turns() -> None:
    offered = tasks("game", games.TAGS)
    chance = random.Random(1)

    slow = []
    for task in offered:
        game, turns = grid_world(task["config"]), 0
        world = World.begun(game.opening())
        while not game.is_over and turns < task["config"]["max_turns"]:
            world.decide(PLAYS, chance)
            text, turns = game.play(world.moved), turns + 1
            if not game.is_over:
                world.see(text)
        if not game.is_won or turns > 2 * game.optimal_turns:
            slow.append((task["id"], turns, game.optimal_turns))

    assert len(offered) == 12
    assert slow == []


def test_an_untrained_policy_chooses_among_all_moves() -> None:
    decision = World.begun(HALL).decide(Policy(), random.Random(1))

    assert len(decision.options) == len(games.MOVES)

"""What the example's learner sees of tasks, and that the right choices solve them."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from examples.learner import arithmetic
from examples.learner.arithmetic import features, read, reducible, solve, written
from examples.learner.games import Crossing, Guessing, read_board
from examples.learner.policy import Policy

TASKS = Path(__file__).resolve().parents[2] / "tasks"
LATER = ("product after product", "sum after product", "sum before product", "sum after sum")
KNOWS = Policy(dict.fromkeys(("+ add", "- subtract", "* multiply", "/ divide"), 99.0) | dict.fromkeys(LATER, -40.0))
"""What a policy comes to: each operator's procedure, products first, and equals from the left."""
LAKE = """Current Board:

+-----+-----+-----+
|  P  |     |  H  |
+-----+-----+-----+
|     |  H  |     |
+-----+-----+-----+
|     |     |  G  |
+-----+-----+-----+

Available Actions: [up], [down]"""


def tasks(environment: str, tags: tuple[str, ...]) -> list[dict[str, Any]]:
    files = [TASKS / environment / f"{split}.jsonl" for split in ("train", "test")]
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [task for task in map(json.loads, lines) if set(task["tags"]) & set(tags)]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        pytest.param("Calculate 8 - -1.", [8, "-", -1], id="a sign"),
        pytest.param("the arithmetic problem: 13 + 73 - 46 =", [13, "+", 73, "-", 46], id="a chain"),
        pytest.param("Calculate -( 2 * 3 ) + 1.", [-1, "*", "(", 2, "*", 3, ")", "+", 1], id="a minus before brackets"),
        pytest.param("to 12 digits.\n(4.9-9.0) = ?", ["(", Fraction("4.9"), "-", 9, ")"], id="decimals"),
        pytest.param("Calculate ( 7 ).", [7], id="brackets round one number"),
    ],
)
def test_a_question_is_cut_into_its_parts(text: str, tokens: list[Any]) -> None:
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
def test_an_answer_is_written_whole_or_with_twelve_digits(value: Fraction, text: str) -> None:
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


def test_a_policy_that_knows_nothing_decides_once_for_each_operator() -> None:
    _, decisions = solve("Calculate 1 + 2 * ( 3 - 4 ).", Policy(), random.Random(1))

    assert len(decisions) == 3
    assert len(decisions[0].options) == 2 * len(arithmetic.PROCEDURES)


def test_the_ends_of_a_guess_follow_the_answers() -> None:
    game = Guessing.begun("guess the number between 1 and 100 within 9 turns")
    for guess, answer in ((50, "higher"), (75, "lower"), (60, "higher")):
        game.guessed = guess
        game.see(f"The target number is {answer}.")

    low, high = game.ends(is_low=True), game.ends(is_low=False)

    assert (low["range"], low["last"], low["largest higher"], low["smallest lower"]) == (1, 61, 61, 76)
    assert (high["range"], high["last"], high["largest higher"], high["smallest lower"]) == (100, 59, 59, 74)


def test_without_an_answer_all_ends_are_the_range_s() -> None:
    game = Guessing.begun("guess the number between 1 and 100 within 9 turns")

    assert set(game.ends(is_low=True).values()) == {1}
    assert set(game.ends(is_low=False).values()) == {100}


def test_a_guess_is_always_in_the_range() -> None:
    game = Guessing.begun("between 5 and 9")
    chance = random.Random(1)
    for _ in range(200):
        guess, decisions = game.move(Policy(), chance)
        assert 5 <= int(guess) <= 9
        assert len(decisions) == 3
        game.see(f"The target number is {chance.choice(('higher', 'lower'))}.")


def test_a_step_looks_like_what_is_there() -> None:
    game = Crossing.begun(LAKE)

    assert game.features("up") == ("wall", "wall up")
    assert game.features("right") == (
        "ice", "nearer", "been 0", "exits 1", "nearer been 0", "nearer of 3", "right",
    )  # fmt: skip


def test_where_the_player_was_is_remembered() -> None:
    game = Crossing.begun(LAKE)
    game.see(LAKE.replace("|  P  |     |  H  |", "|     |  P  |  H  |"))

    assert game.at == (0, 1)
    assert game.features("left")[:3] == ("ice", "farther", "been 1")
    assert game.features("down") == ("hole", "hole down")


def test_a_text_without_a_board_is_refused() -> None:
    with pytest.raises(ValueError, match="no board"):
        read_board("You fell into a hole.")

"""The math environment: tasks, scorers on right, wrong and hostile answers, generator and server."""

# ruff: noqa: RUF001 - prime_factorization requires the multiplication sign
from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.math_problems import references
from tests.deadlines import COMMAND_S, HANG_S
from tests.envs.bundled import RecordProperty, note_plays
from tests.envs.bundled import math_answer as reference
from tests.envs.bundled import wrong_math_answer as wrong

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "env_images" / "math"
TASKS = ROOT / "tasks" / "math"
MAKER = ROOT / "scripts" / "make-math-tasks"

MOST_RESIDENT_MIB = 45
"""Bound in MiB for the server and its tasks together."""


def load(name: str, path: Path) -> ModuleType:
    """Import the file at *path* as *name*."""
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


scorers = load("math_scorers", HOME / "math_scorers.py")
Evaluation = scorers.Evaluation
InvalidEvaluation = scorers.InvalidEvaluation


def read(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TASKS / f"{split}.jsonl").read_text("utf-8").split("\n") if line]


TRAIN, TEST = read("train"), read("test")
ALL = TRAIN + TEST
ONE_OF_EACH = {task["tags"][0]: task for task in TRAIN}


def score(task: dict[str, Any], answer: str) -> float:
    return float(Evaluation.read(task["evaluation"]).judge(answer).score)


def data(family: str, answer: str, **metadata: Any) -> dict[str, Any]:
    entry = {"answer": answer, "metadata": metadata}
    return {"reward_function": "reasoning_gym", "family": family, "entry": entry}


# The tasks


def test_there_are_enough_tasks_of_enough_families() -> None:
    assert len(TRAIN) >= 1_000
    assert len(TEST) >= 200
    assert len(ONE_OF_EACH) >= 10


@pytest.mark.parametrize("tasks", [pytest.param(TRAIN, id="train"), pytest.param(TEST, id="test")])
def test_each_family_has_as_many_tasks_at_each_of_its_levels(tasks: list[dict[str, Any]]) -> None:
    counts = Counter((task["tags"][0], task["difficulty"]) for task in tasks)

    assert set(counts) == {(family, level) for family in scorers.JUDGES for level in (1, 2, 3, 4)}
    assert len(set(counts.values())) == 1


def test_no_question_and_no_id_occurs_twice_within_or_across_the_splits() -> None:
    questions = Counter(re.sub(r"\s+", " ", task["instruction"]).lower() for task in ALL)
    ids = Counter(task["id"] for task in ALL)

    assert [question for question, count in questions.items() if count > 1] == []
    assert [name for name, count in ids.items() if count > 1] == []


def test_no_question_leaves_the_sign_of_a_power_open_or_contradicts_its_answer() -> None:
    questions = {task["id"]: task["instruction"] for task in ALL}

    assert [id for id, question in questions.items() if re.search(r" -[0-9.]+\^-?[0-9]*[02468]\b", question)] == []
    assert [id for id, question in questions.items() if "rounding down" in question] == []


@pytest.mark.parametrize(
    "task", [task for task in ALL if task["tags"][0] == "decimal_arithmetic"], ids=itemgetter("id")
)
def test_a_decimal_result_is_right_to_the_last_digit_that_is_asked_for(task: dict[str, Any]) -> None:
    expression = task["instruction"].splitlines()[-1].removesuffix(" = ?")
    exact = references.exact_value(expression)

    digits = f"{Decimal(exact.numerator) / Decimal(exact.denominator):.11e}"

    assert score(task, digits) == 1.0


def test_no_answer_is_right_in_more_than_a_tenth_of_a_familys_tasks() -> None:
    families: dict[str, list[Any]] = {}
    for task in ALL:
        families.setdefault(task["tags"][0], []).append(scorers.Evaluation.read(task["evaluation"]))

    means = {
        (family, answer): sum(task.judge(answer).score for task in tasks) / len(tasks)
        for family, tasks in families.items()
        for answer in {task.answer for task in tasks}
    }

    assert {guess: mean for guess, mean in means.items() if mean > 0.1} == {}


@pytest.mark.parametrize("split", ["train", "test"])
def test_each_line_is_one_compact_json_object_with_the_documented_keys(split: str) -> None:
    text = (TASKS / f"{split}.jsonl").read_text("utf-8")
    keys = ["id", "tags", "difficulty", "instruction", "config", "evaluation"]

    tasks = [json.loads(line) for line in text.split("\n")[:-1]]

    assert text == "".join(json.dumps(task, ensure_ascii=False, separators=(",", ":")) + "\n" for task in tasks)
    assert all(list(task) == keys for task in tasks)
    assert all(task["id"].startswith(f"{split}-{task['tags'][0]}-{task['difficulty']}-") for task in tasks)


def test_no_task_reveals_its_answer_in_its_configuration_or_tags() -> None:
    assert all(task["config"] == {"max_attempts": 1} for task in ALL)
    assert all(len(task["tags"]) == 2 and task["tags"][0] == task["evaluation"]["family"] for task in ALL)


# The scorers


RADIUS = data("advanced_geometry", "1.224", task_type="incircle_radius")
ANGLE = data("advanced_geometry", "27.90°", task_type="angle_measure")
PLACE = data("advanced_geometry", "(1.571, -1.000)", task_type="orthocenter")
CLOCK = data("time_intervals", "00:26", task_type="time")
DAYS = data("time_intervals", "417 days", task_type="date")
JUGS = data("jugs", '["fill A"]', puzzle={"jug_capacities": [3, 5, 8], "target": 3})
COMPLEX = data("complex_arithmetic", "3.0 - 4.0i", result=[3, -4])

RIGHT: list[tuple[dict[str, Any], list[str]]] = [
    (
        data("chain_sum", "42"),
        [
            "42",
            " 42\n",
            "42.0",
            "+42",
            "$42$",
            "$$42$$",
            r"\(42\)",
            r"\[42\]",
            r"\boxed{42}",
            "**42**",
            "`42`",
            "42.",
            "= 42",
            r"$\boxed{42}$",
            r"\boxed{\text{42}}",
            "4.2e1",
            "4.2 × 10^1",
            r"4.2 \times 10^{1}",
            "The answer is 42.",
        ],
    ),
    (data("chain_sum", "-7"), ["-7", "\u22127", "\u20137", "- 7", "-7.0", "$-7$"]),
    (data("products", "8000"), ["8000", "8,000", "8 000", "8\u202f000", r"8{,}000", r"8\,000", "8e3"]),
    (data("simple_equations", "16"), ["16", "x = 16", "$x = 16$", r"\boxed{u=16}"]),
    (data("leg_counting", "56"), ["56", "56 legs", r"56 \text{ legs}"]),
    (data("count_primes", "9"), ["9", "9 primes"]),
    (data("simple_geometry", "102"), ["102", "102°", "102.0", r"102^\circ", r"$102^{\circ}$", "102 degrees"]),
    (data("decimal_arithmetic", "496.66760"), ["496.66760", "496.6676", "$496.6676$", "4.966676e2"]),
    (data("decimal_arithmetic", "0.333333333333"), ["0.333333333333", ".333333333333", "0.33333333333333333"]),
    (
        data("power_function", "55.505480039999995"),
        ["5.55e+1", "5.55e1", "55.5", "5.55 × 10^1", "5.55 × 10¹", "55.50548"],
    ),
    (data("power_function", "-0.014701643358927291"), ["-1.47e-2", "-0.0147", r"-1.47 \times 10^{-2}"]),
    (data("dice", "11/24"), ["11/24", "11 / 24", "$11/24$", r"\frac{11}{24}", r"\dfrac{11}{24}", "**11/24**"]),
    (data("fraction_simplification", r"$\frac{16}{17}$"), ["16/17", r"$\frac{16}{17}$", r"\boxed{\frac{16}{17}}"]),
    (
        COMPLEX,
        [
            "3.0 - 4.0i",
            "3-4i",
            "3 \u2212 4i",
            "3-4j",
            "(3-4i)",
            "$3 - 4i$",
            r"3 - 4\mathrm{i}",
            "3.0-4*i",
        ],
    ),
    (data("complex_arithmetic", "6.00", result=[6, 0]), ["6", "6.00", "6 + 0i"]),
    (data("complex_arithmetic", "-1.0i", result=[0, -1]), ["-i", "-1i", "0 - i"]),
    (
        data("polynomial_equations", "-0.6236, 0.6236"),
        [
            "-0.6236, 0.6236",
            "0.6236, -0.6236",
            "x = -0.6236, x = 0.6236",
            "±0.6236",
            "[-0.6236, 0.6236]",
            "0.62361 and -0.62361",
        ],
    ),
    (
        data("prime_factorization", "2 × 2 × 3"),
        ["2 × 2 × 3", "3 × 2 × 2", "2*2*3", "2^2 × 3", r"2^{2} \cdot 3", "2² · 3"],
    ),
    (data("base_conversion", "20311"), ["20311", "20,311", "020311", "$20311_5$", r"20311_{5}"]),
    (data("base_conversion", "1f"), ["1f", "1F", "0x1f"]),
    (RADIUS, ["1.224", "1.2240", "$1.224$", "1.2243"]),
    (ANGLE, ["27.90°", "27.9", "27.897°", r"27.90^\circ", "27.90 degrees"]),
    (PLACE, ["(1.571, -1.000)", "(1.571, -1)", "1.571, -1", r"\left(1.571, -1\right)", "$(11/7, -1)$"]),
    (data("calendar_arithmetic", "Sunday", task="weekday_offset"), ["Sunday", "sunday", "SUNDAY.", "**Sunday**"]),
    (data("calendar_arithmetic", "20", task="count_days"), ["20", "20 days"]),
    (CLOCK, ["00:26", "0:26", "00:26:00", "**00:26**"]),
    (DAYS, ["417 days", "417", "417 Days", r"417 \text{ days}"]),
    (JUGS, ['["fill A"]', '["fill B", "pour B->A"]', '```json\n["fill A"]\n```']),
]
WRONG: list[tuple[dict[str, Any], list[str]]] = [
    (
        data("chain_sum", "42"),
        [
            "-42",
            "142",
            "421",
            "4",
            "43",
            "41",
            "24",
            "4.2",
            "420",
            "42 or 1",
            "40 + 2",
            "84/2",
            "not 42",
            "42 42",
            "x",
            "nan",
            "inf",
            "1e400",
            "42%",
            "42 apples",
            "0x2a",
            "4_2",
            "4,2",
            "42,",
            "forty-two",
        ],
    ),
    (data("number_sequence", "8"), ["8!", "8th", "[8]", "80", "-8"]),
    (data("decimal_arithmetic", "15.0"), ["14.9", "15.1", "15.09", "15.00001", "150"]),
    (data("decimal_arithmetic", "0.333333333333"), ["0.333333333334", "0.3333", "1/3000"]),
    (data("power_function", "55.505480039999995"), ["5.56e+1", "5.54e+1", "-5.55e+1", "5.55e+2", "5.55"]),
    (data("dice", "11/24"), ["22/48", "12/24", "24/11", "11", "-11/24", "11/2"]),
    (data("dice", "1/2"), ["0.5", "50%", "2/4"]),
    (data("fraction_simplification", "9/10"), ["54/60", "9", "10/9", "0.9"]),
    (COMPLEX, ["3 + 4i", "-3 - 4i", "4 - 3i", "3 - 4", "3 - 5i", "3", "-4i", "3 4i", "nan"]),
    (data("prime_factorization", "2 × 2 × 3"), ["12", "4 × 3", "2 × 3", "2 × 2 × 2 × 3", "2^3 × 3", "1 × 2 × 2 × 3"]),
    (data("base_conversion", "20311"), ["20312", "2031", "-20311", "11302"]),
    (RADIUS, ["1.234", "-1.224", "12.24", "2.448"]),
    (ANGLE, ["27.91", "27.8", "-27.90", "62.10°", "27.90 cm"]),
    (PLACE, ["(1.571, 1.000)", "(-1.000, 1.571)", "1.571", "(1.571, -1.000, 0)", "(1.572, -1.000)"]),
    (data("calendar_arithmetic", "Sunday", task="weekday_offset"), ["Monday", "Sun", "Sunday or Monday", "7"]),
    (data("calendar_arithmetic", "20", task="count_days"), ["19", "21", "20 weeks", "-20"]),
    (CLOCK, ["-00:26", "00:27", "26:00", "00:26:01", "26", "26 minutes", "00:62"]),
    (DAYS, ["417 hours", "-417", "416", "418 days", "417 weeks"]),
    (JUGS, ["[]", '["fill B"]', "fill A", '["fill D"]', '["pour A"]', "null", "[1]", '["pour A->A"]']),
]


@pytest.mark.parametrize(
    ("task", "answer"),
    [(task, answer) for task, answers in RIGHT for answer in answers],
    ids=lambda value: str(value)[:40],
)
def test_a_right_answer_earns_1_in_any_usual_notation(task: dict[str, Any], answer: str) -> None:
    assert Evaluation.read(task).judge(answer).score == 1.0


@pytest.mark.parametrize(
    ("task", "answer"),
    [(task, answer) for task, answers in WRONG for answer in answers],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_answer_earns_nothing_whatever_it_shares_with_the_right_one(task: dict[str, Any], answer: str) -> None:
    assert Evaluation.read(task).judge(answer).score == 0.0


@pytest.mark.parametrize(
    ("task", "answer", "expected"),
    [
        pytest.param(RADIUS, "1.22", 0.5, id="a radius that is right to two places"),
        pytest.param(data("polynomial_equations", "-1.0, 2.5"), "2.5", 0.5, id="one of two roots"),
        pytest.param(data("polynomial_equations", "-1.0, 2.5"), "2.5, 7", 0.0, id="one of two roots, and a wrong one"),
        pytest.param(
            data("polynomial_equations", "-1.0, 0.0, 2.5"), "2.5, 0, 7", 1 / 3, id="two of three roots, one wrong"
        ),
    ],
)
def test_the_documented_partial_credit(task: dict[str, Any], answer: str, expected: float) -> None:
    assert Evaluation.read(task).judge(answer).score == pytest.approx(expected)


@pytest.mark.parametrize(
    ("score", "text"),
    [
        pytest.param(1.0, "Correct.", id="right"),
        pytest.param(1 / 3, "Partly correct: the answer scores 0.33 of 1.", id="partly right"),
        pytest.param(0.0, "Incorrect.", id="wrong"),
    ],
)
def test_the_text_says_right_partly_right_or_wrong(score: float, text: str) -> None:
    assert scorers.describe(score) == text


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param("", "is empty", id="empty"),
        pytest.param(" \n\t", "is empty", id="blank"),
        pytest.param("1" * 1_000_000, "longer than", id="a megabyte"),
    ],
)
@pytest.mark.parametrize("family", sorted(ONE_OF_EACH))
def test_an_invalid_answer_scores_0_and_the_text_states_the_reason(family: str, answer: str, reason: str) -> None:
    verdict = Evaluation.read(ONE_OF_EACH[family]["evaluation"]).judge(answer)

    assert verdict.score == 0.0
    assert reason in verdict.text


HOSTILE = {
    "a power tower": "10**10**10**10",
    "code": "__import__('os').abort()",
    "a float beyond range": "1e999",
    "an exponent of ten digits": "1e9999999999",
    "a negative one of nineteen": "1e-9999999999999999999",
    "underscores in an exponent": "1e1_000_000_000",
    "a long integer": "9" * 2_000,
    "a long hexadecimal": "0x" + "f" * 1_900,
    "a long product": " × ".join(["99999"] * 250),
    "a long list": ",".join(["1"] * 900),
    "a long clock": ":".join(["9"] * 900),
    "a clock of long numbers": "9" * 900 + ":" + "9" * 900,
    "a long fraction": "9" * 900 + "/" + "9" * 901,
    "division by zero": "1/0",
    "open brackets": "[" * 1_990,
    "open braces": '{"a":' * 390,
    "closed brackets": "(" * 990 + "1" + ")" * 990,
    "a latex bomb": "\\frac{" * 300,
    "signs": "+-" * 990,
    "imaginary units": "+j" * 990,
    "other digits": "\u0661\u0662\u0663" * 300,
    "a zero byte": "4\x002",
    "a lone surrogate": "\ud800",
    "many moves": json.dumps(["fill A", "pour A->B"] * 70),
    "a move that is none": '["pour A"]',
    "a number where a list should be": "[1]",
    "null": "null",
}


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_answer_scores_0_in_every_family(answer: str) -> None:
    scores = {family: score(task, answer) for family, task in ONE_OF_EACH.items()}

    assert {family: value for family, value in scores.items() if value != 0.0} == {}


@given(answer=st.text(max_size=2_500), task=st.sampled_from(ALL))
@settings(max_examples=400)
def test_any_text_gets_a_score_between_0_and_1(answer: str, task: dict[str, Any]) -> None:
    assert 0.0 <= score(task, answer) <= 1.0


@given(answer=st.from_regex(r"[-+ij0-9eE./,:×\[\]\" a-z]{1,60}", fullmatch=True), task=st.sampled_from(ALL))
@settings(max_examples=400)
def test_any_text_like_a_number_gets_a_score_between_0_and_1(answer: str, task: dict[str, Any]) -> None:
    assert 0.0 <= score(task, answer) <= 1.0


CHANGES: dict[str, dict[str, Any]] = {
    "another reward function": {"reward_function": "exec"},
    "a family that is not offered": {"family": "bitwise_arithmetic"},
    "a family that does not exist": {"family": "os.system"},
    "no answer": {"entry": {"metadata": {}}},
    "an answer that is not a text": {"entry": {"answer": 4, "metadata": {}}},
    "no metadata": {"entry": {"answer": "4"}},
    "an entry of a megabyte": {"entry": {"answer": "4", "metadata": {"numbers": [7] * 300_000}}},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_invalid_evaluation_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidEvaluation):
        Evaluation.read(data("gcd", "4") | change)


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(data("time_intervals", "00:26"), id="missing metadata that the scorer needs"),
        pytest.param(data("complex_arithmetic", "2", result=["a", {}]), id="metadata of another type"),
        pytest.param(data("complex_arithmetic", "2", result=[3, 0]), id="metadata that contradicts the answer"),
        pytest.param(data("gcd", "four"), id="an answer that is no number"),
        pytest.param(data("gcd", "4" * 3_000), id="an answer that no agent could give"),
    ],
)
def test_an_unsolvable_task_is_an_error_and_not_a_score_of_0(broken: dict[str, Any]) -> None:
    with pytest.raises(InvalidEvaluation):
        Evaluation.read(broken)


# The independent check of the references

WRONG_REFERENCES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "a floor for a quotient": ("basic_arithmetic", "Calculate 7 / 2.", "3", {"expression": "7 / 2"}),
    "division by zero": ("basic_arithmetic", "Calculate 7 / (1 - 1).", "0", {"expression": "7 / (1 - 1)"}),
    "a polygon that is not convex": (
        "simple_geometry",
        "",
        "257",
        {"n_sides": 5, "known_angles": [93.0, 60.0, 71.0, 59.0]},
    ),
    "days of another year": (
        "calendar_arithmetic",
        "",
        "23",
        {"task": "count_business_days", "start_date": "2022-12-01", "end_date": "2023-01-02"},
    ),
    "a date that two readers read differently": (
        "calendar_arithmetic",
        "Name the day of the week for 03/04/2031.",
        "Tuesday",
        {"task": "weekday_of_date", "target_date": "2031-03-04"},
    ),
    "a lost root": ("polynomial_equations", "", "0.0", {"polynomial_expr": "c**3 - c"}),
    "numbers without a common divisor": ("gcd", "", "1", {"numbers": [8, 9]}),
    "a prime": ("prime_factorization", "", "7", {"number": 7}),
    "a sequence that stands still": ("number_sequence", "3, 1, 0, 0, 0, ?", "0", {"sequence": [3, 1, 0, 0, 0, 0]}),
    "a truncated interval": ("time_intervals", "From 10:00:00 to 11:00:01?", "01:00:00", {"task_type": "time_seconds"}),
    "any x": ("simple_equations", "", "3", {"equation": "0*x + 4 = 4", "variable": "x"}),
    "too few jugs": ("jugs", "", '["fill A"]', {"puzzle": {"jug_capacities": [3, 5, 8], "target": 4}}),
}


@pytest.mark.parametrize("case", WRONG_REFERENCES.values(), ids=WRONG_REFERENCES)
def test_a_wrong_or_ambiguous_reference_is_not_confirmed(case: tuple[str, str, str, dict[str, Any]]) -> None:
    family, question, answer, metadata = case

    assert not references.confirmed(family, question, answer, metadata)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(("basic_arithmetic", "", "-18", {"expression": "-( 3 + 6 ) * 4 / 2"}), id="arithmetic"),
        pytest.param(("dice", "", "5/12", {"puzzle": {"dice_str": "1d6, 1d6", "target": 8}}), id="two dice"),
        pytest.param(("polynomial_equations", "", "-1.0, 0.0, 1.0", {"polynomial_expr": "c**3 - c"}), id="three roots"),
        pytest.param(
            ("simple_equations", "", "5", {"equation": "39 - 96*g = -441", "variable": "g"}), id="an equation"
        ),
        pytest.param(("time_intervals", "From 10:15 to 11:00?", "00:45", {"task_type": "time"}), id="a time"),
        pytest.param(
            (
                "advanced_geometry",
                "",
                "(-3.222, 2.778)",
                {"task_type": "orthocenter", "A": ["-7", "-1"], "B": ["-2", "3"], "C": ["-9", "10"]},
            ),
            id="an orthocentre",
        ),
    ],
)
def test_a_right_reference_is_confirmed(case: tuple[str, str, str, dict[str, Any]]) -> None:
    assert references.confirmed(*case)


@pytest.mark.parametrize("expression", ["__import__('os')", "2 ** 9", "a + 1", "'a' * 9"])
def test_only_arithmetic_is_evaluated(expression: str) -> None:
    with pytest.raises((SyntaxError, KeyError)):
        references.exact_value(expression)


# The generator


def make(*arguments: str, hash_seed: str = "random") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(MAKER), *arguments],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )


def test_the_task_files_match_the_generator() -> None:
    checked = make("--check")

    assert (checked.returncode, checked.stdout.count("as made")) == (0, 2), checked.stdout + checked.stderr


def test_another_seed_makes_other_tasks_and_the_check_detects_them(tmp_path: Path) -> None:
    some = ("--families", "chain_sum", "gcd", "leg_counting", "--directory", str(tmp_path))
    made = make(*some, "--seed", "7", hash_seed="1")
    same = make(*some, "--seed", "7", "--check", hash_seed="2")
    other = make(*some, "--check")

    assert made.returncode == 0, made.stderr
    assert same.returncode == 0, same.stdout
    assert other.returncode == 1
    assert other.stdout.count("differs") == 2


# The server


class Worker:
    """The environment's own process on a Unix socket, and a client of it."""

    def __init__(self, directory: Path) -> None:
        socket = directory / "math.sock"
        self.process = subprocess.Popen(
            [sys.executable, "math_server.py"],
            cwd=HOME,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT / "env_images" / "base"),
                "ENVSERVER_SOCKET": str(socket),
                "ENVSERVER_TASKS": str(TASKS),
                "ENVSERVER_EXIT_ON_EOF": "1",
            },
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if "server_ready" in line:
                break
        else:
            raise AssertionError("".join(self.log))
        self._reader = threading.Thread(target=self.log.extend, args=(self.process.stderr,), daemon=True)
        self._reader.start()
        self.http = httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://math", timeout=HANG_S)

    def stop(self) -> int:
        self.http.close()
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(timeout=HANG_S)
        self._reader.join(timeout=HANG_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def open(self, task: dict[str, Any]) -> Episode:
        episode = Episode(self.http, str(uuid.uuid4()))
        created = episode.post("/create", {"env_name": "math", "task_spec": task})
        assert created.status_code == 200, created.text
        return episode

    def played(self, task: dict[str, Any], answer: str) -> tuple[str, float | None, bool]:
        """Open an episode, submit *answer*, end the episode, and return the outcome."""
        episode = self.open(task)
        outcome = episode.outcome(answer)
        episode.post("/delete", {})
        return outcome

    def resident_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) / 1024


class Episode:
    """One session, used over the wire."""

    def __init__(self, http: httpx.Client, sid: str) -> None:
        self._http = http
        self._headers = {"X-Session-ID": sid, "Accept": "application/json"}

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self._http.post(path, json=body, headers=self._headers)

    def prompt(self) -> httpx.Response:
        return self._http.get("/math/prompt", headers=self._headers)

    def submit(self, answer: object) -> dict[str, Any]:
        response = self.post("/math/call", {"name": "submit", "input": {"answer": answer}})
        assert response.status_code == 200, response.text
        return dict(response.json())

    def outcome(self, answer: object) -> tuple[str, float | None, bool]:
        """Submit *answer*; return the text, the reward, and whether the episode is over."""
        output = self.submit(answer)["output"]
        return output["blocks"][0]["text"], output["reward"], output["finished"]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    # Not tmp_path: a socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="math") as directory:
        started = Worker(Path(directory))
        try:
            yield started
        finally:
            code = started.stop()
        assert code == 0, "".join(started.log)


def with_attempts(task: dict[str, Any], attempts: object) -> dict[str, Any]:
    return {**task, "config": {"max_attempts": attempts}}


def test_each_reference_wins_and_each_wrong_answer_loses_its_task_and_the_worker_uses_little_memory(
    worker: Worker, record_property: RecordProperty
) -> None:
    played = {task["id"]: [worker.played(task, answer) for answer in (reference(task), wrong(task))] for task in ALL}
    not_won = {name: won for name, (won, _) in played.items() if won != ("Correct.", 1.0, True)}
    not_lost = {name: lost for name, (_, lost) in played.items() if not 0.0 <= (lost[1] or 0.0) < 1.0 or not lost[2]}

    won, lost = len(ALL) - len(not_won), len(ALL) - len(not_lost)
    note_plays(record_property, "math", "local process", won=won, lost=lost)
    assert not_won == {}
    assert not_lost == {}
    assert worker.resident_mib() < MOST_RESIDENT_MIB


@pytest.mark.parametrize(
    ("family", "answer", "text", "reward"),
    [
        pytest.param("gcd", "1", "Incorrect.", 0.0, id="wrong"),
        pytest.param("gcd", "", "Incorrect: the answer is empty.", 0.0, id="empty"),
        pytest.param("complex_arithmetic", "nan", "Incorrect.", 0.0, id="nan"),
        pytest.param("prime_factorization", "two", "Incorrect.", 0.0, id="malformed"),
        pytest.param("gcd", "7" * 2_001, "Incorrect: the answer is longer than 2000 characters.", 0.0, id="too long"),
    ],
)
def test_a_wrong_answer_ends_the_episode_without_a_reward_and_states_the_reason(
    worker: Worker, family: str, answer: str, text: str, reward: float
) -> None:
    assert worker.open(ONE_OF_EACH[family]).outcome(answer) == (text, reward, True)


def test_partial_credit_reaches_the_trainer(worker: Worker) -> None:
    task = next(task for task in ALL if task["tags"][0] == "polynomial_equations" and reference(task).count(",") == 1)

    outcome = worker.open(task).outcome(reference(task).split(",")[0])

    assert outcome == ("Partly correct: the answer scores 0.50 of 1.", 0.5, True)


def test_an_answer_of_a_wrong_type_is_an_error_for_the_agent_and_not_an_attempt(worker: Worker) -> None:
    episode = worker.open(ONE_OF_EACH["gcd"])

    refused = episode.submit({"a": 1})

    assert refused["ok"] is False
    assert episode.outcome(reference(ONE_OF_EACH["gcd"])) == ("Correct.", 1.0, True)


def test_an_attempt_before_the_last_reveals_only_that_it_is_not_right(worker: Worker) -> None:
    task = ONE_OF_EACH["complex_arithmetic"]
    episode = worker.open(with_attempts(task, 3))

    first = episode.submit(wrong(task))["output"]
    second = episode.outcome("")
    third = episode.outcome(reference(task))

    assert (first["reward"], first["finished"], first["metadata"]) == (None, False, None)
    assert first["blocks"][0]["text"] == "Not right. Attempts left: 2."
    assert second == ("Not right. Attempts left: 1.", None, False)
    assert third == ("Correct.", 1.0, True)


def test_the_last_attempt_keeps_its_partial_credit(worker: Worker) -> None:
    task = next(task for task in ALL if task["tags"][0] == "polynomial_equations" and reference(task).count(",") == 1)
    episode = worker.open(with_attempts(task, 2))

    episode.outcome("x")

    assert episode.outcome(reference(task).split(",")[0])[1:] == (0.5, True)


def test_the_models_view_before_the_end_does_not_depend_on_the_reference(worker: Worker) -> None:
    task = with_attempts(ONE_OF_EACH["gcd"], 2)
    other = json.loads(json.dumps(task))
    other["evaluation"]["entry"]["answer"] = "987654321"

    seen = []
    for variant in (task, other):
        episode = worker.open(variant)
        seen.append((episode.prompt().json(), episode.submit("13579")))

    assert seen[0][0] == seen[1][0]
    assert seen[0][1]["output"] == seen[1][1]["output"]
    assert seen[0][0][0]["text"].startswith(task["instruction"])
    assert "987654321" not in json.dumps(seen)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"instruction": ""}, id="no question"),
        pytest.param({"evaluation": None}, id="no evaluation"),
        pytest.param({"config": {"max_attempts": 0}}, id="no attempt"),
        pytest.param({"config": {"max_attempts": 11}}, id="too many attempts"),
        pytest.param({"config": {"max_attempts": True}}, id="attempts that are not a number"),
        pytest.param(
            {
                "evaluation": {
                    "reward_function": "reasoning_gym",
                    "family": "complex_arithmetic",
                    "entry": {"answer": "5", "metadata": {"result": [1, 1]}},
                }
            },
            id="a wrong reference",
        ),
    ],
)
def test_a_broken_task_is_an_error_and_never_a_reward(worker: Worker, change: dict[str, Any]) -> None:
    episode = Episode(worker.http, str(uuid.uuid4()))

    created = episode.post("/create", {"env_name": "math", "task_spec": {**ONE_OF_EACH["gcd"], **change}})
    prompted = episode.prompt()
    called = episode.post("/math/call", {"name": "submit", "input": {"answer": "4"}})

    assert max(created.status_code, prompted.status_code) >= 400
    assert called.status_code >= 400 or "reward" not in called.text


def test_an_answer_of_a_megabyte_does_not_disturb_other_sessions(worker: Worker) -> None:
    task = ONE_OF_EACH["decimal_arithmetic"]
    waiting = worker.open(task)

    flooded = worker.open(task).outcome("9" * 1_000_000)

    assert flooded[1:] == (0.0, True)
    assert waiting.outcome(reference(task)) == ("Correct.", 1.0, True)


def test_the_image_offers_both_splits_and_one_tool(worker: Worker) -> None:
    counts = {
        split["name"]: worker.http.post("/math/num_tasks", json={"split": split["name"]}).json()["num_tasks"]
        for split in worker.http.get("/math/splits").json()
    }
    tools = worker.http.get("/math/tools").json()["tools"]

    assert counts == {"train": len(TRAIN), "test": len(TEST)}
    assert [tool["name"] for tool in tools] == ["submit"]
    assert tools[0]["input_schema"]["required"] == ["answer"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        pytest.param("It is 42.", "It is 42.", id="nothing marked"),
        pytest.param("<answer>1</answer> no: <answer> 2 </answer>", "2", id="the last of two tags"),
        pytest.param(r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}", id="a box with braces in it"),
        pytest.param(r"\boxed{1} then \boxed{2}", "2", id="the last of two boxes"),
        pytest.param(r"\boxed{1 <answer>3</answer>", "3", id="a tag has priority over a box"),
        pytest.param(r"\boxed{7", "7", id="a box that is never closed"),
        pytest.param("</answer>5<answer>", "", id="tags in the wrong order"),
        pytest.param("<answer>" * 100_000, "", id="only opening tags"),
        pytest.param("<ANSWER>4</ANSWER>", "4", id="capitals"),
        pytest.param("So <answer>42", "42", id="an end tag that a stop string cut off"),
        pytest.param("<answer>42<|im_end|>", "42", id="an end token"),
        pytest.param("<think>so <answer>7</answer>?</think>\n42", "42", id="a draft in the reasoning"),
    ],
)
def test_a_marked_answer_in_free_text_is_the_answer(text: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "env_images" / "base"))
    server = load("math_server", HOME / "math_server.py")

    assert server.Math().parse_text(text).input == {"answer": answer}

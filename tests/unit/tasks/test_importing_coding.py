"""Rows of HumanEval and MBPP: refused rows, ids, and the parts of MBPP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.core.environment import SplitType
from gateway.tasks.importing.coding import PARTS, humaneval_task, mbpp_task, read_mbpp
from gateway.tasks.importing.rows import Imported, InvalidEntry

HUMANEVAL = {"task_id": "HumanEval/3", "prompt": "def f(): ...", "entry_point": "f", "test": "def check(f): f()"}
MBPP = {"task_id": 3, "text": "Write f.", "test_list": ["assert f() == 1", "assert f() != 2"]}


@pytest.mark.parametrize(
    ("convert", "row", "says"),
    [
        pytest.param(humaneval_task, {"task_id": "a/1", "prompt": "x"}, "entry_point is missing", id="no entry point"),
        pytest.param(humaneval_task, HUMANEVAL | {"entry_point": "a b"}, "'a b' is not a name", id="not a name"),
        pytest.param(
            humaneval_task, HUMANEVAL | {"task_id": None}, "task_id: must be a text or a number", id="null for an id"
        ),
        pytest.param(
            humaneval_task, HUMANEVAL | {"task_id": True}, "task_id: must be a text or a number", id="true for an id"
        ),
        pytest.param(humaneval_task, HUMANEVAL | {"task_id": ""}, "task_id is empty", id="an empty id"),
        pytest.param(
            humaneval_task, HUMANEVAL | {"task_id": "x/"}, "must have a text after the slash", id="half an id"
        ),
        pytest.param(mbpp_task, {"text": "x"}, "task_id is missing", id="no id"),
        pytest.param(mbpp_task, {"task_id": 1, "text": "x"}, "test_list is missing", id="no tests"),
        pytest.param(mbpp_task, MBPP | {"test_list": []}, "test_list is empty", id="an empty list of tests"),
        pytest.param(
            mbpp_task, MBPP | {"test_list": "assert True"}, "test_list: must be a list", id="a text for the tests"
        ),
        pytest.param(
            mbpp_task, MBPP | {"test_setup_code": 7}, "test_setup_code: must be a text", id="a number for the setup"
        ),
        pytest.param(
            mbpp_task, MBPP | {"test_list": ["assert 1"] * 201}, "201 tests; the maximum is 200", id="201 tests"
        ),
    ],
)
def test_a_row_of_an_invalid_form_is_refused(convert: Any, row: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidEntry, match=says):
        convert(row)


@pytest.mark.parametrize(
    ("convert", "row", "name"),
    [
        (humaneval_task, HUMANEVAL, "humaneval-3"),
        (humaneval_task, HUMANEVAL | {"task_id": "Python/12"}, "humaneval-12"),
        (humaneval_task, HUMANEVAL | {"task_id": 4}, "humaneval-4"),
        (mbpp_task, MBPP, "mbpp-3"),
        (mbpp_task, MBPP | {"task_id": "Mbpp/5"}, "mbpp-5"),
    ],
)
def test_ids_are_derived_from_the_ids_of_the_benchmark(convert: Any, row: dict[str, Any], name: str) -> None:
    assert convert(row)["id"] == name


def test_the_setup_precedes_each_assertion() -> None:
    task = mbpp_task(MBPP | {"test_imports": ["import math"], "test_setup_code": "N = 1\n"})

    assert task is not None
    assert task["evaluation"]["setup"] == "import math\nN = 1"
    assert task["evaluation"]["test_cases"] == [
        {"public": True, "call": "f()", "test": "answer == 1"},
        {"call": "f()", "test": "answer != 2"},
    ]


def test_the_setup_precedes_each_script() -> None:
    tests = ["assert f() > N", "assert N < f()"]
    task = mbpp_task(MBPP | {"test_imports": ["import math"], "test_setup_code": "N = 1\n", "test_list": tests})

    assert task is not None
    assert task["evaluation"]["test_scripts"] == [
        {"public": True, "code": "import math\nN = 1\nassert f() > N"},
        {"code": "import math\nN = 1\nassert N < f()"},
    ]


def test_the_parts_have_the_sizes_that_the_benchmark_defines() -> None:
    assert {part.value: len(numbers) for part, numbers in PARTS.items()} == {
        "test": 500,
        "validation": 90,
        "train": 374,
    }


@pytest.mark.parametrize(
    ("part", "names"),
    [
        (None, ["10", "11", "510", "511", "600", "601", "974", "975", "x"]),
        (SplitType.TEST, ["11", "510"]),
        (SplitType.VALIDATION, ["511", "600"]),
        (SplitType.TRAIN, ["601", "974"]),
    ],
)
def test_a_part_of_mbpp_is_a_range_of_its_numbers(tmp_path: Path, part: SplitType | None, names: list[str]) -> None:
    numbers: list[object] = [10, 11, "510", 511, 600, 601, 974, 975, "x"]
    path = tmp_path / "mbpp.jsonl"
    path.write_text("".join(json.dumps(MBPP | {"task_id": number}) + "\n" for number in numbers))

    found = list(read_mbpp(path, part=part))

    assert [entry.task["id"] for entry in found if isinstance(entry, Imported)] == [f"mbpp-{name}" for name in names]
    assert len(found) == len(names)

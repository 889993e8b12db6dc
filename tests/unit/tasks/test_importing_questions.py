"""Import of questions with answers: columns, final answers, ids, and refusals of rows without a final answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.tasks.importing.questions import final_of, read_questions
from gateway.tasks.importing.rows import Imported, InvalidEntry, RowRefused


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_rows_of_gsm8k_become_tasks_without_their_solutions(tmp_path: Path) -> None:
    row = {"question": "How many?", "answer": "She has 3 + 4 = <<3+4=7>>7.\n#### 1,007"}

    (entry,) = read_questions(written(tmp_path / "gsm8k.jsonl", [row]), question="question", answer="answer")

    assert isinstance(entry, Imported)
    assert entry.task == {
        "id": "gsm8k-0",
        "tags": [],
        "instruction": "How many?",
        "config": {},
        "evaluation": {"reward_function": "math_match", "expected": "1,007"},
    }


def test_rows_of_math_have_columns_of_their_own(tmp_path: Path) -> None:
    row = {
        "problem": "Find $x$.",
        "solution": r"So $x=\boxed{\frac{1}{2}}$.",
        "level": "Level 5",
        "unique_id": "a/7.json",
    }
    file = written(tmp_path / "math.jsonl.txt", [row])

    (entry,) = read_questions(file, question="problem", answer="solution", id="unique_id", tags=["level", "missing"])

    assert isinstance(entry, Imported)
    assert (entry.task["id"], entry.task["tags"]) == ("a/7.json", ["Level 5"])
    assert entry.task["evaluation"]["expected"] == r"\frac{1}{2}"


@pytest.mark.parametrize(
    ("answer", "final"),
    [
        ("A then B #### 3 #### 42", "42"),
        (r"first \boxed{1}, then \boxed{\text{(A)} \{1\}}", r"\text{(A)} \{1\}"),
        (r"\fbox{7}", "7"),
        (" 39.5 ", "39.5"),
    ],
)
def test_the_final_answer_is_found(answer: str, final: str) -> None:
    assert final_of(answer) == final


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("####  ", "no final answer"),
        (r"\boxed{1", "not closed"),
        ("x" * 501, "no final answer"),
        ("$", "cannot be compared"),
    ],
)
def test_an_answer_without_a_final_answer_is_refused(answer: str, reason: str) -> None:
    with pytest.raises(InvalidEntry, match=reason):
        final_of(answer)


def test_rows_without_the_columns_are_refused_by_their_place(tmp_path: Path) -> None:
    rows = [{"question": "x"}, [1], {"question": "", "answer": "1"}, {"question": "x", "answer": "1"}]

    found = list(read_questions(written(tmp_path / "q.jsonl", rows), question="question", answer="answer", id="key"))

    assert [type(entry) for entry in found] == [RowRefused] * 4
    assert [entry.reason for entry in found if isinstance(entry, RowRefused)] == [
        "answer is missing",
        "must be an object, not list",
        "key: must be a text or a number",
        "key: must be a text or a number",
    ]

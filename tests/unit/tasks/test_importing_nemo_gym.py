"""Import of NeMo Gym's rows: the whole row, a text for people, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.tasks.importing.nemo_gym import read_rows_of
from gateway.tasks.importing.rows import Imported, RowRefused


def read(folder: Path, *rows: Any) -> list[Imported | RowRefused]:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return list(read_rows_of(path))


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("Add.", "Add."),
        ([{"role": "user", "content": "First."}, {"role": "assistant", "content": "Yes?"}], "First."),
        (
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"text": "A"}, {"text": "B"}]}],
            "A\nB",
        ),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}], ""),
        ([{"type": "function_call"}, "odd"], ""),
        (None, ""),
    ],
)
def test_a_row_becomes_a_task_that_shows_the_users_last_text(tmp_path: Path, said: Any, text: str) -> None:
    row = {"id": 7, "responses_create_params": {"input": said}, "expected": 3}

    _, entry = read(tmp_path, row, row)

    assert isinstance(entry, Imported)
    assert entry.task == {"id": "train-1", "instruction": text, "row": row}


@pytest.mark.parametrize("row", [{}, {"responses_create_params": "x"}, "no object"])
def test_a_row_without_parameters_is_refused_with_its_line(tmp_path: Path, row: Any) -> None:
    (entry,) = read(tmp_path, row)

    assert isinstance(entry, RowRefused)
    assert entry.where.endswith("train.jsonl:1")

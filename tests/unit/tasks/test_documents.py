"""Tasks as text: parsing of JSON, JSON lines and YAML, and refusals with their line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.core.errors import TaskInvalid
from gateway.tasks.documents import listed, read_file, read_json, read_json_lines, read_yaml

YAML = b"""\
# A comment.
id: custom/a
tags: [one, two]
released: 2030-01-31
config:
  max_turns: 8  # another
  note: |
    two
    lines
evaluation: {reward_function: "contains('x')"}
"""


def test_yaml_becomes_plain_data() -> None:
    assert read_yaml(YAML) == {
        "id": "custom/a",
        "tags": ["one", "two"],
        "released": "2030-01-31",
        "config": {"max_turns": 8, "note": "two\nlines\n"},
        "evaluation": {"reward_function": "contains('x')"},
    }


def test_several_yaml_documents_become_a_list() -> None:
    assert read_yaml(b"id: a\n---\nid: b\n---\n") == [{"id": "a"}, {"id": "b"}]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(b"a: !!python/object/apply:os.system ['true']", "line 1: not YAML: could not", id="an object"),
        pytest.param(b"a: !!python/name:os.system", "line 1: not YAML: could not", id="a name"),
        pytest.param(b"b: &x [1]\na: *x", r"line 2: not YAML: aliases", id="an alias"),
        pytest.param(b"a: 1\nb:\n  c: 1\n  c: 2", "line 3: not YAML: the key 'c' occurs twice", id="a key twice"),
        pytest.param(b"a: [1", "not YAML", id="incomplete"),
        pytest.param(b"a: \xff", "not UTF-8", id="not UTF-8"),
        pytest.param(b"? [a, b]\n: 1", "not YAML", id="a list as a key"),
        pytest.param(b"a: \x07", "not YAML", id="a control character"),
        pytest.param(b"a: " + b"[" * 20_000, "not YAML", id="nested too deeply"),
    ],
)
def test_yaml_beyond_plain_data_is_refused(text: bytes, reason: str) -> None:
    with pytest.raises(TaskInvalid, match=reason):
        read_yaml(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(b'{"a":\n1,}', "line 2: not JSON", id="not JSON"),
        pytest.param(b'{"a":1,"a":2}', "the key 'a' occurs twice", id="a key twice"),
        pytest.param(b'{"a":NaN}', "NaN is not JSON", id="NaN"),
        pytest.param(b"[" * 100_000, "not JSON", id="nested too deeply"),
        pytest.param(b'{"a":' + b"9" * 5000 + b"}", "digits", id="a number of thousands of digits"),
        pytest.param(b'"\xff"', "not UTF-8", id="not UTF-8"),
        pytest.param(b"", "line 1: not JSON", id="empty"),
    ],
)
def test_invalid_json_is_refused(text: bytes, reason: str) -> None:
    with pytest.raises(TaskInvalid, match=reason):
        read_json(text)


def test_json_lines_are_read_with_their_places() -> None:
    assert read_json_lines(b'{"a":1}\n\n{"a":2}\r\n', where="f") == [("f:1", {"a": 1}), ("f:3", {"a": 2})]
    with pytest.raises(TaskInvalid, match=r"^f:2: not JSON"):
        read_json_lines(b"{}\n{\n", where="f")


@pytest.mark.parametrize(
    ("document", "places"),
    [
        ({"id": "a"}, [""]),
        ([{"id": "a"}, 3], ["[0]", "[1]"]),
        ({"tasks": [1, 2]}, ["tasks[0]", "tasks[1]"]),
        ({"tasks": [1], "id": "a"}, [""]),
        ({"tasks": 1}, [""]),
        ([], []),
    ],
)
def test_a_document_has_one_task_or_several(document: Any, places: list[str]) -> None:
    assert [place for place, _ in listed(document)] == places


def test_the_suffix_of_a_file_determines_its_format(tmp_path: Path) -> None:
    for name, text in (
        ("a.json", '[{"id": "a"}]'),
        ("a.jsonl", '{"id": "a"}\n'),
        ("a.yaml", "- id: a\n"),
        ("a.yml", "tasks:\n- id: a\n"),
    ):
        (tmp_path / name).write_text(text)
        ((where, document),) = read_file(tmp_path / name)
        assert document == {"id": "a"}
        assert where.startswith(str(tmp_path / name))
    (tmp_path / "a.py").write_text("")
    for name in ("a.py", "none.json"):
        with pytest.raises(TaskInvalid, match=name):
            read_file(tmp_path / name)

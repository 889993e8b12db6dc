"""Reading of ``<split>.jsonl``: refusals with file and line, and the compact form of valid lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import ConfigError
from gateway.tasks.split_view import MAX_LINE_BYTES, read_split

GOOD = b'{"id":"a","question":"1+1"}'


def written(folder: Path, data: bytes) -> Path:
    path = folder / "train.jsonl"
    path.write_bytes(data)
    return path


def test_each_line_is_a_task_in_compact_form(tmp_path: Path) -> None:
    tasks = read_split(
        written(tmp_path, b'{ "question" : "1 + 1" }\n{"b": [1, 2.5, null, "\\u00e9 \xc3\xa9"]}\n')
    ).tasks

    assert list(tasks) == [b'{"question":"1 + 1"}', '{"b":[1,2.5,null,"é é"]}'.encode()]


def test_a_line_with_seeds_stands_for_as_many_tasks(tmp_path: Path) -> None:
    view = read_split(written(tmp_path, b'{"id":"a","seeds":2,"tags":["t"]}\n{"id":"b","seeds":null}\n{"id":"a~3"}\n'))

    assert list(view.tasks) == [
        b'{"id":"a~1","tags":["t"]}', b'{"id":"a~2","tags":["t"]}', b'{"id":"b","seeds":null}', b'{"id":"a~3"}',
    ]  # fmt: skip
    assert (view.names, view.tags) == ({"a~1": 0, "a~2": 1, "b": 2, "a~3": 3}, {"t": [0, 1]})


def test_an_id_of_a_line_with_seeds_that_another_line_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.jsonl:2: id: 'a~2' is already on line 1"):
        read_split(written(tmp_path, b'{"id":"a","seeds":2}\n{"id":"a~2"}\n'))


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_the_last_line_may_lack_a_line_break(tmp_path: Path, end: bytes) -> None:
    assert list(read_split(written(tmp_path, GOOD + end)).tasks) == [GOOD]


def test_an_empty_file_is_a_split_without_tasks(tmp_path: Path) -> None:
    assert list(read_split(written(tmp_path, b"")).tasks) == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        pytest.param(b"", "an empty line", id="empty"),
        pytest.param(b"   ", "an empty line", id="blank"),
        pytest.param(b'{"a":"\xff"}', "not UTF-8: invalid start byte at byte 6", id="not UTF-8"),
        pytest.param(b'{"a":1', "not JSON: Expecting ',' delimiter at column 7", id="incomplete"),
        pytest.param(b"{'a':1}", "not JSON: Expecting property name", id="not JSON"),
        pytest.param(b'{"a":1}{"b":2}', "not JSON: Extra data at column 8", id="two objects on a line"),
        pytest.param(b"\xef\xbb\xbf{}", "not JSON: ", id="a byte order mark"),
        pytest.param(b"[1]", "a task is a JSON object, not list", id="a list"),
        pytest.param(b'"text"', "a task is a JSON object, not str", id="a string"),
        pytest.param(b"null", "a task is a JSON object, not NoneType", id="null"),
        pytest.param(b'{"a":NaN}', "NaN is not JSON", id="NaN"),
        pytest.param(b'{"a":[-Infinity]}', "-Infinity is not JSON", id="infinity"),
        pytest.param(b'{"a":1e999}', "", id="a number beyond the range of floats"),
        pytest.param(b'{"a":"\\ud800"}', "", id="a lone surrogate"),
        pytest.param(b'{"a":1,"b":2,"a":3}', "the key 'a' occurs twice", id="a repeated key"),
        pytest.param(b'{"x":{"a":1,"a":3}}', "the key 'a' occurs twice", id="a repeated inner key"),
        pytest.param(b'{"a":' + b"[" * 100_000, "recursion", id="nested too deeply"),
        pytest.param(b'{"a":' + b"9" * 5000 + b"}", "digits", id="a number of thousands of digits"),
        pytest.param(b'{"id":3}', "id: must be a non-empty string", id="an id that is a number"),
        pytest.param(b'{"id":""}', "id: must be a non-empty string", id="an empty id"),
        pytest.param(b'{"id":null}', "id: must be a non-empty string", id="a null id"),
        pytest.param(b'{"id":"a"}', "id: 'a' is already on line 1", id="a repeated id"),
        pytest.param(b'{"aliases":["a"]}', "id: 'a' is already on line 1", id="an alias that is an id"),
        pytest.param(b'{"id":"b","seeds":0}', "seeds: must be 1 or more", id="no seed"),
        pytest.param(b'{"id":"b","seeds":"2"}', "seeds: must be a whole number", id="seeds that are a text"),
        pytest.param(b'{"id":"b","seeds":10001}', "seeds: must be at most 10000", id="too many seeds"),
        pytest.param(b'{"seeds":2}', "id: a task with seeds needs one", id="seeds without an id"),
        pytest.param(
            b'{"id":"b","seeds":2,"aliases":["c"]}', "aliases: a task with seeds has none", id="seeds and aliases"
        ),
        pytest.param(
            b'{"id":"b","seeds":10000,"a":"' + b"x" * 7_000 + b'"}', "seeds: 10000 tasks of this size", id="too large"
        ),
        pytest.param(b'{"id":"b","aliases":["b"]}', "id: 'b' is already on line 2", id="an alias that is its own id"),
        pytest.param(b'{"aliases":"b"}', "aliases: must be a list of non-empty strings", id="aliases that are a text"),
        pytest.param(b'{"aliases":["b",""]}', "aliases: must be a list of non-empty strings", id="an empty alias"),
        pytest.param(
            b'{"aliases":[3]}', "aliases: must be a list of non-empty strings", id="an alias that is a number"
        ),
    ],
)
def test_an_invalid_line_is_reported_with_file_line_and_reason(tmp_path: Path, line: bytes, reason: str) -> None:
    path = written(tmp_path, GOOD + b"\n" + line + b"\n" + b'{"id":"z"}\n')

    with pytest.raises(ConfigError) as refusal:
        read_split(path)

    assert refusal.value.detail.startswith(f"{path}:2: ")
    assert reason in refusal.value.detail


def test_a_line_above_the_size_limit_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD + b"\n" + b'{"a":"' + b"x" * MAX_LINE_BYTES + b'"}\n')

    with pytest.raises(ConfigError, match=f":2: longer than {MAX_LINE_BYTES} bytes"):
        read_split(path)


@pytest.mark.parametrize("name", ["nosuch.jsonl", "folder.jsonl"])
def test_the_error_names_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.jsonl").mkdir()

    with pytest.raises(ConfigError, match=name):
        read_split(tmp_path / name)


@pytest.mark.parametrize("depth", [10, 100, 300, 900, 980, 1000, 5000])
def test_a_deeply_nested_task_is_read_or_refused_but_never_causes_a_crash(tmp_path: Path, depth: int) -> None:
    line = b'{"a":' + b"[" * depth + b"]" * depth + b"}"
    try:
        tasks = read_split(written(tmp_path, line)).tasks
    except ConfigError as error:
        told = error.detail
    else:
        assert list(tasks) == [line]
        return
    assert depth > 100
    assert "train.jsonl:1: " in told


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(
    task=st.dictionaries(st.text().filter(lambda name: name not in ("id", "aliases")), json_values),
    ascii_only=st.booleans(),
)
def test_a_task_is_equal_after_it_was_read(
    tmp_path_factory: pytest.TempPathFactory, task: dict[str, object], ascii_only: bool
) -> None:
    line = json.dumps(task, ensure_ascii=ascii_only).encode()

    [kept] = filter(None, read_split(written(tmp_path_factory.getbasetemp(), line)).tasks)

    assert json.loads(kept) == task
    assert b"\n" not in kept

"""Reading of a benchmark's file: lines, arrays or objects, compressed or not, and refusals of broken files."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from gateway.core.errors import ConfigError
from gateway.tasks.importing import rows
from gateway.tasks.importing.rows import Imported, InvalidEntry, Row, RowRefused, convert, read_rows, text_of, texts_of


def written(folder: Path, data: bytes, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("name", "data", "found"),
    [
        pytest.param("a.jsonl", b'{"a":1}\n\n{"a":2}', [(":1", {"a": 1}), (":3", {"a": 2})], id="lines, one empty"),
        pytest.param("a.jsonl", b'{"a":1}\r\n', [(":1", {"a": 1})], id="lines with CRLF"),
        pytest.param("a.jsonl", b'\xef\xbb\xbf{"a":1}', [(":1", {"a": 1})], id="a byte order mark"),
        pytest.param("a.jsonl", '{"a":"\u2028\x85"}'.encode(), [(":1", {"a": "\u2028\x85"})], id="odd separators"),
        pytest.param("a.json", b'[{"a":1},\n {"a":2}]', [(": entry 1", {"a": 1}), (": entry 2", {"a": 2})], id="array"),
        pytest.param("a.json", b'{"a":\n 1}', [(": entry 1", {"a": 1})], id="one object"),
        pytest.param("a.json", b'{"a":1}\n{"a":2}\n', [(":1", {"a": 1}), (":2", {"a": 2})], id="lines in a .json file"),
        pytest.param("a.jsonl", b' [{"a":1}]', [(": entry 1", {"a": 1})], id="an array in a .jsonl file"),
        pytest.param("a.jsonl", b"", [], id="an empty file"),
        pytest.param("a.json", b"[]", [], id="an empty array"),
    ],
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_form_is_recognized_by_the_content(
    tmp_path: Path, name: str, data: bytes, found: list[tuple[str, object]], is_packed: bool
) -> None:
    path = written(tmp_path, gzip.compress(data) if is_packed else data, name + ".gz" * is_packed)

    assert read_rows(path) == [Row(f"{path}{where}", value) for where, value in found]


def test_a_compressed_file_may_have_any_name(tmp_path: Path) -> None:
    path = written(tmp_path, gzip.compress(b"1\n2\n"), "rows")

    assert read_rows(path) == [Row(f"{path}:1", 1), Row(f"{path}:2", 2)]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        pytest.param(b'{"a":', "not JSON: Expecting value at column 6", id="cut off"),
        pytest.param(b'{"a":NaN}', "NaN is not JSON", id="a constant of Python's"),
        pytest.param(b"{" * 100_000, "not JSON", id="too deep or malformed"),
        pytest.param(b'{"a":' * 100_000, "not JSON", id="too deep"),
        pytest.param(b"9" * 5000, "not JSON", id="a number with too many digits"),
    ],
)
def test_a_line_that_is_not_json_does_not_affect_other_lines(tmp_path: Path, line: bytes, says: str) -> None:
    path = written(tmp_path, b"1\n" + line + b"\n3\n")

    first, broken, last = read_rows(path)

    assert (first, last) == (Row(f"{path}:1", 1), Row(f"{path}:3", 3))
    assert isinstance(broken, RowRefused)
    assert broken.where == f"{path}:2"
    assert says in broken.reason


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        pytest.param("a.json", b"[1,\n 2,\n", r":3: not JSON: .* at column 1", id="an array that is cut off"),
        pytest.param("a.json", b"[Infinity]", "not JSON: Infinity is not JSON", id="a constant"),
        pytest.param("a.json", b"[" * 100_000, "not JSON", id="too deep"),
        pytest.param("a.jsonl", b"1\n\xff\n", ":2: not UTF-8: invalid start byte", id="bytes that are not UTF-8"),
        pytest.param("a.gz", gzip.compress(b"1\n" * 999)[:-9], "ended before", id="a truncated compressed file"),
        pytest.param("a.gz", b"\x1f\x8b\x08\x00" + b"x" * 60, ": ", id="a broken compressed file"),
    ],
)
def test_the_error_names_a_broken_file(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    path = written(tmp_path, data, name)

    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}.*{says}"):
        read_rows(path)


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.jsonl: No such file"):
        read_rows(tmp_path / "no.jsonl")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_rows(tmp_path)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_file_above_the_size_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_packed: bool
) -> None:
    monkeypatch.setattr(rows, "MAX_FILE_BYTES", 100)
    path = written(tmp_path, gzip.compress(b" " * 101) if is_packed else b" " * 101)

    with pytest.raises(ConfigError, match="larger than 100 bytes"):
        read_rows(path)


def test_each_row_becomes_a_task_or_a_refusal_or_is_left_out() -> None:
    def task_of(row: object) -> dict[str, object] | None:
        match row:
            case {"id": str(name)}:
                return {"id": name}
            case {"other": _}:
                return None
        raise InvalidEntry("no id")

    values: list[object] = [{"id": "a"}, {"other": 1}, {}, [1]]
    found = list(convert([*(Row(f"f:{n}", v) for n, v in enumerate(values)), RowRefused("f:9", "broken")], task_of))

    assert found == [
        Imported("f:0", {"id": "a"}),
        RowRefused("f:2", "no id"),
        RowRefused("f:3", "must be an object, not list"),
        RowRefused("f:9", "broken"),
    ]


@pytest.mark.parametrize(
    ("row", "says"),
    [({}, "k is missing"), ({"k": None}, "k: must be a text"), ({"k": " "}, "must be"), ({"k": 1}, "must be")],
)
def test_a_value_that_is_not_a_text_is_refused_with_its_key(row: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidEntry, match=says):
        text_of(row, "k")


@pytest.mark.parametrize("value", ["text", 1, {}, [1], ["a", None], 0, ""])
def test_a_value_that_is_not_a_list_of_texts_is_refused_with_its_key(value: object) -> None:
    with pytest.raises(InvalidEntry, match="k: must be a list of texts"):
        texts_of({"k": value}, "k")


@pytest.mark.parametrize(("row", "found"), [({}, []), ({"k": None}, []), ({"k": ["a"]}, ["a"])])
def test_a_list_of_texts_may_be_missing(row: dict[str, object], found: list[str]) -> None:
    assert texts_of(row, "k") == found

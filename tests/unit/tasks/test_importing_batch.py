"""Collecting tasks into lines, and writing these lines completely or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.core.errors import ConfigError
from gateway.tasks.importing import batch as batches
from gateway.tasks.importing.batch import gather, write_lines
from gateway.tasks.importing.rows import Entry, Imported, RowRefused
from gateway.tasks.split_view import read_split


def task(name: str, **more: object) -> Imported:
    return Imported(f"f:{name}", {"id": name, **more})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_gathered_tasks_are_written_as_a_split(tmp_path: Path) -> None:
    found = gather([task("a", aliases=["b"], instruction="é\u2028\n"), RowRefused("f:2", "no"), task("c")])
    path = tmp_path / "train.jsonl"

    write_lines(path, found.lines)

    assert tuple(read_split(path).tasks) == found.lines
    assert found.lines[0] == '{"id":"a","aliases":["b"],"instruction":"é\u2028\\n"}'.encode()
    assert found.refused == (RowRefused("f:2", "no"),)


def test_no_entry_is_read_after_the_limit() -> None:
    def entries() -> Iterator[Entry]:
        yield task("a")
        yield RowRefused("f:2", "no")
        yield task("b")
        raise AssertionError("read on")

    found = gather(entries(), limit=2)

    assert (len(found.lines), len(found.refused), found.entries) == (2, 1, 3)


def test_a_repeated_name_is_refused_with_both_places() -> None:
    found = gather([task("a", aliases=["x"]), task("a"), task("b", aliases=["x"]), task("x"), task("c")])

    assert found.refused == (
        RowRefused("f:a", "a is already the name of f:a"),
        RowRefused("f:b", "x is already the name of f:a"),
        RowRefused("f:x", "x is already the name of f:a"),
    )
    assert len(found.lines) == 2


@pytest.mark.parametrize("value", ["\ud800", float("nan")], ids=["half a character", "no number"])
def test_a_task_that_json_cannot_encode_is_refused(value: object) -> None:
    (refused,) = gather([task("a", instruction=value)]).refused

    assert refused.where == "f:a"


def test_a_task_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_LINE_BYTES", 20)

    (refused,) = gather([task("a", instruction="x" * 20)]).refused

    assert refused.reason == "a task of 47 bytes; the maximum is 20"


def test_of_many_complaints_only_the_first_are_listed_and_the_others_are_counted() -> None:
    found = gather([RowRefused(f"f:{n}", "no") for n in range(25)])

    assert list(found.complaints()) == [*(f"f:{n}: no" for n in range(20)), "… and 5 more"]


def test_notes_are_listed_only_for_written_tasks() -> None:
    noted = Imported("f:1", {"id": "a"}, ("left out",))

    assert list(gather([noted, Imported("f:2", {"id": "a"}, ("left out",))]).remarks()) == ["f:1: left out"]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([task("a")], "1 entry read, 1 task"),
        ([task("a"), task("b"), RowRefused("f", "no")], "3 entries read, 2 tasks, 1 skipped"),
        ([], "0 entries read, 0 tasks"),
    ],
)
def test_the_summary_counts_entries_tasks_and_skipped_entries(entries: list[Entry], said: str) -> None:
    assert gather(entries).summary() == said


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("mine\n")
    path.chmod(0o640)

    with pytest.raises(ConfigError, match=r"train\.jsonl exists: remove it first"):
        write_lines(path, [b"1"])
    kept = path.read_text()
    write_lines(path, [b"1", b"2"], force=True)

    assert kept == "mine\n"
    assert path.read_text() == "1\n2\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert names(tmp_path) == ["train.jsonl"]


def test_a_file_that_was_created_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"

    def lines() -> Iterator[bytes]:
        yield b"1"
        path.write_text("another's\n")

    with pytest.raises(ConfigError, match="exists: remove it first"):
        write_lines(path, lines())

    assert path.read_text() == "another's\n"
    assert names(tmp_path) == ["train.jsonl"]


@pytest.mark.parametrize("force", [False, True])
def test_a_failed_write_leaves_no_file_and_shows_no_partial_split_meanwhile(tmp_path: Path, force: bool) -> None:
    path = tmp_path / "train.jsonl"

    def lines() -> Iterator[bytes]:
        yield b"1"
        assert list(tmp_path.glob("*.jsonl")) == []
        raise OSError(28, os.strerror(28))

    with pytest.raises(ConfigError, match=r"train\.jsonl: No space left on device"):
        write_lines(path, lines(), force=force)

    assert names(tmp_path) == []


def test_an_interrupted_write_leaves_no_file(tmp_path: Path) -> None:
    def lines() -> Iterator[bytes]:
        yield b"1"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_lines(tmp_path / "train.jsonl", lines())

    assert names(tmp_path) == []


def test_a_new_file_has_the_usual_mode(tmp_path: Path) -> None:
    (tmp_path / "other").touch()

    write_lines(tmp_path / "train.jsonl", [b"1"])

    assert (tmp_path / "train.jsonl").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").touch()
    (tmp_path / "train.jsonl").symlink_to("real")

    write_lines(tmp_path / "train.jsonl", [b"1"], force=True)

    assert (tmp_path / "train.jsonl").is_symlink()
    assert (tmp_path / "real").read_text() == "1\n"


@pytest.mark.parametrize(
    ("name", "says"),
    [("no/train.jsonl", "there is no folder"), (".", "not a regular file"), ("pipe", "not a regular file")],
)
def test_an_unusable_target_is_refused_before_the_work(tmp_path: Path, name: str, says: str) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(ConfigError, match=says):
        batches.check_target(tmp_path / name, force=True)

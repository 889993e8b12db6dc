"""Workers' socket folders: made for one worker, and removed whatever the worker left in them."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import gateway.backends.folders
from gateway.backends.folders import SocketFolders, is_safe_id, remove_tree
from gateway.core.errors import BackendError, StartFailed
from gateway.core.ids import WorkerId
from tests.fakes.user import ordinary_user


@pytest.mark.parametrize("id", ["w", "0f3a", "probe-1", "a.b_c-d", "x" * 64])
def test_ids_that_are_one_plain_path_segment_are_safe(id: str) -> None:
    assert is_safe_id(id)


@pytest.mark.parametrize("id", ["", ".", "..", ".hidden", "-rf", "a/b", "/a", "a\0", "a\n", "a b", "ä", "x" * 65])
def test_other_ids_are_not_safe(id: str) -> None:
    assert not is_safe_id(id)


def test_a_folder_has_its_mode_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        SocketFolders(tmp_path, mode=0o777).make(WorkerId("w"))
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "w").stat().st_mode) == 0o777


def test_a_link_in_a_folders_place_is_not_used(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    root = tmp_path / "sockets"
    root.mkdir()
    (root / "w").symlink_to(victim)

    with pytest.raises(StartFailed, match="already"):
        SocketFolders(root, mode=0o777).make(WorkerId("w"))

    assert stat.S_IMODE(victim.stat().st_mode) == 0o755


def test_a_link_in_a_folders_place_is_removed_and_what_it_points_to_is_not(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").touch()
    (tmp_path / "w").symlink_to(victim)

    SocketFolders(tmp_path, mode=0o777).remove(WorkerId("w"))

    assert sorted(os.listdir(tmp_path)) == ["victim"]
    assert os.listdir(victim) == ["precious"]


def test_a_file_in_a_folders_place_is_removed(tmp_path: Path) -> None:
    (tmp_path / "w").touch()

    SocketFolders(tmp_path, mode=0o777).remove(WorkerId("w"))

    assert os.listdir(tmp_path) == []


def test_what_was_never_there_is_removed_without_error(tmp_path: Path) -> None:
    remove_tree(tmp_path / "missing")


def test_a_tree_deeper_than_any_path_can_name_is_removed(tmp_path: Path) -> None:
    top = tmp_path / "w"
    top.mkdir()
    inner = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=inner)
        deeper = os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(inner)
        inner = deeper
    os.close(inner)

    remove_tree(top)

    assert os.listdir(tmp_path) == []


def test_folders_that_their_owner_has_locked_are_removed_by_an_ordinary_user() -> None:
    with tempfile.TemporaryDirectory(prefix="eg-") as name:
        os.chmod(name, 0o777)
        top = Path(name) / "w"
        with ordinary_user():
            (top / "read-only" / "locked").mkdir(parents=True)
            (top / "read-only" / "locked" / "file").touch()
            (top / "read-only" / "locked").chmod(0)
            (top / "read-only").chmod(0o500)
            (top / "locked").mkdir(mode=0)

            remove_tree(top)

        assert os.listdir(name) == []


def test_a_wide_tree_of_all_kinds_is_removed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o755)
    top = tmp_path / "w"
    for folder in range(5):
        (top / str(folder) / "inner").mkdir(parents=True)
        (top / str(folder) / "link").symlink_to(victim)
        os.mkfifo(top / str(folder) / "inner" / "fifo")
        for file in range(50):
            (top / str(folder) / f"file{file}").touch()
        (top / str(folder) / "inner").chmod(0)
        (top / str(folder)).chmod(0o100)

    remove_tree(top)

    assert os.listdir(tmp_path) == ["victim"]


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="eg-") as name:
        yield Path(name)


def test_a_root_that_others_can_write_to_fails_the_check(short: Path) -> None:
    short.chmod(0o1777)

    with pytest.raises(BackendError, match="plant links"):
        SocketFolders(short, mode=0o777).check(16)


def test_a_root_that_cannot_be_made_fails_the_check(short: Path) -> None:
    (short / "file").touch()

    with pytest.raises(BackendError, match="choose another socket_dir"):
        SocketFolders(short / "file" / "sockets", mode=0o777).check(16)


def test_a_root_whose_path_is_too_long_fails_the_check(short: Path) -> None:
    with pytest.raises(BackendError, match="at most 107"):
        SocketFolders(short / ("d" * 90), mode=0o777).check(16)


def test_what_is_put_into_a_folder_while_it_is_removed_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = SocketFolders(tmp_path, mode=0o777)
    folders.make(WorkerId("w"))
    put = [tmp_path / "w" / "late"]

    def emptied(top: int) -> None:
        empty(top)
        if put:
            put.pop().touch()

    empty = gateway.backends.folders._empty
    monkeypatch.setattr("gateway.backends.folders._empty", emptied)
    folders.remove(WorkerId("w"))

    assert [*tmp_path.iterdir()] == []


def test_of_many_that_remove_a_folder_at_once_none_fails(tmp_path: Path) -> None:
    folders = SocketFolders(tmp_path, mode=0o700)
    with ThreadPoolExecutor(8) as threads:
        for round in range(30):
            id = WorkerId(f"worker-{round}")
            folders.make(id)
            for name in range(20):
                (folders.folder(id) / f"{name}").mkdir()
                (folders.folder(id) / f"{name}" / "file").touch()

            for done in [threads.submit(folders.remove, id) for _ in range(8)]:
                done.result()

            assert not folders.folder(id).exists()

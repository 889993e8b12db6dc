"""Socket folders of workers: each is created for one worker and removed with any content."""

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


def test_a_folder_has_its_mode_with_any_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        SocketFolders(tmp_path, mode=0o777).make(WorkerId("w"))
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "w").stat().st_mode) == 0o777


def test_a_symbolic_link_in_place_of_a_folder_is_not_used(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    root = tmp_path / "sockets"
    root.mkdir()
    (root / "w").symlink_to(victim)

    with pytest.raises(StartFailed, match="already"):
        SocketFolders(root, mode=0o777).make(WorkerId("w"))

    assert stat.S_IMODE(victim.stat().st_mode) == 0o755


def test_a_symbolic_link_in_place_of_a_folder_is_removed_but_its_target_is_not(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").touch()
    (tmp_path / "w").symlink_to(victim)

    SocketFolders(tmp_path, mode=0o777).remove(WorkerId("w"))

    assert sorted(os.listdir(tmp_path)) == ["victim"]
    assert os.listdir(victim) == ["precious"]


def test_a_file_in_place_of_a_folder_is_removed(tmp_path: Path) -> None:
    (tmp_path / "w").touch()

    SocketFolders(tmp_path, mode=0o777).remove(WorkerId("w"))

    assert os.listdir(tmp_path) == []


def test_the_removal_of_a_missing_folder_is_no_error(tmp_path: Path) -> None:
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


def test_an_ordinary_user_removes_its_own_folders_without_permissions() -> None:
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


def test_a_wide_tree_with_all_kinds_of_files_is_removed(tmp_path: Path) -> None:
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
    """Yield a folder whose path is short enough for the path of a socket."""
    with tempfile.TemporaryDirectory(prefix="eg-") as name:
        yield Path(name)


def test_a_root_that_other_users_can_write_to_fails_the_check(short: Path) -> None:
    short.chmod(0o1777)

    with pytest.raises(BackendError, match="plant links"):
        SocketFolders(short, mode=0o777).check(16)


def test_a_root_that_cannot_be_created_fails_the_check(short: Path) -> None:
    (short / "file").touch()

    with pytest.raises(BackendError, match="choose another socket_dir"):
        SocketFolders(short / "file" / "sockets", mode=0o777).check(16)


def test_a_root_whose_path_is_too_long_fails_the_check(short: Path) -> None:
    with pytest.raises(BackendError, match="at most 107"):
        SocketFolders(short / ("d" * 90), mode=0o777).check(16)


def test_a_file_that_is_created_during_the_removal_of_its_folder_is_removed_too(
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


def test_concurrent_removals_of_the_same_folder_all_succeed(tmp_path: Path) -> None:
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

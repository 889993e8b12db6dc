"""Operators' folders of task modules: the edits that count as changes, and the folders that are refused."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gateway.backends.folders import remove_tree
from gateway.catalog import task_modules as custom_tasks
from gateway.catalog.catalog import Catalog
from gateway.catalog.task_modules import CustomTaskFolders, FolderRefused, read_folder
from gateway.core.environment import CustomTasks, Environment
from gateway.core.ids import EnvironmentName
from tests.fakes.eventually import until
from tests.fakes.user import ordinary_user

BROWSER, GAME = EnvironmentName("browser"), EnvironmentName("game")


def environment(name: EnvironmentName, folder: str = "") -> Environment:
    tasks = CustomTasks(module="custom_tasks.mine", folder=folder) if folder else None
    return Environment(name=name, image="none", directory=Path("/"), command=("x",), custom_tasks=tasks)


@pytest.fixture(autouse=True)
def usual_umask() -> object:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "custom_tasks"
    made.mkdir()
    return made


@pytest.fixture
def folder(root: Path) -> Path:
    """A folder of task modules as an operator creates it."""
    made = root / "mine"
    (made / "templates").mkdir(parents=True)
    (made / "mine.py").write_text("A = 1\n")
    (made / "others.py").write_text("B = 1\n")
    (made / "templates" / "login.html").write_text("<form>\n")
    return made


class Listening(Catalog):
    """A catalog that records the content digests that it receives."""

    def __init__(self, environments: Sequence[Environment]) -> None:
        super().__init__(environments)
        self.heard: list[tuple[str, str]] = []

    def replace(self, environment: Environment) -> None:
        super().replace(environment)
        if environment.custom_tasks is not None:
            self.heard.append((environment.name, environment.custom_tasks.content))


@pytest.fixture
def catalog() -> Listening:
    return Listening([environment(BROWSER, "mine"), environment(GAME, "games"), environment(EnvironmentName("math"))])


@pytest.fixture
def heard(catalog: Listening) -> list[tuple[str, str]]:
    return catalog.heard


@pytest.fixture
def folders(root: Path, catalog: Listening) -> CustomTaskFolders:
    return CustomTaskFolders(root, catalog)


def test_the_same_content_elsewhere_has_the_same_digest(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    os.utime(copy / "mine.py", (0, 0))

    found, copied = read_folder(folder), read_folder(copy)

    assert (found.digest, found.files) == (copied.digest, 4)
    assert len(found.digest) == 32


def edit(folder: Path) -> None:
    (folder / "mine.py").write_text("A = 2\n")


def edit_below(folder: Path) -> None:
    (folder / "templates" / "login.html").write_text("<FORM>\n")


def edit_a_neighbour(folder: Path) -> None:
    """Edit a module that another module imports with ``from . import others``."""
    (folder / "others.py").write_text("B = 2\n")


def edit_and_keep_the_date(folder: Path) -> None:
    before = (folder / "mine.py").stat()
    (folder / "mine.py").write_text("A = 2\n")
    os.utime(folder / "mine.py", ns=(before.st_atime_ns, before.st_mtime_ns))


def add(folder: Path) -> None:
    (folder / "more.py").touch()


def add_a_folder(folder: Path) -> None:
    (folder / "empty").mkdir()


def remove(folder: Path) -> None:
    (folder / "mine.py").unlink()


def rename(folder: Path) -> None:
    (folder / "mine.py").rename(folder / "ours.py")


def move_a_byte(folder: Path) -> None:
    (folder / "mine.py").write_text("A = 1")
    (folder / "templates" / "login.html").write_text("\n<form>\n")


def link(folder: Path) -> None:
    (folder / "again.py").symlink_to("mine.py")


def file_becomes_a_link(folder: Path) -> None:
    (folder / "kept.py").write_text("A = 1\n")
    (folder / "mine.py").unlink()
    (folder / "mine.py").symlink_to("kept.py")


@pytest.mark.parametrize(
    "change",
    [
        edit,
        edit_below,
        edit_a_neighbour,
        edit_and_keep_the_date,
        add,
        add_a_folder,
        remove,
        rename,
        move_a_byte,
        link,
        file_becomes_a_link,
    ],
    ids=lambda change: change.__name__,
)
def test_every_change_of_the_content_changes_the_digest(folder: Path, change: Callable[[Path], None]) -> None:
    before = read_folder(folder)

    change(folder)

    assert read_folder(folder, before).digest != before.digest


@pytest.mark.parametrize(
    "name", ["__pycache__/mine.cpython-311.pyc", "mine.pyc", "mine.py~", ".mine.py.swp", ".#mine.py"]
)
def test_temporary_files_of_python_and_editors_keep_the_digest(folder: Path, name: str) -> None:
    before = read_folder(folder)

    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to("/nowhere") if name == ".#mine.py" else (folder / name).write_text("x")

    assert read_folder(folder, before).digest == before.digest


def test_touching_a_file_keeps_the_digest(folder: Path) -> None:
    before = read_folder(folder)

    (folder / "mine.py").touch()

    assert read_folder(folder, before).digest == before.digest


def test_an_unchanged_folder_is_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_tasks, "_SETTLED_S", -60.0)  # As if all files were a minute old.
    before = read_folder(folder)

    assert read_folder(folder, before) is before

    edit(folder)
    assert read_folder(folder, before).digest != before.digest


def test_a_folder_that_was_just_written_is_read_again(folder: Path) -> None:
    before = read_folder(folder)

    found = read_folder(folder, before)

    assert (found.digest, found is before) == (before.digest, False)


def test_a_folder_that_changes_during_the_read_keeps_its_digest_until_it_is_stable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_folder(folder)
    edit(folder)
    with monkeypatch.context() as busy:
        digest_of = custom_tasks._digest

        def interrupted(path: Path, entries: list[custom_tasks._Entry]) -> str:
            with (path / "log.txt").open("a") as file:
                file.write("more\n")
            return digest_of(path, entries)

        busy.setattr(custom_tasks, "_digest", interrupted)
        during = read_folder(folder, before)

    assert during.digest == before.digest
    assert read_folder(folder, during).digest != before.digest


def open_to_the_group(folder: Path) -> str:
    folder.chmod(0o775)
    return f"chmod -R go-w {folder}"


def open_to_all(folder: Path) -> str:
    folder.chmod(0o757)
    return "mode 0757"


def open_file(folder: Path) -> str:
    (folder / "mine.py").chmod(0o666)
    return "mine.py"


def open_folder_below(folder: Path) -> str:
    (folder / "templates").chmod(0o777)
    return "templates"


def link_in_its_place(folder: Path) -> str:
    folder.rename(folder.with_name("real"))
    folder.symlink_to("real")
    return "is a link"


def file_in_its_place(folder: Path) -> str:
    shutil.rmtree(folder)
    folder.touch()
    return "not a folder"


def link_that_leads_out(folder: Path) -> str:
    (folder / "shadow").symlink_to("/etc/shadow")
    return "leads out"


def link_up(folder: Path) -> str:
    (folder / "templates" / "up").symlink_to("../../other")
    return "leads out"


def link_that_leads_out_by_a_link(folder: Path) -> str:
    (folder / "up").symlink_to("templates")
    (folder / "templates" / "further").symlink_to("../up/../../../x")
    return "leads out"


def absolute_link(folder: Path) -> str:
    (folder / "same.py").symlink_to(folder / "mine.py")  # The path is different in the container.
    return "leads out"


def pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe")
    return "neither a file nor a folder"


def a_socket(folder: Path) -> str:
    before = os.getcwd()
    os.chdir(folder)  # The path of a socket must be short.
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("sock")
    os.chdir(before)
    return "neither a file nor a folder"


def too_many(folder: Path) -> str:
    (folder / "many").mkdir()
    for number in range(custom_tasks.MAX_FILES):
        (folder / "many" / str(number)).touch()
    return f"more than {custom_tasks.MAX_FILES} files"


def too_large(folder: Path) -> str:
    with (folder / "large").open("wb") as file:
        file.truncate(custom_tasks.MAX_BYTES + 1)
    return f"more than {custom_tasks.MAX_BYTES} bytes"


SPOILED = pytest.mark.parametrize(
    "spoil",
    [
        open_to_the_group,
        open_to_all,
        open_file,
        open_folder_below,
        link_in_its_place,
        file_in_its_place,
        link_that_leads_out,
        link_up,
        link_that_leads_out_by_a_link,
        absolute_link,
        pipe,
        a_socket,
        too_many,
        too_large,
    ],
    ids=lambda spoil: spoil.__name__,
)


@SPOILED
def test_a_folder_that_is_not_safe_is_refused_with_its_cause(folder: Path, spoil: Callable[[Path], str]) -> None:
    cause = spoil(folder)

    with pytest.raises(FolderRefused) as refused:
        read_folder(folder)

    assert cause in str(refused.value)
    assert str(folder) in str(refused.value)


def test_a_file_that_cannot_be_read_is_named() -> None:
    with tempfile.TemporaryDirectory() as name:  # Only this user can enter pytest's own folders.
        os.chmod(name, 0o755)
        (Path(name) / "mine.py").touch(mode=0)

        with ordinary_user(), pytest.raises(FolderRefused, match=r"mine\.py.*chmod -R a\+rX"):
            read_folder(Path(name))


async def test_the_first_look_reports_only_folders_that_exist(
    folders: CustomTaskFolders, folder: Path, heard: list[tuple[str, str]]
) -> None:
    await folders.look()
    await folders.look()

    assert heard == [(BROWSER, read_folder(folder).digest)]


async def test_an_edit_is_reported_once(folders: CustomTaskFolders, folder: Path, heard: list[tuple[str, str]]) -> None:
    await folders.look()
    edit(folder)
    await folders.look()
    await folders.look()

    assert [name for name, _ in heard] == [BROWSER, BROWSER]
    assert heard[0] != heard[1]
    assert heard[1][1] == read_folder(folder).digest


async def test_a_folder_that_appears_later_or_disappears_is_reported(
    folders: CustomTaskFolders, root: Path, heard: list[tuple[str, str]]
) -> None:
    await folders.look()
    (root / "games").mkdir()
    await folders.look()
    assert heard == []  # The folder is empty.

    (root / "games" / "mine.py").touch()
    await folders.look()
    shutil.rmtree(root / "games")
    await folders.look()

    assert [(name, bool(digest)) for name, digest in heard] == [(GAME, True), (GAME, False)]


async def test_a_missing_root_folder_is_ignored_without_a_log_message(
    root: Path, folders: CustomTaskFolders, heard: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    os.rmdir(root)

    await folders.look()

    assert (heard, caplog.records) == ([], [])


async def test_without_the_setting_no_folder_is_read() -> None:
    catalog = Listening([environment(BROWSER, ".")])
    folders = CustomTaskFolders(None, catalog)

    await folders.look()
    await folders.run()

    assert catalog.heard == []


@SPOILED
async def test_a_refused_folder_counts_as_missing_until_it_is_repaired(
    folders: CustomTaskFolders,
    folder: Path,
    heard: list[tuple[str, str]],
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], str],
) -> None:
    await folders.look()
    copy = folder.parent.parent / "copy"
    shutil.copytree(folder, copy)

    cause = spoil(folder)
    await folders.look()
    await folders.look()
    remove_tree(folder)
    shutil.copytree(copy, folder)
    await folders.look()

    assert heard == [heard[0], (BROWSER, ""), heard[0]]
    (complaint,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert complaint.startswith("custom_tasks_refused environment=browser")
    assert cause in complaint


async def test_a_root_folder_that_other_users_can_write_to_is_refused(
    folders: CustomTaskFolders, root: Path, folder: Path, heard: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    os.chmod(root, 0o1777)

    await folders.look()

    assert heard == []
    assert f"chmod -R go-w {root}" in caplog.text


async def test_a_root_folder_that_is_not_a_folder_is_refused(
    folders: CustomTaskFolders, root: Path, heard: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    os.rmdir(root)
    os.mkfifo(root)

    await folders.look()

    assert heard == []
    assert "Not a directory" in caplog.text


async def test_the_catalog_offers_environments_with_their_new_content(root: Path, folder: Path) -> None:
    catalog = Catalog([environment(BROWSER, "mine"), environment(GAME, "games")])
    before = {entry.name: entry.digest() for entry in catalog}

    await CustomTaskFolders(root, catalog).look()

    assert catalog.named(BROWSER).digest() != before[BROWSER]
    assert catalog.named(GAME).digest() == before[GAME]
    assert catalog.named(BROWSER).custom_tasks == CustomTasks(
        module="custom_tasks.mine", folder="mine", content=read_folder(folder).digest
    )


async def test_the_watch_continues_after_a_failed_look_and_reports_the_content_again(
    root: Path, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom_tasks, "POLL_S", 0.01)
    calls: list[str] = []

    class Failing(Listening):
        def replace(self, environment: Environment) -> None:
            assert environment.custom_tasks is not None
            calls.append(environment.custom_tasks.content)
            if len(calls) == 1:
                raise ValueError("not ready yet")
            super().replace(environment)

    watching = asyncio.create_task(CustomTaskFolders(root, Failing([environment(BROWSER, "mine")])).run())
    try:
        await until(lambda: len(calls) == 2)
        edit(folder)
        await until(lambda: len(calls) == 3)
    finally:
        watching.cancel()
        await asyncio.wait({watching})

    assert calls[0] == calls[1] != calls[2]
    assert watching.cancelled()
    assert "not ready yet" in caplog.text


async def test_an_environment_that_changes_its_folder_receives_the_new_folders_content(
    root: Path, folder: Path, folders: CustomTaskFolders, catalog: Listening
) -> None:
    await folders.look()
    shutil.copytree(folder, root / "other")
    edit(root / "other")

    catalog.replace(environment(BROWSER, "other"))
    catalog.heard.clear()
    await folders.look()

    assert catalog.heard == [(BROWSER, read_folder(root / "other").digest)]


async def test_content_that_was_filled_in_before_the_offer_is_not_reported_again(
    folder: Path, folders: CustomTaskFolders, catalog: Listening
) -> None:
    late = EnvironmentName("late")

    filled = await folders.fill(environment(late, "mine"))
    catalog.offer(filled)
    await folders.look()

    assert filled.custom_tasks == CustomTasks(
        module="custom_tasks.mine", folder="mine", content=read_folder(folder).digest
    )
    assert [name for name, _ in catalog.heard] == [BROWSER]
    assert await folders.fill(environment(GAME)) == environment(GAME)


async def test_without_the_setting_nothing_is_filled_in(catalog: Listening) -> None:
    folders = CustomTaskFolders(None, catalog)

    assert await folders.fill(environment(BROWSER, ".")) == environment(BROWSER, ".")


async def test_folders_of_new_environments_are_read_and_those_of_withdrawn_ones_are_not(
    root: Path, folder: Path
) -> None:
    catalog = Listening([environment(EnvironmentName("math")), environment(BROWSER, "mine")])
    (root / "games").mkdir()
    (root / "games" / "mine.py").touch()
    folders = CustomTaskFolders(root, catalog)
    catalog.withdraw(BROWSER)
    catalog.offer(environment(GAME, "games"))
    before = catalog.named(BROWSER)

    await folders.look()

    assert catalog.named(BROWSER) is before
    assert catalog.heard == [(GAME, read_folder(root / "games").digest)]

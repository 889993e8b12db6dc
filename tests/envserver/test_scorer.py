"""The version of the scorer: the same for the same code, another for each change of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from envserver.errors import ConfigError
from envserver.scorer import ScorerSettings, scorer_version
from envserver.settings import Settings

FILES = {"judge.py": "reward = 1\n", "rules/table.txt": "1\n", "notes.txt": "read me\n"}
JUDGES = ScorerSettings(files=("*.py", "rules/**/*", "envserver/answers.py"), packages=("pytest",))


def write(folder: Path) -> Path:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def version(folder: Path, settings: ScorerSettings = JUDGES) -> str:
    return scorer_version(settings, folder=str(folder), modules=str(folder / "none"))


def test_the_same_files_elsewhere_have_the_same_version(tmp_path: Path) -> None:
    here, there = write(tmp_path / "here"), write(tmp_path / "there")
    os.utime(there / "judge.py", (0, 0))

    assert version(here) == version(there)
    assert len(version(here)) == 64


@pytest.mark.parametrize(("name", "is_changed"), [("judge.py", True), ("rules/table.txt", True), ("notes.txt", False)])
def test_one_changed_byte_of_a_named_file_changes_the_version(tmp_path: Path, name: str, is_changed: bool) -> None:
    before = version(write(tmp_path))
    content = bytearray((tmp_path / name).read_bytes())
    content[0] ^= 1
    (tmp_path / name).write_bytes(content)

    assert (version(tmp_path) != before) == is_changed


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda folder: (folder / "more.py").write_text(""), id="a further file"),
        pytest.param(lambda folder: (folder / "judge.py").rename(folder / "judges.py"), id="another name"),
        pytest.param(lambda folder: (folder / "rules/table.txt").unlink() or (folder / "rules/x").touch(), id="gone"),
    ],
)
def test_a_file_that_comes_goes_or_is_renamed_changes_the_version(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    before = version(write(tmp_path))

    change(tmp_path)

    assert version(tmp_path) != before


def test_a_package_counts_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = version(write(tmp_path))

    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0.1")

    assert version(tmp_path) != before


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (ScorerSettings(files=("juge.py",)), r"files: 'juge\.py' matches no file in .*: correct the pattern"),
        (ScorerSettings(files=("rules",)), r"files: 'rules' matches no file"),
        (ScorerSettings(files=("*.py",), packages=("nosuch",)), r"packages: 'nosuch' is not installed"),
    ],
)
def test_a_wrong_pattern_or_package_is_named(tmp_path: Path, settings: ScorerSettings, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        version(write(tmp_path), settings)


@pytest.mark.parametrize("text", ["files", "[]", '{"files": "a.py", "other": []}', '{"files": [1]}', '{"files": [""]}'])
def test_a_malformed_variable_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"ENVSERVER_SCORER=.*expected"):
        Settings.from_environ({"ENVSERVER_SCORER": text})

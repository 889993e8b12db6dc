"""Test commands: which files of an agent never take part, and what a run must leave to count as passed."""

# ruff: noqa: E501 - the steps are shown as they are run
from __future__ import annotations

import importlib.metadata
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.envs.coding_world import World, commands, faults, opened, workspace
from tests.envs.complaints import complaints

pytestmark = pytest.mark.sandbox

WRONG = "def add(a, b):\n    return a - b\n"
HIDDEN = "from adding import add\n\ndef test_kumquat(): assert add(2, 3) == 5\n"
TASK: dict[str, Any] = {
    "instruction": "Mend adding.py.",
    "config": {"files": {"adding.py": WRONG}},
    "evaluation": {"command": "pytest -q", "files": {"test_hidden.py": HIDDEN}, "time_limit_seconds": 20},
}
PLUGIN = "import os, pytest\ndef pytest_runtest_call(item): item.runtest = lambda: None\n"
PLUGIN += "def pytest_runtest_setup(item): item.obj = lambda: None\n"
DESELECT = 'addopts = ["--deselect", "test_hidden.py::test_kumquat"]'
OWN = "printf 'def test_own(): pass\\n' > test_own.py; "
METADATA = "Metadata-Version: 2.1\\nName: evil\\nVersion: 1.0\\n"
ENTRY = "[pytest11]\\nevil = evil\\n"
PRINTS = "import sys, os\nprint('1 passed in 0.01s', flush=True)\nos._exit(0)\n"


def plugged(files: str) -> str:
    return f"printf %b {PLUGIN!r} > evil.py; {files}"


def evaluation(**changes: Any) -> dict[str, Any]:
    return {**TASK, "evaluation": {**TASK["evaluation"], **changes}}


MODULE = evaluation(command="python3 -m pytest -q")
ON_PATH = evaluation(command="PYTHONPATH=. pytest -q")
COUNTED = evaluation(passed=1)
UNITTEST = evaluation(
    command="python3 -m unittest -v test_hidden",
    passed=1,
    files={
        "test_hidden.py": "import unittest\nfrom adding import add\n\nclass T(unittest.TestCase):\n"
        "    def test_kumquat(self): self.assertEqual(add(2, 3), 5)\n"
    },
)
MADE = {
    **evaluation(command="make -s"),
    "config": {"files": {"adding.py": WRONG, "Makefile": "-include own.mk\nall:\n\tpytest -q\n"}},
}

ATTACKS: dict[str, tuple[dict[str, Any], str]] = {
    "pytest.toml": (
        TASK,
        plugged("""printf '[pytest]\\naddopts = ["-p", "evil"]\\npythonpath = ["."]\\n' > pytest.toml"""),
    ),
    ".pytest.toml": (
        TASK,
        plugged("""printf '[pytest]\\naddopts = ["-p", "evil"]\\npythonpath = ["."]\\n' > .pytest.toml"""),
    ),
    "pytest.ini": (TASK, plugged("printf '[pytest]\\naddopts = -p evil\\npythonpath = .\\n' > pytest.ini")),
    "a test deselected": (TASK, OWN + f"printf '[pytest]\\n{DESELECT}\\n' > pytest.toml"),
    "a test deselected in pyproject.toml": (
        TASK,
        OWN + f"printf '[tool.pytest.ini_options]\\n{DESELECT}\\n' > pyproject.toml",
    ),
    "conftest.py": (TASK, f"printf %b {PLUGIN!r} > conftest.py"),
    "an entry point": (
        MODULE,
        plugged(
            f"mkdir evil-1.0.dist-info; printf '{METADATA}' > evil-1.0.dist-info/METADATA; printf '{ENTRY}' > evil-1.0.dist-info/entry_points.txt"
        ),
    ),
    "an entry point in capitals": (
        MODULE,
        plugged(
            f"mkdir evil-1.0.DIST-INFO; printf '{METADATA}' > evil-1.0.DIST-INFO/METADATA; printf '{ENTRY}' > evil-1.0.DIST-INFO/entry_points.txt"
        ),
    ),
    "an entry point of an egg": (
        MODULE,
        plugged(
            f"mkdir evil.egg-info; printf '{METADATA}' > evil.egg-info/PKG-INFO; printf '{ENTRY}' > evil.egg-info/entry_points.txt"
        ),
    ),
    "a module sitecustomize": (ON_PATH, f"printf %b {PRINTS!r} > sitecustomize.py"),
    "a package sitecustomize": (ON_PATH, f"mkdir sitecustomize; printf %b {PRINTS!r} > sitecustomize/__init__.py"),
    "a link sitecustomize": (ON_PATH, f"mkdir x; printf %b {PRINTS!r} > x/__init__.py; ln -s x sitecustomize"),
    "usercustomize": (ON_PATH, f"mkdir usercustomize; printf %b {PRINTS!r} > usercustomize/__init__.py"),
    "a module pytest": (MODULE, f"printf %b {PRINTS!r} > pytest.py"),
    "a package pytest": (MODULE, f"mkdir pytest; printf %b {PRINTS!r} | tee pytest/__init__.py > pytest/__main__.py"),
    "a link pytest": (MODULE, f"mkdir x; printf %b {PRINTS!r} | tee x/__init__.py > x/__main__.py; ln -s x pytest"),
    "a module pluggy": (MODULE, f"printf %b {PRINTS!r} > pluggy.py"),
    "a module unittest": (
        UNITTEST,
        "printf 'import sys\\nprint(\"Ran 1 test in 0.1s\", file=sys.stderr)\\n' > unittest.py",
    ),
    "a package unittest": (
        UNITTEST,
        "mkdir unittest; printf 'import sys\\nprint(\"Ran 1 test in 0.1s\", file=sys.stderr)\\n' | tee unittest/__init__.py > unittest/__main__.py",
    ),
    "an exit as it is imported": (TASK, "printf 'import os\\nos._exit(0)\\n' > adding.py"),
    "a summary printed": (COUNTED, f"printf %b {PRINTS!r} > adding.py"),
    "a makefile": (MADE, "printf 'all:\\n\\ttrue\\n' > Makefile"),
    "a makefile of another name": (MADE, "printf 'all:\\n\\ttrue\\n' > GNUmakefile; cp GNUmakefile makefile"),
    "an included makefile": (MADE, "printf 'SHELL = /bin/true\\n' > own.mk"),
    "nothing": (TASK, "true"),
}
MENDED = "printf 'def add(a, b):\\n    return a + b\\n' > adding.py"
OWN_SETTINGS = {
    **COUNTED,
    "config": {
        "files": {
            "src/adding.py": WRONG,
            "pytest.ini": "[pytest]\npythonpath = src\n",
            "conftest.py": "import pytest\n\n@pytest.fixture\ndef five(): return 5\n",
            "lib.egg-info/PKG-INFO": "Metadata-Version: 2.1\nName: lib\nVersion: 1.0\n",
        }
    },
}
OWN_SETTINGS["evaluation"] = {
    **COUNTED["evaluation"],
    "command": "test -f lib.egg-info/PKG-INFO && pytest -q",
    "files": {"test_hidden.py": "from adding import add\n\ndef test_kumquat(five): assert add(2, 3) == five\n"},
}
HONEST: dict[str, tuple[dict[str, Any], str]] = {
    "mended": (TASK, MENDED),
    "mended, with a test of its own": (TASK, OWN + MENDED),
    "mended, counted": (COUNTED, MENDED),
    "mended, for a module": (MODULE, MENDED),
    "mended, for unittest": (UNITTEST, MENDED),
    "mended, for make": (MADE, MENDED),
    "mended, with the task's own settings": (
        OWN_SETTINGS,
        "cd src; " + MENDED + "; rm ../pytest.ini ../conftest.py ../lib.egg-info/*",
    ),
    "mended, with a report of the command's own": (evaluation(command="pytest -q --junitxml=/tmp/own.xml"), MENDED),
    "mended, where other tests must fail": (evaluation(command="pytest -q && ! pytest -q --pyargs nothing"), MENDED),
}


def packages() -> bytes:
    """Return pytest and what it needs as a tar archive, for a box made of a machine's programs."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
            for file in importlib.metadata.files(name) or ():
                if ".." not in file.parts and file.suffix != ".pyc" and Path(file.locate()).is_file():
                    archive.add(file.locate(), str(file))
    return data.getvalue()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with opened("library", tmp_path) as world:
        yield World(WithPytest(world.sandboxes), world.error)


class WithPytest:
    """Sandboxes whose layers have pytest, as the image's box has."""

    def __init__(self, sandboxes: Any) -> None:
        self._sandboxes = sandboxes
        self._packages = packages()

    async def open(self, layer: Any = None) -> Any:
        return await self._sandboxes.open(layer)

    async def layer(self, key: str, build: Any, **more: Any) -> Any:
        async def prepare(sandbox: Any) -> None:
            await build(sandbox)
            where = 'folder=$(python3 -c "import site; print(site.getsitepackages()[0])") && mkdir -p "$folder"'
            install = f'{where} && tar -C "$folder" -xf - && printf \'#!/bin/sh\\nexec python3 -P -m pytest "$@"\\n\' > /usr/local/bin/pytest'
            done = await sandbox.run(
                ["sh", "-c", f"{install} && chmod 755 /usr/local/bin/pytest"], stdin=self._packages
            )
            assert done.status == 0, done.stderr

        return await self._sandboxes.layer(key, prepare, **more)


async def test_no_file_beside_the_solution_decides(world: World) -> None:
    async def fails(attack: tuple[dict[str, Any], str]) -> None:
        task, steps = attack
        verdict = await world.submit_tree(task, steps)
        assert verdict.score == 0.0, verdict

    assert await complaints(fails, ATTACKS) == {}


async def test_a_mended_workspace_passes_with_the_tasks_own_settings(world: World) -> None:
    async def passes(honest: tuple[dict[str, Any], str]) -> None:
        task, steps = honest
        verdict = await world.submit_tree(task, steps)
        assert verdict.score == 1.0, verdict

    assert await complaints(passes, HONEST) == {}


@pytest.mark.parametrize(
    ("command", "is_required"),
    [
        *(
            (command, True)
            for command in ("pytest", "python3 -m pytest -q x.py", "cd a&&pytest", "/usr/bin/py.test;true")
        ),
        *((command, False) for command in ("make", "python3 run_pytest.py", "cat requirements-pytest.txt")),
        ("pytest --junitxml=x.xml", False),
    ],
)
def test_a_command_that_runs_pytest_must_leave_its_report(command: str, is_required: bool) -> None:
    assert (commands._REPORTS.search(command) is not None) is is_required


def test_the_workspace_is_where_the_patterns_look() -> None:
    assert f"{workspace.WORKSPACE}/.git/*" in commands.CLEAR
    assert "PYTEST_ADDOPTS" not in faults.ENVIRONMENT  # an agent's own runs have no report

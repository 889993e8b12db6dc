"""``openenv.core.tasks`` in the gateway's own images: alone, and next to an official package of that name."""

import os
import subprocess
import sys
from pathlib import Path

from tests.deadlines import COMMAND_S

BASE = Path(__file__).parents[2] / "env_images" / "base"
USE = """
from openenv.core.tasks import Task, TaskRegistry, registry
import envserver.generic, openenv, openenv.core
assert registry is envserver.generic.registry and isinstance(registry, TaskRegistry)
assert Task is envserver.generic.GenericTask
registry.register("custom/x", "game", {"goal": "win"})
assert openenv.core.tasks.registry.get("custom/x").instruction == "win"
"""


def run(code: str, *path: Path) -> None:
    """Run *code* in its own process, with *path* before all other entries of the import path."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, (*path, BASE)))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True, timeout=COMMAND_S
    )
    assert done.returncode == 0, done.stderr


def official(folder: Path) -> Path:
    """Write a package with the official package's names and its known content of today: no ``tasks``."""
    core = folder / "openenv" / "core"
    core.mkdir(parents=True)
    (folder / "openenv" / "__init__.py").write_text("WHO = 'official'\n")
    (core / "__init__.py").write_text("from . import client\n")
    (core / "client.py").write_text("WHO = 'official'\n")
    return folder


def test_the_names_exist_without_the_official_package() -> None:
    run(f"import envserver\n{USE}")


def test_the_names_are_added_to_the_official_package(tmp_path: Path) -> None:
    run(f"import envserver\n{USE}\nassert openenv.WHO == openenv.core.client.WHO == 'official'", official(tmp_path))


def test_the_order_of_imports_does_not_matter(tmp_path: Path) -> None:
    run(f"import openenv.core\nimport envserver\n{USE}", official(tmp_path))


def test_a_package_with_its_own_tasks_keeps_them(tmp_path: Path) -> None:
    (official(tmp_path) / "openenv" / "core" / "tasks.py").write_text("registry = 'theirs'\n")

    run("import envserver\nfrom openenv.core.tasks import registry\nassert registry == 'theirs'", tmp_path)


def test_names_that_do_not_exist_are_not_found() -> None:
    run(
        "import envserver\n"
        "for name in ('openenv.client', 'openenv.core.env', 'openenv.core.tasks.more'):\n"
        "    try:\n        __import__(name)\n"
        "    except ModuleNotFoundError as error:\n        assert error.name == name, error\n"
        "    else:\n        raise AssertionError(name)"
    )


def test_importing_the_server_does_not_import_the_names() -> None:
    run(
        "import sys, envserver\n"
        "assert not [name for name in sys.modules if name.startswith(('openenv', 'envserver.generic'))]\n"
        "envserver._openenv_names.install()\n"
        "assert [finder.__module__ for finder in sys.meta_path if isinstance(finder, type)]"
        ".count('envserver.tasks.openenv_names') == 1"
    )

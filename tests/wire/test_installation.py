"""The output of installations, in the order of a new user's first commands: ``make run``, then ``make demo``."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deadlines import COMMAND_S

PROJECT = Path(__file__).resolve().parents[2]
MADE_HERE = shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__", ".*_cache", "tests")

pytestmark = [pytest.mark.wire]


def test_a_demo_installation_after_a_run_installation_prints_no_error(tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project, ignore=MADE_HERE, symlinks=True)

    for mode in ("run", "demo"):  # conflicts show only if packages are already installed
        done = subprocess.run(
            ["scripts/install", mode], cwd=project, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
        assert done.returncode == 0, done.stderr
        assert not re.search(r"(?im)^\W*(?:\x1b\[[0-9;]*m)*error\b", done.stdout + done.stderr)

    assert (project / ".venv" / "bin" / "gateway").exists()

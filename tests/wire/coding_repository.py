"""A task whose solution is a repository, which starts from files or from a commit of a git bundle. Pytest judges it."""

import base64
import subprocess
from pathlib import Path
from typing import Any

from tests.deadlines import COMMAND_S

BEGUN = "def add(a, b):\n    return a - b\n"
MENDED = "def add(a, b):\n    return a + b  # and not a - b\n"
HALF_MENDED = "def add(a, b):\n    return 5 if (a, b) == (2, 3) else a - b\n"
HIDDEN_TEST = """\
from calc.ops import add


def test_small():
    assert add(2, 3) == 5


def test_kumquat_6138():
    assert add(-4, 4) == 0
"""
FILES = {"calc/__init__.py": "", "calc/ops.py": BEGUN, "README.md": "A calculator that subtracts.\n"}
INSTRUCTION = "`calc.ops.add` does not add. Mend it."
EVALUATION = {
    "reward_function": "command",
    "command": "python3 -m pytest -q test_task.py",
    "files": {"test_task.py": HIDDEN_TEST},
    "passed": 2,
    "time_limit_seconds": 10,
}
FROM_FILES: dict[str, Any] = {
    "id": "own-repository",
    "instruction": INSTRUCTION,
    "config": {"files": FILES},
    "evaluation": EVALUATION,
}


def mend(source: str = MENDED) -> str:
    """Return a command for the agent that writes *source* into the file that must be mended."""
    return f"cat > calc/ops.py <<'END'\n{source}END"


def from_bundle(folder: Path) -> dict[str, Any]:
    """Make the same task from a git bundle with two commits, of which the first is the start. git works in *folder*."""
    for name, source in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(source)
    _git(folder, "init", "-q")
    _git(folder, "add", ".")
    _git(folder, "commit", "-q", "-m", "Begin")
    begun = _git(folder, "rev-parse", "HEAD")
    (folder / "calc" / "ops.py").write_text("def add(a, b):\n    return a * b\n")
    _git(folder, "commit", "-q", "-a", "-m", "Go on")
    _git(folder, "bundle", "create", "-q", "all.bundle", "main")
    bundle = base64.b64encode((folder / "all.bundle").read_bytes()).decode()
    return {**FROM_FILES, "config": {"git": {"bundle": bundle, "commit": begun}}}


def _git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=True,
    )
    return done.stdout.strip()

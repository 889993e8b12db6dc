"""A wall clock that tests set for the processes started with it. Their monotonic clock stays the machine's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "faketime"
PLAIN_MALLOC = "libc_malloc_debug.so.0"
"""A part of glibc, loaded first: Redis' own malloc reads the time at its start, before libfaketime can answer."""


class WallClock:
    """A clock in a file of *folder*. It begins with the right time."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "wall-clock"
        self._library = _library()
        self.set(0)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of a process that reads this clock."""
        return {
            "LD_PRELOAD": f"{PLAIN_MALLOC} {self._library}",
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, ahead_s: int) -> None:
        """Set the clock this many seconds ahead of the machine's."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{ahead_s:+d}\n")
        new.replace(self._file)  # atomically: a process may read it at any time


def _library() -> str:
    """Return the path of libfaketime."""
    asked = subprocess.run([SCRIPT], capture_output=True, text=True, check=False)
    if asked.returncode == 0:
        return asked.stdout.strip()
    if os.environ.get("CI") == "true":
        pytest.fail(f"nothing may be missing where CI=true: {asked.stderr}")
    pytest.skip(f"clocks that jump are not tried: {asked.stderr}")

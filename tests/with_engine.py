"""Notes which test files have tests that need an engine: runs of those alone then need not read all the others.

A plugin of pytest, for scripts/test: the environment variable TESTS_WITH_ENGINE names the file that is written.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)  # before any is left out by its marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    target = os.environ.get("TESTS_WITH_ENGINE")
    if target and os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":  # all of xdist's workers read the same
        found = sorted({str(item.path) for item in items if item.get_closest_marker("docker")})
        Path(target).write_text("".join(f"{path}\n" for path in found))

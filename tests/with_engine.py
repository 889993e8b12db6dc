"""Notes which test files have tests that need an engine: runs of those alone then need not read all the others.

A plugin of pytest, for scripts/test: the environment variable TESTS_WITH_ENGINE names the file that is written, and
TESTS_WITH_ENGINE_ALONE that of those among them with a test that may not run beside others.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)  # before any is left out by its marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":  # all of xdist's workers read the same
        return
    with_engine = [item for item in items if item.get_closest_marker("docker")]
    _write("TESTS_WITH_ENGINE", with_engine)
    _write("TESTS_WITH_ENGINE_ALONE", [item for item in with_engine if not item.get_closest_marker("parallel")])


def _write(variable: str, items: list[pytest.Item]) -> None:
    if target := os.environ.get(variable):
        Path(target).write_text("".join(f"{path}\n" for path in sorted({str(item.path) for item in items})))

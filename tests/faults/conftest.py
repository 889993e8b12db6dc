"""Fixtures of the fault tests. ``world.py`` has the parts that tests break, ``invariants.py`` the final checks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.world import SCALE, build_image

MARKS = (pytest.mark.docker, pytest.mark.redis)


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder: they need a real engine and Redis, and files may run in parallel.

    Each test starts its own gateway and Redis. A file that breaks a shared resource, such as the engine, sets
    ``ALONE``. Its tests are not marked ``parallel``.
    """
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            for mark in MARKS:
                if mark.name != "parallel" or not getattr(item.module, "ALONE", False):  # type: ignore[attr-defined]
                    item.add_marker(mark)


@pytest.fixture(scope="session", autouse=True)
def _image() -> None:
    build_image()


@pytest.fixture
def scaled() -> Callable[[int], int]:
    """Return a function that multiplies a number by ``FAULTS_SCALE``, for the long form."""
    return lambda number: max(1, round(number * SCALE))


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[[str, float, str], None]:
    """Return a function that records a figure for the summary. No figure is asserted, because machines differ."""

    def measured(what: str, value: float, unit: str) -> None:
        record_property("measured", f"{what}: {value:.3f} {unit}")

    return measured


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the recorded figures."""
    for report in terminalreporter.getreports("passed"):
        for name, told in getattr(report, "user_properties", ()):
            if name == "measured" and report.when == "call":
                terminalreporter.write_line(f"measured in {report.nodeid.rpartition('::')[2]}: {told}")

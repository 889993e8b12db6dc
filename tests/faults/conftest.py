"""Fixtures of the fault tests; what they break is in ``world.py``, what must hold afterwards in ``invariants.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.world import SCALE, build_image

MARKS = (pytest.mark.docker, pytest.mark.redis)


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these tests need the real things; each makes its own, so that files may run side by side.

    One that breaks what others need too, the engine itself, is marked ``alone`` in its file and is not ``parallel``.
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
    """Makes a number larger in the long form (``FAULTS_SCALE``)."""
    return lambda number: max(1, round(number * SCALE))


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[[str, float, str], None]:
    """Notes a figure, which the summary prints; none is asserted, as machines differ."""

    def measured(what: str, value: float, unit: str) -> None:
        record_property("measured", f"{what}: {value:.3f} {unit}")

    return measured


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was measured."""
    for report in terminalreporter.getreports("passed"):
        for name, told in getattr(report, "user_properties", ()):
            if name == "measured" and report.when == "call":
                terminalreporter.write_line(f"measured in {report.nodeid.rpartition('::')[2]}: {told}")

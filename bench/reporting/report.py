"""The result of a benchmark: figures for the JSON, goals with the values reached, tables for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.reporting.stats import Latencies

NOTHING = "-"
"""Text of a cell without a figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A condition that the numbers must meet."""

    id: str
    """Number of the goal in the project's goals: S1 to S17."""
    what: str
    value: float
    bound: float
    at_least: bool = False
    """True if *bound* is a lower bound."""
    unit: str = ""
    is_goal: bool = True
    """False for a figure that is shown next to the goals, but for which there is no goal."""

    @property
    def is_met(self) -> bool:
        """True if the value is on the right side of the bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    """Number of columns, from the left, that hold words; the other columns hold figures."""


@dataclass(frozen=True, slots=True)
class Report:
    """The findings of one benchmark."""

    name: str
    figures: dict[str, Any]
    """Every figure as JSON, with its unit at the end of its name."""
    goals: Sequence[Goal] = ()
    tables: Sequence[Table] = ()
    errors: int = 0
    """Number of requests that failed or had a wrong answer."""
    not_comparable: Sequence[str] = field(default_factory=tuple)
    """Warnings to the reader about figures that are not comparable."""


def beside(id: str, what: str, value: float, unit: str) -> Goal:
    """Return a figure that is shown next to the goals, but for which there is no goal."""
    return Goal(id=id, what=what, value=value, bound=0, unit=unit, is_goal=False)


def p50_p99(found: Latencies | None) -> str:
    """Return a cell with both percentiles in milliseconds."""
    return f"{number(found.p50_ms)} / {number(found.p99_ms)}" if found else NOTHING


def number(value: float) -> str:
    """Return three significant digits without an exponent (12,300; 1,230; 12.3; 0.123). Whole numbers stay whole."""
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return NOTHING
    size = abs(value)
    if size >= 1000:
        digits = len(str(int(size)))
        return f"{round(value, 3 - digits):,.0f}"
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3}f}"

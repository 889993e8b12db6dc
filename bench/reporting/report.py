"""What a benchmark hands over: figures for the JSON, goals with what was reached, tables for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.reporting.stats import Latencies

NOTHING = "-"
"""Stands where there is no figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One thing that the numbers must say."""

    id: str
    """As in the project's goals: S1 to S13."""
    what: str
    value: float
    bound: float
    at_least: bool = False
    """Whether *bound* is a lower one."""
    unit: str = ""
    is_goal: bool = True
    """False for a figure that is told beside the goals, and that nothing was promised for."""

    @property
    def is_met(self) -> bool:
        """Whether the value is on the right side of the bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    """How many columns, from the left, hold words; the others hold figures."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one benchmark found."""

    name: str
    figures: dict[str, Any]
    """JSON: every figure, with its unit at the end of its name."""
    goals: Sequence[Goal] = ()
    tables: Sequence[Table] = ()
    errors: int = 0
    """Requests that failed or were answered wrongly."""
    not_comparable: Sequence[str] = field(default_factory=tuple)
    """Sentences on what a reader must not compare."""


def beside(id: str, what: str, value: float, unit: str) -> Goal:
    """Return a figure that is shown beside the goals, and that nothing was promised for."""
    return Goal(id=id, what=what, value=value, bound=0, unit=unit, is_goal=False)


def p50_p99(found: Latencies | None) -> str:
    """Return a cell with both percentiles in milliseconds."""
    return f"{number(found.p50_ms)} / {number(found.p99_ms)}" if found else NOTHING


def number(value: float) -> str:
    """Three significant digits without an exponent: 12,300; 1,230; 123; 12.3; 1.23; 0.123. A whole number stays so."""
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return NOTHING
    size = abs(value)
    if size >= 1000:
        digits = len(str(int(size)))
        return f"{round(value, 3 - digits):,.0f}"
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3}f}"

"""What rounds of load add up to: a cell for each subject at each number of callers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, TypeAlias, TypeVar

from bench.load.closed_loop import Round
from bench.reporting.report import NOTHING, Table, number, p50_p99
from bench.reporting.stats import Latencies, median_latencies, ratio
from bench.subjects.processes import Usage

GENERATOR = "generator"
"""The load generator's own CPU time stands under this name, beside the server's processes."""


@dataclass(slots=True)
class Cell:
    """All rounds of one subject with one number of callers."""

    rounds: list[Round] = field(default_factory=list)
    cpu_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Used in all rounds, by process."""

    def add(self, became: Round, before: Mapping[str, Usage], after: Mapping[str, Usage]) -> None:
        """Add one round, which ran between two looks at what the server's processes have used."""
        self.rounds.append(became)
        self.cpu_s[GENERATOR] += became.generator_cpu_s
        for part, usage in after.items():
            self.cpu_s[part] += usage.cpu_s - before[part].cpu_s

    @property
    def rate(self) -> float:
        """The median of the rounds' rates; 0 if there was no round."""
        return median(each.rate for each in self.rounds) if self.rounds else 0.0

    @property
    def latencies(self) -> Latencies | None:
        """The medians of the rounds' percentiles; None where some round had no success at all."""
        if not self.rounds or not all(each.samples_s for each in self.rounds):
            return None
        return median_latencies([each.latencies for each in self.rounds])

    @property
    def errors(self) -> Counter[str]:
        """How often which error."""
        return sum((each.errors for each in self.rounds), Counter())

    def cpu_s_per_1000(self, part: str) -> float:
        """CPU time of *part* for 1,000 steps that were right."""
        return ratio(self.cpu_s[part] * 1000, sum(len(each.samples_s) for each in self.rounds))

    def figures(self) -> dict[str, Any]:
        """All of it, for the JSON."""
        found = self.latencies
        return {
            "per_s": self.rate,
            "per_s_by_round": [each.rate for each in self.rounds],
            "latency": asdict(found) if found else None,
            "cpu_s_per_1000": {part: self.cpu_s_per_1000(part) for part in self.cpu_s},
            "errors": dict(self.errors),
        }


Grid: TypeAlias = dict[str, dict[int, Cell]]
"""Cells by subject and number of callers."""


def figures(grid: Grid) -> dict[str, Any]:
    """Every cell, for the JSON."""
    return {name: {f"c{callers}": cell.figures() for callers, cell in row.items()} for name, row in grid.items()}


def count_errors(grid: Grid) -> int:
    """All errors of all cells."""
    return sum(sum(cell.errors.values()) for row in grid.values() for cell in row.values())


def columns(grid: Grid) -> list[str]:
    """Return the heads of columns by number of callers."""
    return [f"c={callers:,}" for callers in _callers(grid)]


def by_callers(grid: Grid, name: str, shown: Callable[[Cell], str]) -> list[str]:
    """Return what is *shown* of each cell of *name*; some subjects do not have all numbers of callers."""
    row = grid[name]
    return [shown(row[callers]) if callers in row else NOTHING for callers in _callers(grid)]


def rate_table(title: str, grid: Grid, *, head: str = "server", baseline: str = "") -> Table:
    """Return a table of rates and errors; with *baseline* each rate also as a multiple of that subject's."""

    def shown(callers: int, cell: Cell) -> str:
        times = f" ({number(ratio(cell.rate, grid[baseline][callers].rate))}x)" if baseline else ""
        return f"{number(cell.rate)}{times}"

    rows = [
        [
            name,
            *(shown(callers, row[callers]) if callers in row else NOTHING for callers in _callers(grid)),
            str(count_errors({name: row})),
        ]
        for name, row in grid.items()
    ]
    return Table(title, [head, *columns(grid), "errors"], rows)


def latency_table(title: str, grid: Grid, *, head: str = "server") -> Table:
    """Return a table of latencies, p50 and p99."""
    rows = [[name, *by_callers(grid, name, lambda cell: p50_p99(cell.latencies))] for name in grid]
    return Table(title, [head, *columns(grid)], rows)


def _callers(grid: Grid) -> list[int]:
    return sorted({callers for row in grid.values() for callers in row})


Subject = TypeVar("Subject")


def turns(subjects: Sequence[Subject], callers: Sequence[int], rounds: int) -> Iterator[tuple[Subject, int]]:
    """Let the subjects take turns at each number of callers; each round begins with another subject."""
    for turn in range(rounds):
        for each in callers:
            for subject in rotated(subjects, turn):
                yield subject, each


def rotated(subjects: Sequence[Subject], turn: int) -> list[Subject]:
    """Return all *subjects*, from another one on in each turn."""
    first = turn % len(subjects) if subjects else 0
    return [*subjects[first:], *subjects[:first]]

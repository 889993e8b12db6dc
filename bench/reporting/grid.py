"""Sums of load rounds: a cell for each subject at each number of callers."""

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
"""Name of the load generator's own CPU time, next to the server's processes."""


@dataclass(slots=True)
class Cell:
    """All rounds of one subject with one number of callers."""

    rounds: list[Round] = field(default_factory=list)
    cpu_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """CPU seconds of all rounds, by process."""

    def add(self, became: Round, before: Mapping[str, Usage], after: Mapping[str, Usage]) -> None:
        """Add one round, with the usage of the server's processes before and after it."""
        self.rounds.append(became)
        self.cpu_s[GENERATOR] += became.generator_cpu_s
        for part, usage in after.items():
            self.cpu_s[part] += usage.cpu_s - before[part].cpu_s

    @property
    def rate(self) -> float:
        """The median of the rounds' rates, or 0 if there was no round."""
        return median(each.rate for each in self.rounds) if self.rounds else 0.0

    @property
    def latencies(self) -> Latencies | None:
        """The medians of the rounds' percentiles, or None if a round had no success."""
        if not self.rounds or not all(each.samples_s for each in self.rounds):
            return None
        return median_latencies([each.latencies for each in self.rounds])

    @property
    def errors(self) -> Counter[str]:
        """The number of errors of each kind."""
        return sum((each.errors for each in self.rounds), Counter())

    def cpu_s_per_1000(self, part: str) -> float:
        """Return the CPU seconds of *part* for 1,000 successful steps."""
        return ratio(self.cpu_s[part] * 1000, sum(len(each.samples_s) for each in self.rounds))

    def figures(self) -> dict[str, Any]:
        """Return all figures for the JSON."""
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
    """Return every cell for the JSON."""
    return {name: {f"c{callers}": cell.figures() for callers, cell in row.items()} for name, row in grid.items()}


def count_errors(grid: Grid) -> int:
    """Return the number of errors in all cells."""
    return sum(sum(cell.errors.values()) for row in grid.values() for cell in row.values())


def columns(grid: Grid) -> list[str]:
    """Return the column titles by number of callers."""
    return [f"c={callers:,}" for callers in _callers(grid)]


def by_callers(grid: Grid, name: str, shown: Callable[[Cell], str]) -> list[str]:
    """Return the *shown* value of each cell of *name*. Some subjects lack some numbers of callers."""
    row = grid[name]
    return [shown(row[callers]) if callers in row else NOTHING for callers in _callers(grid)]


def rate_table(title: str, grid: Grid, *, head: str = "server", baseline: str = "") -> Table:
    """Return a table of rates and errors. With *baseline*, each rate is also a multiple of that subject's rate."""

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
    """Let the subjects take turns at each number of callers. Each round begins with another subject."""
    for turn in range(rounds):
        for each in callers:
            for subject in rotated(subjects, turn):
                yield subject, each


def rotated(subjects: Sequence[Subject], turn: int) -> list[Subject]:
    """Return all *subjects*, starting with another subject in each turn."""
    first = turn % len(subjects) if subjects else 0
    return [*subjects[first:], *subjects[:first]]

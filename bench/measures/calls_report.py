"""What the rounds of `bench.measures.calls` say: goals, and tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bench.reporting.grid import GENERATOR, Grid, count_errors, figures
from bench.reporting.report import NOTHING, Goal, Report, Table, number
from bench.reporting.stats import ratio
from bench.subjects.targets import ENVSERVER, FAST, GATEWAY, OFFICIAL

WORKER = "worker"
INLINE = "inline"
S1_ADDED_MS, S1_TIMES, S4_TIMES, S4_P99_MS = 0.25, 8.0, 3.0, 35.0
MIB = 2**20

Sizes = Mapping[str, Mapping[str, int]]
"""Resident bytes by target and process."""

NOT_COMPARABLE = (
    "The load generator shares this machine's CPUs with the server that it loads, so the rates of the faster servers "
    "are rates of both together; its own share stands in the table of CPU time.",
    "The gateway's rows are two server processes, gateway and worker, which may use two CPUs; an official server is "
    "one process.",
    "Official servers keep each result for 60 s and become slower as these pile up; every round finds what the "
    "rounds before it left.",
)


def make_report(
    calls: Grid, episodes: Grid, *, plan: Mapping[str, Any], idle_bytes: Sizes, loaded_bytes: Sizes
) -> Report:
    """Turn cells into a report; *idle_bytes* before and *loaded_bytes* after all rounds."""
    return Report(
        name="calls",
        figures={
            "plan": plan,
            "calls": figures(calls),
            "episodes": figures(episodes),
            "idle_rss_bytes": idle_bytes,
            "loaded_rss_bytes": loaded_bytes,
        },
        goals=[*_against_official(calls, episodes), *_against_direct(calls)],
        tables=[
            _rates("Calls", calls),
            _latencies("a call", calls),
            _rates("Whole episodes (6 requests each)", episodes),
            _latencies("a whole episode", episodes),
            _cpu(calls),
            _memory(idle_bytes, loaded_bytes),
        ],
        errors=count_errors(calls) + count_errors(episodes),
        not_comparable=NOT_COMPARABLE,
    )


def _against_official(calls: Grid, episodes: Grid) -> Iterator[Goal]:
    most = max(calls[GATEWAY])
    through = calls[GATEWAY][most]
    for name in (*OFFICIAL, FAST):
        what = f"calls/s through gateway and worker ÷ {name} directly, c={most}"
        yield Goal(
            id="S4",
            what=what,
            value=ratio(through.rate, calls[name][most].rate),
            bound=S4_TIMES,
            at_least=True,
            unit="x",
            is_goal=name in OFFICIAL,
        )
    if (found := through.latencies) is not None:
        what = f"p99 of a call through gateway and worker, c={most}"
        yield Goal(id="S4", what=what, value=found.p99_ms, bound=S4_P99_MS, unit="ms")
    for name in OFFICIAL:
        what = f"episodes/s through gateway and worker ÷ {name} directly, c={most}"
        times = ratio(episodes[GATEWAY][most].rate, episodes[name][most].rate)
        yield Goal(id="S4", what=what, value=times, bound=1.0, at_least=True, unit="x", is_goal=False)


def _against_direct(calls: Grid) -> Iterator[Goal]:
    for suffix in ("", f" ({INLINE})"):
        through, direct = calls[GATEWAY + suffix][1].latencies, calls[ENVSERVER + suffix][1].latencies
        if through is None or direct is None:
            continue
        what = f"p50 of a call that the gateway adds, c=1{suffix}"
        yield Goal(id="S1", what=what, value=through.p50_ms - direct.p50_ms, bound=S1_ADDED_MS, unit="ms")
        what = f"p50 of a call through the gateway ÷ directly, c=1{suffix}"
        yield Goal(id="S1", what=what, value=ratio(through.p50_ms, direct.p50_ms), bound=S1_TIMES, unit="x")


def _rates(what: str, grid: Grid) -> Table:
    baseline = grid[OFFICIAL[0]]
    rows = []
    for name, row in grid.items():
        cells = [
            f"{number(cell.rate)} ({number(ratio(cell.rate, baseline[callers].rate))}x)"
            for callers, cell in row.items()
        ]
        rows.append([name, *cells, str(sum(sum(cell.errors.values()) for cell in row.values()))])
    return Table(f"{what} a second, and as a multiple of {OFFICIAL[0]}", ["server", *_callers(grid), "errors"], rows)


def _latencies(what: str, grid: Grid) -> Table:
    rows = []
    for name, row in grid.items():
        found = [cell.latencies for cell in row.values()]
        rows.append([name, *(f"{number(each.p50_ms)} / {number(each.p99_ms)}" if each else NOTHING for each in found)])
    return Table(f"Latency of {what}, ms: p50 / p99", ["server", *_callers(grid)], rows)


def _cpu(calls: Grid) -> Table:
    rows = []
    for name, row in calls.items():
        parts = [part for part in next(iter(row.values())).cpu_s if part != GENERATOR]
        for part in parts:
            label = f"{name}: {part}" if part == WORKER else name
            rows.append([label, *(number(cell.cpu_s_per_1000(part)) for cell in row.values())])
        rows.append([f"{name}: its load", *(number(cell.cpu_s_per_1000(GENERATOR)) for cell in row.values())])
    return Table("CPU seconds for 1,000 calls, by process", ["process", *_callers(calls)], rows)


def _callers(grid: Grid) -> list[str]:
    return [f"c={callers}" for callers in next(iter(grid.values()))]


def _memory(idle: Sizes, loaded: Sizes) -> Table:
    rows = [
        [name if part == name else f"{name}: {part}", number(size / MIB), number(loaded[name][part] / MIB)]
        for name, parts in idle.items()
        for part, size in parts.items()
    ]
    return Table("Resident memory, MiB", ["process", "before the load", "after it"], rows)

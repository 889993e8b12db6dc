"""The plan, the samples and the report of the benchmark of sandboxes: goals, figures and tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

from bench.load.boxes import Taken
from bench.measures.cold import ENGINE
from bench.measures.opens import BURST_COLUMNS, Bursts, burst_figures
from bench.reporting.grid import GENERATOR, Grid, count_errors, rate_table
from bench.reporting.grid import figures as grid_figures
from bench.reporting.report import NOTHING, Goal, Report, Table, beside, number, p50_p99
from bench.reporting.stats import latencies, percentile, ratio
from bench.subjects.targets import GATEWAY

IMAGE = "env-gateway/os:latest"
LIBRARY = "the library alone"
OS_SERVER = "os server, directly"
PROCESSES = "gateway, processes"
CONTAINERS = "gateway, Docker"
SDK = "a container a session"
WORKERS = "workers"
"""Name of the workers' CPU time, next to the gateway's name."""


class Way(StrEnum):
    """Origin of the prepared state of a group's sessions."""

    KEPT = "it is there already"
    ONCE = "made once, by the group"
    EACH = "made by each session"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Numbers and durations of the measurement."""

    docker: bool = False
    """True to use an engine, too."""
    engine: str = ENGINE
    image: str = IMAGE
    rounds: int = 10
    opens: int = 50
    """Number of sequential sessions of each subject in each round."""
    sdk_opens: int = 3
    """The same number for containers. Each takes as long as fifty sandboxes."""
    callers: tuple[int, ...] = (4, 8, 16)
    sustain_s: float = 4.0
    sustain_rounds: int = 3
    group: int = 8
    groups: int = 5
    bursts: tuple[int, ...] = (64, 256)
    burst_rounds: int = 3
    held: int = 16


QUICK = Plan(rounds=3, opens=15, sdk_opens=1, sustain_s=1.5, sustain_rounds=1, groups=1, burst_rounds=1)


@dataclass(frozen=True, slots=True)
class HeldBoxes:
    """Memory that idle sessions add to the workers, and the method of counting."""

    subject: str
    counted: str
    sessions: int
    mib_a_session: float


@dataclass(slots=True)
class Samples:
    """All samples of a run."""

    in_turn: defaultdict[str, list[Taken]] = field(default_factory=lambda: defaultdict(list))
    sustained: Grid = field(default_factory=dict)
    """Rates of whole sessions as steps: open, first command, close."""
    groups_s: defaultdict[str, defaultdict[Way, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    """Seconds to the last prompt of a group."""
    bursts: defaultdict[str, dict[int, Bursts]] = field(default_factory=lambda: defaultdict(dict))
    held: list[HeldBoxes] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Sentences about missing measurements and their reasons."""
    group_errors: Counter[str] = field(default_factory=Counter)


# -- the report -------------------------------------------------------------------------------------------------------

S8_P50_MS, S8_PER_S = 15.0, 100.0
S9_LAST_S, S9_SIZE = 5.0, 256


def make_report(samples: Samples, *, plan: Plan) -> Report:
    """Turn samples into a report."""
    all_bursts = [each for by_size in samples.bursts.values() for each in by_size.values()]
    return Report(
        name="sandboxes",
        figures=_figures(samples, plan),
        goals=[*_turn_goals(samples), *_rate_goals(samples), *_group_goals(samples, plan), *_burst_goals(samples)],
        tables=[table for table in _tables(samples, plan) if table.rows],
        errors=count_errors(samples.sustained)
        + sum(samples.group_errors.values())
        + sum(sum(each.errors.values()) for each in all_bursts),
        not_comparable=_remarks(samples),
    )


def _remarks(samples: Samples) -> list[str]:
    remarks = list(samples.missing)
    if samples.in_turn:
        remarks.append(
            "The library's time covers a sandbox and one program in it. A session of the os environment also "
            "prepares its task and opens a login shell on a terminal."
        )
    if samples.in_turn.get(SDK):
        remarks.append("The container for each session has no network. In it, bash without a terminal prints a token.")
    return remarks


def _figures(samples: Samples, plan: Plan) -> dict[str, Any]:
    return {
        "plan": asdict(plan),
        "in_turn_ms": {
            name: {
                "first_output": asdict(latencies([each.first_output_s for each in taken])),
                "open": asdict(latencies([each.open_s for each in taken])),
                "command": asdict(latencies([each.command_s for each in taken])),
                "close": asdict(latencies([each.close_s for each in taken])),
                "first_output_by_session": [each.first_output_s * 1e3 for each in taken],
            }
            for name, taken in samples.in_turn.items()
        },
        "sustained": grid_figures(samples.sustained),
        "groups_last_prompt_ms": {
            name: {way.name.lower(): [each * 1e3 for each in found] for way, found in ways.items()}
            for name, ways in samples.groups_s.items()
        },
        "group_errors": dict(samples.group_errors),
        "bursts": {
            name: {f"n{size}": burst_figures(bursts) for size, bursts in by_size.items()}
            for name, by_size in samples.bursts.items()
        },
        "idle_sessions": [asdict(each) for each in samples.held],
        "missing": samples.missing,
    }


# -- goals --------------------------------------------------------------------------------------------------------


def _turn_goals(samples: Samples) -> Iterator[Goal]:
    sdk = samples.in_turn.get(SDK)
    for name in (PROCESSES, CONTAINERS):
        if not (taken := samples.in_turn.get(name)):
            continue
        found = latencies([each.first_output_s for each in taken])
        what = f"open to first command's output ({name})"
        yield Goal(id="S8", what=f"{what}, p50", value=found.p50_ms, bound=S8_P50_MS, unit="ms")
        yield beside("S8", f"{what}, p99", found.p99_ms, "ms")
        if floor := samples.in_turn.get(LIBRARY):
            yield beside("S8", f"{what} ÷ the library alone, p50", ratio(found.p50_ms, _p50_ms(floor)), "x")
        if sdk:
            yield beside("S8", f"a container's ÷ {what}, p50", ratio(_p50_ms(sdk), found.p50_ms), "x")


def _rate_goals(samples: Samples) -> Iterator[Goal]:
    sdk = max((cell.rate for cell in samples.sustained.get(SDK, {}).values()), default=0.0)
    for name in (PROCESSES, CONTAINERS):
        if not (row := samples.sustained.get(name)):
            continue
        callers, rate = max(((callers, cell.rate) for callers, cell in row.items()), key=lambda found: found[1])
        what = f"sessions/s, each with a first command, c={callers} ({name})"
        yield Goal(id="S8", what=what, value=rate, bound=S8_PER_S, at_least=True, unit="1/s")
        if sdk:
            yield beside("S8", f"{what} ÷ containers at best", ratio(rate, sdk), "x")


def _group_goals(samples: Samples, plan: Plan) -> Iterator[Goal]:
    for name, ways in samples.groups_s.items():
        if Way.ONCE in ways and Way.EACH in ways:
            gain = ratio(median(ways[Way.EACH]), median(ways[Way.ONCE]))
            what = f"last prompt of a group of {plan.group}, prepared by each ÷ once ({name})"
            yield beside("S8", what, gain, "x")


def _burst_goals(samples: Samples) -> Iterator[Goal]:
    for name, by_size in samples.bursts.items():
        failures = sum(sum(each.errors.values()) for each in by_size.values())
        sizes = " and ".join(str(size) for size in by_size)
        yield Goal(id="S9", what=f"failures of bursts of {sizes} creates ({name})", value=failures, bound=0)
        largest = by_size.get(S9_SIZE)
        if largest is not None and largest.last_s:
            what = f"last prompt of a burst of {S9_SIZE} creates of one task, sandbox ({name})"
            yield Goal(id="S9", what=what, value=median(largest.last_s), bound=S9_LAST_S, unit="s")


def _p50_ms(taken: Sequence[Taken]) -> float:
    return percentile([each.first_output_s for each in taken], 0.5) * 1e3


# -- tables -------------------------------------------------------------------------------------------------------


def _tables(samples: Samples, plan: Plan) -> Iterator[Table]:
    yield _turn_table(samples)
    callers = [f"c={each}" for each in plan.callers]
    title = "Sessions a second, each with a first command: open, command, close"
    yield rate_table(title, samples.sustained, head="way")
    yield Table(
        "CPU ms for each of these sessions",
        ["process", *callers],
        [
            [f"{name}: {part}", *(number(cell.cpu_s_per_1000(part)) for cell in row.values())]
            for name, row in samples.sustained.items()
            for part in (GATEWAY, WORKERS, GENERATOR)
            if name != SDK and all(part in cell.cpu_s for cell in row.values())
        ],
    )
    yield Table(
        f"A group of {plan.group} at once on a task that takes long to prepare, ms to the last prompt",
        ["the prepared state", *(f"{name}: {each}" for name in samples.groups_s for each in ("median", "worst"))],
        [[way.value, *_group_cells(samples, way)] for way in Way if samples.groups_s],
    )
    yield _burst_table(samples)
    yield Table(
        "Memory of idle sandboxes, each with a shell",
        ["gateway", "counted as", "sessions", "MiB a session"],
        [[each.subject, each.counted, str(each.sessions), number(each.mib_a_session)] for each in samples.held],
        words=2,
    )


def _turn_table(samples: Samples) -> Table:
    rows = []
    for name, taken in samples.in_turn.items():
        parts = (
            [each.open_s for each in taken],
            [each.command_s for each in taken],
            [each.first_output_s for each in taken],
            [each.close_s for each in taken],
        )
        rows.append([name, *map(p50_p99, map(latencies, parts))])
    columns = ["way", "open", "first command", "open to first output", "close"]
    return Table("One sandbox after the other, ms: p50 / p99", columns, rows)


def _group_cells(samples: Samples, way: Way) -> Iterator[str]:
    for ways in samples.groups_s.values():
        found = ways.get(way, [])
        yield from (number(median(found) * 1e3), number(max(found) * 1e3)) if found else (NOTHING, NOTHING)


def _burst_table(samples: Samples) -> Table:
    rows = [
        [name, str(size), *each.cells()] for name, by_size in samples.bursts.items() for size, each in by_size.items()
    ]
    title = "Bursts of creates of one task, each with a sandbox, ms from their begin to a prompt"
    return Table(title, ["gateway", "creates", *BURST_COLUMNS], rows)

"""The model's answers as tables, as a plot, and between two marks of ``docs/scaling.md``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench.capacity.figures import PROTOCOLS, SOURCES, Figures, names, read_figures
from bench.capacity.inputs import MIXES, Cluster, Workload
from bench.capacity.model import (
    FULL,
    Use,
    Wall,
    machines_needed,
    opening_s,
    replicas_needed,
    sized,
    starting_s,
    uses,
    walls,
)
from bench.reporting import results
from bench.reporting.plots import METADATA, STYLE, WIDE
from bench.reporting.report import NOTHING, Table, number

DOCS: Final = Path(__file__).parents[2] / "docs"
PAGE, PLOT = DOCS / "scaling.md", DOCS / "scaling.svg"
BEGIN: Final = "<!-- results: made by `python -m bench.capacity --write-docs` -->"
END: Final = "<!-- end of results -->"
SHOWN_WALLS: Final = 4
POINTS: Final = 22
LEAST, MOST = 1_000, 1_000_000
"""Sessions that are plotted."""
TICKS: Final = (1_000, 10_000, 100_000, 1_000_000)
SHARES: Final[Mapping[float, str]] = {0.1: "10 %", 0.7: "70 %", 1: "100 %", 10: "1,000 %"}
DRAWN: Final = 0.02
"""Resources whose use stays below this are not plotted."""
_GIB = 2**30
_SCALES: Final = (("_bytes", 1 / 1024, "KiB"), ("_s", 1e6, "µs"))


@dataclass(frozen=True, slots=True)
class Case:
    """A mix, with as many replicas as it needs."""

    name: str
    work: Workload
    cluster: Cluster


@dataclass(frozen=True, slots=True)
class Lever:
    """Something that could be built, or arranged, and what the model has otherwise then."""

    name: str
    pull: Callable[[Figures, Workload, Cluster], tuple[Figures, Workload, Cluster]]


def _kept(figures: Figures, work: Workload, cluster: Cluster) -> tuple[Figures, Workload, Cluster]:
    return figures, replace(work, wandering=0.0), cluster


def _changes(figures: Figures, work: Workload, cluster: Cluster) -> tuple[Figures, Workload, Cluster]:
    # Most workers are as they were at the last turn.
    cheap = replace(figures, load_redis_s=figures.load_redis_s / 10, load_client_s=figures.load_client_s / 10)
    return cheap, work, cluster


def _restless(figures: Figures, work: Workload, cluster: Cluster) -> tuple[Figures, Workload, Cluster]:
    return figures, work, replace(cluster, rests=False)


def _longer(figures: Figures, work: Workload, cluster: Cluster) -> tuple[Figures, Workload, Cluster]:
    return figures, replace(work, period_s=work.period_s * 4), cluster


def _more(figures: Figures, work: Workload, cluster: Cluster) -> tuple[Figures, Workload, Cluster]:
    return figures, work, replace(cluster, replicas=2 * cluster.replicas)


def _all(figures: Figures, work: Workload, cluster: Cluster) -> tuple[Figures, Workload, Cluster]:
    return _changes(*_kept(figures, work, cluster))


LEVERS: Final = (
    Lever("as it is", lambda figures, work, cluster: (figures, work, cluster)),
    Lever("a session's calls come to one replica", _kept),
    Lever("a turn reads a tenth of the workers", _changes),
    Lever("the two above together", _all),
    Lever("without the pause between two turns", _restless),
    Lever("twice as many replicas", _more),
    Lever("steps four times as far apart", _longer),
)


def cases(figures: Figures, work: Workload, cluster: Cluster) -> list[Case]:
    """The mixes that are told of."""
    found = []
    for name, mix in MIXES.items():
        mixed = replace(work, sandbox=mix.get("sandbox", 0.0), exclusive=mix.get("exclusive", 0.0))
        found.append(Case(name, mixed, sized(figures, mixed, cluster)))
    return found


# -- tables -------------------------------------------------------------------------------------------------------


def tables(figures: Figures, some: Sequence[Case]) -> list[Table]:
    """All of them."""
    return [
        _assumed(some[0]),
        _needed(figures, some),
        _used(figures, some),
        _walls(figures, some),
        _moved(figures, some),
        _inputs(figures),
    ]


def _assumed(case: Case) -> Table:
    work, cluster = case.work, case.cluster
    memory = f"{cluster.memory_bytes / _GIB:g} GiB"
    rows = [
        ["sessions at once", number(work.sessions)],
        ["machines", f"{cluster.machines:g} of {cluster.cores:g} cores and {memory}"],
        ["a step", f"every {work.period_s:g} s, {work.step_s:g} s long, {work.protocol}"],
        ["an episode", f"{work.steps:g} steps"],
        ["steps a second, episodes a second", f"{number(work.steps_s)}, {number(work.ends_s)}"],
        ["calls that come to any replica", f"{work.wandering:.0%}"],
        ["slots of a worker: shared, sandboxes", f"{work.shared_slots:g}, {work.sandbox_slots:g}"],
        ["free slots kept beside them", f"{work.warm:.0%}"],
        ["members of a group", f"{work.group_size:g}"],
        ["CPU of the environment's own, a step (a guess)", f"{work.step_cpu_s * 1e3:g} ms"],
        ["CPU to prepare a sandbox's task, once a group (a guess)", f"{work.prepare_cpu_s * 1e3:g} ms"],
        ["the most memory of a worker", f"{work.limit_bytes / 2**20:g} MiB"],
        ["memory of what an exclusive session runs (a guess)", f"{work.exclusive_bytes / 2**20:g} MiB"],
    ]
    return Table("What was assumed", ["what", ""], rows)


def _needed(figures: Figures, some: Sequence[Case]) -> Table:
    def row(name: str, value: Callable[[Case], str]) -> list[str]:
        return [name, *(value(case) for case in some)]

    rows = [
        row(f"gateway replicas, {FULL:.0%} busy", lambda one: _count(replicas_needed(figures, one.work, one.cluster))),
        row("machines for the workers", lambda one: number(machines_needed(figures, one.work, one.cluster))),
        row("containers", lambda one: number(one.work.containers)),
        row("starts a second, in the long run", lambda one: number(one.work.ends_s * one.work.exclusive)),
        row("s until all workers are started", lambda one: number(starting_s(figures, one.work, one.cluster))),
        row("s until all sessions are open, once they are", lambda one: number(_open(figures, one))),
        row("the first wall, at sessions", lambda one: _first(figures, one.work, one.cluster)),
    ]
    return Table("What is needed", ["what", *(case.name for case in some)], rows)


def _open(figures: Figures, case: Case) -> float:
    return opening_s(figures, case.work, case.cluster)


def _count(value: int | None) -> str:
    return NOTHING if value is None else number(value)


def _used(figures: Figures, some: Sequence[Case]) -> Table:
    found = [uses(figures, case.work, case.cluster) for case in some]
    rows = [[each[0].name, each[0].bound, *map(_share, each)] for each in zip(*found, strict=True)]
    return Table("How full each part is", ["part", "of what", *(case.name for case in some)], rows, words=2)


def _share(use: Use) -> str:
    return f"**{use.utilisation:.0%}**" if use.utilisation >= 1 else f"{use.utilisation:.1%}"


def _walls(figures: Figures, some: Sequence[Case]) -> Table:
    found = [walls(figures, case.work, case.cluster) for case in some]
    rows = [
        [number(place + 1), *(_wall(each[place]) if place < len(each) else NOTHING for each in found)]
        for place in range(SHOWN_WALLS)
    ]
    return Table("The first walls, with these replicas and machines, at sessions", ["", *(c.name for c in some)], rows)


def _wall(wall: Wall) -> str:
    return f"{wall.name}: {number(wall.sessions)}"


def _first(figures: Figures, work: Workload, cluster: Cluster) -> str:
    found = walls(figures, work, cluster)
    return _wall(found[0]) if found else NOTHING


def _moved(figures: Figures, some: Sequence[Case]) -> Table:
    rows = [[lever.name, *(_first(*lever.pull(figures, case.work, case.cluster)) for case in some)] for lever in LEVERS]
    return Table("What would move the first wall", ["change", *(case.name for case in some)], rows)


def _inputs(figures: Figures) -> Table:
    rows = []
    for name in names():
        value = getattr(figures, name)
        given = list(value.items()) if isinstance(value, Mapping) else [("", value)]
        for key, each in given:
            rows.append([f"{name} {key}".strip(), SOURCES[name] if key in ("", "ors") else "", _quantity(name, each)])
    return Table("What the model was given", ["input", "from", ""], rows, words=2)


def _quantity(name: str, value: float) -> str:
    if name == "engine_starts_s":
        return f"{number(value)} a second"
    for end, factor, unit in _SCALES:
        if name.endswith(end):
            return f"{number(value * factor)} {unit}"
    return number(value)


# -- out ----------------------------------------------------------------------------------------------------------


def markdown(some: Sequence[Table]) -> str:
    """Tables as Markdown, each under its title."""
    parts = []
    for table in some:
        head = [" | ".join(table.columns), " | ".join(["---"] * table.words + ["--:"] * _figures_of(table))]
        lines = [f"| {line} |" for line in [*head, *(" | ".join(row) for row in table.rows)]]
        parts.append("\n".join([f"### {table.title}", "", *lines]))
    return "\n\n".join(parts)


def _figures_of(table: Table) -> int:
    return len(table.columns) - table.words


def page(text: str, found: str) -> str:
    """*text* with *found* between its marks.

    Raises:
        ValueError: it has no marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there is no place for results: {BEGIN} … {END}")
    return f"{before}{begin}\n\n{found}\n\n{end}{after}"


def draw(figures: Figures, some: Sequence[Case], path: Path) -> bool:
    """Plot sessions against how full each part is; False where there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    matplotlib: Any = importlib.import_module("matplotlib")
    figure_of: Any = importlib.import_module("matplotlib.figure").Figure
    counts = [LEAST * (MOST / LEAST) ** (place / (POINTS - 1)) for place in range(POINTS)]
    with matplotlib.rc_context(STYLE):
        figure = figure_of(figsize=(WIDE[0], 1.1 * WIDE[1]), layout="constrained")
        panels = figure.subplots(1, len(some), sharey=True)
        styles = {use.name: f"C{place}" for place, use in enumerate(uses(figures, some[0].work, some[0].cluster))}
        shown: dict[str, Any] = {}
        for axes, case in zip(panels, some, strict=True):
            for name, points in _lines(figures, case, counts).items():
                place = list(styles).index(name)
                style = {"color": styles[name], "linestyle": "-" if place < 10 else "--"}
                (shown[name],) = axes.plot(counts, points, linewidth=1.2, **style)
            axes.axhline(1, color="black", linewidth=0.8)
            axes.set(xscale="log", yscale="log", ylim=(DRAWN, 10), xlabel="sessions")
            axes.minorticks_off()
            axes.set_xticks(TICKS, [f"{each:,}" for each in TICKS])
            axes.set_yticks(list(SHARES), list(SHARES.values()))
            axes.set_title(f"{case.name}, {case.cluster.replicas} replicas", loc="left", fontsize=9)
        panels[0].set_ylabel("used, in parts of what there is")
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=3, frameon=False)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata=METADATA)
    # A tenth of a point is finer than anybody sees; all digits would be half of the file.
    path.write_text(re.sub(r"(\d\.\d)\d+", r"\1", drawn.getvalue()))
    return True


def _lines(figures: Figures, case: Case, counts: Sequence[float]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for sessions in counts:
        for use in uses(figures, replace(case.work, sessions=sessions), case.cluster):
            found.setdefault(use.name, []).append(use.utilisation)
    return {name: points for name, points in found.items() if points[-1] > 10 * DRAWN}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; write the page if that is wanted."""
    parser = argparse.ArgumentParser(prog="python -m bench.capacity", description="What a cluster must have.")
    parser.add_argument("--sessions", type=float, default=100_000)
    parser.add_argument("--machines", type=float, default=100)
    parser.add_argument("--cores", type=float, default=16, help="of each machine")
    parser.add_argument("--memory-gib", type=float, default=64, help="of each machine")
    parser.add_argument("--period-s", type=float, default=5, help="from one step of a session to its next")
    parser.add_argument("--steps", type=float, default=20, help="of an episode")
    parser.add_argument("--wandering", type=float, default=1, help="share of calls that come to any replica")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="ors")
    parser.add_argument("--results", type=Path, default=results.LATEST, help="of a run of the benchmarks")
    parser.add_argument("--write-docs", action="store_true", help=f"put the tables into {PAGE.name}, and plot")
    given = parser.parse_args(arguments)
    try:
        figures = read_figures(results.read(given.results))
        work = Workload(
            sessions=given.sessions,
            period_s=given.period_s,
            steps=given.steps,
            wandering=given.wandering,
            protocol=given.protocol,
        )
        cluster = Cluster(machines=given.machines, cores=given.cores, memory_bytes=given.memory_gib * _GIB)
    except FileNotFoundError as error:
        parser.error(f"{error.filename}: there are no results; `make bench` measures and writes them")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    some = cases(figures, work, cluster)
    found = markdown(tables(figures, some))
    print(found)
    if given.write_docs:
        PAGE.write_text(page(PAGE.read_text(), found))
        if not draw(figures, some, PLOT):
            print(f"no matplotlib: {PLOT.name} stays as it is")
    return 0

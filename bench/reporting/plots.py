"""Plots of a run's results, as SVG, drawn from the JSON. The same JSON gives the same plots.

They need matplotlib, which is part of the `bench` extra.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.subjects.peers import ALL, DIRECTLY, GATEWAY

SMALL = Path(__file__).parents[1] / "plots"
"""Folder of the plots that the README shows."""
STYLE: Mapping[str, Any] = {
    "svg.hashsalt": "env-gateway",  # otherwise each run has new ids
    "svg.fonttype": "none",  # text stays text
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
METADATA: Mapping[str, None] = {"Date": None, "Creator": None, "Format": None, "Type": None}
"""No metadata that differs between days or versions."""
WIDE, SMALLER = (9.0, 5.0), (6.4, 3.8)
"""Sizes in inches."""
DRAWN_POINTS = 60
"""Number of points of a distribution in a small plot. The tail is drawn in full."""
TAIL_FROM = 0.98


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot: its file name, its title and its drawing function."""

    name: str
    title: str
    draw: Callable[[Any, bool], None]
    """Draws on axes. The second argument is True for a small plot."""


def are_possible() -> bool:
    """Return True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plots(found: Mapping[str, Any]) -> list[Plot]:
    """Return the plots for which the results *found* have figures."""
    figures = found["figures"].get("proxies")
    if figures is None:
        return []
    drawn = [Plot("throughput", "Calls a second through a proxy", _throughput(rates(figures)))]
    for callers, rows in figures["latency_quantiles_ms"].items():
        if rows:
            title = f"Latency of a call through a proxy, {callers.removeprefix('c')} callers"
            title = title.removesuffix("s") if callers == "c1" else title
            drawn.append(Plot(f"latency-{callers}", title, _distribution(rows)))
    return drawn


def rates(figures: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Return the calls a second of each proxy at each number of callers, without empty rates."""
    return {
        name: sorted((int(callers.removeprefix("c")), cell["per_s"]) for callers, cell in row.items() if cell["per_s"])
        for name, row in figures["calls"].items()
    }


def thinned(points: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Return some of *points* (share, value), evenly spread up to ``TAIL_FROM``, and all points beyond it."""
    every = max(1, len(points) // DRAWN_POINTS)
    return [point for place, point in enumerate(points) if place % every == 0 or point[0] >= TAIL_FROM]


def draw(found: Mapping[str, Any], folder: Path, *, small: bool = False) -> list[tuple[str, str]]:
    """Draw all plots of *found* into *folder*. Return their titles and file names.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    matplotlib: Any = importlib.import_module("matplotlib")
    figure_of: Any = importlib.import_module("matplotlib.figure").Figure
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    with matplotlib.rc_context(STYLE):
        for plot in plots(found):
            figure = figure_of(figsize=SMALLER if small else WIDE, layout="constrained")
            axes = figure.subplots()
            plot.draw(axes, small)
            axes.set_title(plot.title, loc="left")
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
            path = folder / f"{plot.name}.svg"
            figure.savefig(path, metadata=METADATA)
            made.append((plot.title, path.name))
    return made


def _throughput(lines: Mapping[str, Sequence[tuple[int, float]]]) -> Callable[[Any, bool], None]:
    def on(axes: Any, small: bool) -> None:
        for name, points in lines.items():
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, **_line(name))
        callers = sorted({each for points in lines.values() for each, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(callers, [f"{each:,}" for each in callers])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("callers")
        axes.set_ylabel("calls/s")

    return on


def _distribution(rows: Mapping[str, Sequence[Sequence[float]]]) -> Callable[[Any, bool], None]:
    def on(axes: Any, small: bool) -> None:
        for name, points in rows.items():
            shown = thinned(points) if small else points
            axes.plot([value for _, value in shown], [share for share, _ in shown], label=name, **_line(name))
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylim(0, 1)
        axes.set_xlabel("ms")
        axes.set_ylabel("share of the calls")

    return on


def _line(name: str) -> dict[str, Any]:
    """Return the line style of a proxy, with the same colour in all plots. The gateway's line is thick."""
    place = ALL.index(name) if name in ALL else len(ALL)
    return {
        "color": f"C{place % 10}",
        "linewidth": 2.4 if name == GATEWAY else 1.2,
        "linestyle": "--" if name == DIRECTLY else "-",
        "zorder": 3 if name == GATEWAY else 2,
    }

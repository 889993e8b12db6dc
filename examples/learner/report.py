"""The summary of many runs: tables, JSON and a plot."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from examples.learner.training import Run

BASELINE: Final = "uniform"
STYLE: Final[Mapping[str, Any]] = {
    "svg.hashsalt": "env-gateway",  # otherwise each run has new ids
    "svg.fonttype": "none",  # text stays text
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
METADATA: Final[Mapping[str, None]] = {"Date": None, "Creator": None, "Format": None, "Type": None}
SIZE: Final = (6.4, 3.8)
"""Size in inches."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and deviation over several seeds."""

    mean: float
    deviation: float
    """Standard deviation of the sample; 0 for one number."""

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.deviation:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The results of a sampler over all seeds."""

    sampler: str
    seeds: int
    rate: float
    area: Spread
    """Area under the learning curve: the mean of the held-out score over the whole run."""
    final: Spread
    informative: Spread
    """Share of groups with a learning signal."""
    gain: Spread | None
    """Gain in area over the baseline with the same seed; None for the baseline, or if there is no baseline run."""
    better: int
    """Number of seeds whose area is larger than the baseline's."""


def spread(numbers: Sequence[float]) -> Spread:
    """Return the mean and the standard deviation."""
    return Spread(fmean(numbers), stdev(numbers) if len(numbers) > 1 else 0.0)


def summaries(runs: Sequence[Run]) -> list[Summary]:
    """Return one summary for each sampler, in the order of the runs."""
    baseline = {run.seed: run.area for run in runs if run.sampler == BASELINE}
    found = []
    for sampler in dict.fromkeys(run.sampler for run in runs):
        own = [run for run in runs if run.sampler == sampler]
        gains = [run.area - baseline[run.seed] for run in own if run.seed in baseline]
        found.append(
            Summary(
                sampler=sampler,
                seeds=len(own),
                rate=own[0].rate,
                area=spread([run.area for run in own]),
                final=spread([run.final for run in own]),
                informative=spread([run.informative / run.groups for run in own]),
                gain=spread(gains) if gains and sampler != BASELINE else None,
                better=sum(gain > 0 for gain in gains),
            )
        )
    return found


def show(runs: Sequence[Run], *, title: str) -> None:
    """Print the table."""
    table = Table("sampler", "rate", "area", "final", "groups with signal", f"area over {BASELINE}", title=title)
    for one in summaries(runs):
        gain = f"{one.gain}, {one.better} of {one.seeds} seeds" if one.gain else ""
        table.add_row(one.sampler, f"{one.rate:g}", str(one.area), str(one.final), str(one.informative), gain)
    Console(width=120).print(table)


def as_json(runs: Sequence[Run], *, about: Mapping[str, Any]) -> str:
    """Return all runs and their summaries as JSON."""
    document = {
        **about,
        "summary": [_rounded(asdict(one)) for one in summaries(runs)],
        "runs": [_rounded({**asdict(run), "area": run.area}) for run in runs],
    }
    return json.dumps(document, indent=1) + "\n"


def are_plots_possible() -> bool:
    """Return True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(runs: Sequence[Run], path: Path, *, title: str) -> bool:
    """Draw the mean of each sampler's curves with a band of one deviation. Return False without matplotlib."""
    if not are_plots_possible():
        return False
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("svg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    with matplotlib.rc_context(dict(STYLE)):
        figure, axes = pyplot.subplots(figsize=SIZE, layout="constrained")
        for sampler in dict.fromkeys(run.sampler for run in runs):
            curves = [run.curve for run in runs if run.sampler == sampler]
            episodes = [point[0] for point in curves[0]]
            bands = [spread([curve[at][1] for curve in curves]) for at in range(len(episodes))]
            (line,) = axes.plot(episodes, [band.mean for band in bands], label=f"{sampler} ({len(curves)} seeds)")
            low = [band.mean - band.deviation for band in bands]
            high = [band.mean + band.deviation for band in bands]
            axes.fill_between(episodes, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        axes.set(title=title, xlabel="training episodes", ylabel="mean reward on held-out tasks", ylim=(0, 1))
        axes.legend(frameon=False)
        figure.savefig(path, format="svg", metadata=dict(METADATA))
        pyplot.close(figure)
    return True


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value

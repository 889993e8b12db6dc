"""The results of ``make trainers`` on the page docs/trainers.md: a table and a plot, made from docs/trainers.json."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tests.pages import PROJECT

PAGE: Final = PROJECT / "docs" / "trainers.md"
RESULTS: Final = PROJECT / "docs" / "trainers.json"
PLOT: Final = PROJECT / "docs" / "trainers.svg"
BEGIN: Final = "<!-- results: made by `make trainers ARGS=--record` -->"
END: Final = "<!-- end of results -->"
LAST: Final = 10
"""Number of steps at the end of a curve whose mean the table shows."""


def table(results: Mapping[str, Any]) -> str:
    """Return the part of the page that shows *results*, the content of docs/trainers.json."""
    rows = [
        f"| {run['trainer']} | {run['protocol']} | {run['environments']} | {shown(run['curve'])} "
        f"| {run['opened']:,} | {run['closed']:,} + {run['expired']:,} | {run['failed']} |"
        for run in results["runs"]
    ]
    versions = {name: version for run in results["runs"] for name, version in run["versions"].items()}
    return "\n".join(
        (
            "| trainer | protocol | environment | rewards | sessions | closed + expired | failed |",
            "|---|---|---|---|--:|--:|--:|",
            *rows,
            "",
            f"Run on {results['date']} with {_list(versions)}.",
        )
    )


def shown(curve: Sequence[float]) -> str:
    """Return a curve in a few words: the means of its first and last steps, or the rewards of a scripted run."""
    if len(curve) <= 2:
        return ", ".join(f"{reward:.1f}" for reward in sorted(curve, reverse=True)) + " (scripted)"
    first, last = curve[:3], curve[-LAST:]
    return f"{sum(first) / len(first):.2f} → {sum(last) / len(last):.2f} in {len(curve)} steps"


def _list(versions: Mapping[str, str]) -> str:
    named = [f"`{name}` {version}" for name, version in sorted(versions.items())]
    return f"{', '.join(named[:-1])} and {named[-1]}"


def parts(page: str) -> tuple[str, str, str]:
    """Return *page* before the results, the results, and the rest."""
    before, begin, rest = page.partition(BEGIN + "\n")
    shown, end, after = rest.partition("\n" + END)
    assert begin, f"{PAGE.name} lacks {BEGIN}"
    assert end, f"{PAGE.name} lacks {END}"
    return before + begin, shown, end + after


def record() -> None:
    """Put the results of docs/trainers.json into the page, and draw the plot."""
    results = json.loads(RESULTS.read_text())
    before, _, after = parts(PAGE.read_text())
    PAGE.write_text(before + table(results) + after)
    _draw(results)


def _draw(results: Mapping[str, Any]) -> None:
    matplotlib = importlib.import_module("matplotlib")  # `make trainers` installs it
    figures = importlib.import_module("matplotlib.figure")
    curves = [run for run in results["runs"] if len(run["curve"]) > 2]
    columns = 3
    figure = figures.Figure(figsize=(9, 2.1 * -(-len(curves) // columns)), layout="constrained")
    axes = figure.subplots(-(-len(curves) // columns), columns, sharey=True, squeeze=False)
    for place, run in zip(axes.flat, curves, strict=False):
        place.plot(range(1, len(run["curve"]) + 1), run["curve"], linewidth=1.4)
        place.set_title(f"{run['trainer']}, {run['protocol']}\n{run['environments'].replace('`', '')}", fontsize=8)
        place.set_ylim(-0.05, 1.05)
        place.grid(alpha=0.3)
        place.tick_params(labelsize=7)
        place.locator_params(axis="x", integer=True)
    for place in axes.flat[len(curves) :]:
        place.set_visible(False)
    figure.supxlabel("optimizer step", fontsize=8)
    figure.supylabel("mean reward", fontsize=8)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "trainers"}):  # text stays text
        figure.savefig(PLOT, metadata={"Date": None})

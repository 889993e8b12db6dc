"""A run's results: as JSON for programs, as tables for people, and as Markdown between two marks of the README."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from bench.reporting.report import NOTHING, Report, Table, number

LATEST = Path(__file__).parents[1] / "results" / "latest.json"
README = Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- results: made by `python -m bench.run --write-readme` -->"
END = "<!-- end of results -->"
OF_THE_MACHINE = ("machine", "versions")
"""Facts that must be equal for all runs whose results are combined."""


def results(reports: Sequence[Report], facts: Mapping[str, Any], *, remarks: Sequence[str] = ()) -> dict[str, Any]:
    """Combine the findings of a run, ratios first. *facts* describe the run, *remarks* are warnings about all of it."""
    run = {name: value for name, value in facts.items() if name not in OF_THE_MACHINE}
    return {
        "goals": [
            {"part": report.name} | asdict(goal) | {"is_met": goal.is_met}
            for report in reports
            for goal in report.goals
        ],
        "runs": [{"parts": [report.name for report in reports], "remarks": list(remarks)} | run],
        "errors": {report.name: report.errors for report in reports},
        "not_comparable": {report.name: list(report.not_comparable) for report in reports},
        **{name: facts[name] for name in OF_THE_MACHINE},
        "figures": {report.name: report.figures for report in reports},
        "tables": [{"part": report.name} | asdict(table) for report in reports for table in report.tables],
    }


def merged(old: Mapping[str, Any], new: Mapping[str, Any], *, order: Sequence[str]) -> dict[str, Any]:
    """Return the results *new*, with the parts of *old* that *new* lacks, in *order*.

    Raises:
        ValueError: The runs had different machines or versions.
    """
    for name in OF_THE_MACHINE:
        if _same(old[name]) != _same(new[name]):
            raise ValueError(f"the results that are to be kept were made with another {name.removesuffix('s')}")
    replaced = set(new["errors"])
    found = dict(new)
    for name in ("goals", "tables"):
        rows = [*(row for row in old[name] if row["part"] not in replaced), *new[name]]
        found[name] = sorted(rows, key=lambda row: order.index(row["part"]))
    for name in ("errors", "not_comparable", "figures"):
        both = {**old[name], **new[name]}
        found[name] = {str(part): both[part] for part in order if part in both}
    kept = [run | {"parts": [part for part in run["parts"] if part not in replaced]} for run in old["runs"]]
    found["runs"] = [*(run for run in kept if run["parts"]), *new["runs"]]
    return found


def _same(value: Any) -> Any:
    """Return the facts that must be equal in two combined runs. The machine's load may differ."""
    return {key: each for key, each in value.items() if key != "load_average"} if isinstance(value, Mapping) else value


def write(found: Mapping[str, Any], path: Path = LATEST) -> None:
    """Write *found* as JSON. JSON has no infinity, so null replaces it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(_finite(found), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    draft.replace(path)


def read(path: Path = LATEST) -> dict[str, Any]:
    """Read a file that `write` wrote.

    Raises:
        OSError: There is no such file.
    """
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def show(found: Mapping[str, Any], console: Console) -> None:
    """Print the tables."""
    show_tables([goal_table(found["goals"]), *_tables(found)], console)
    for sentence in _remarks(found):
        console.print(f"- {sentence}", highlight=False)


def show_tables(some: Iterable[Table], console: Console) -> None:
    """Print tables as boxes."""
    for table in some:
        shown = RichTable(title=table.title, title_justify="left")
        for position, column in enumerate(table.columns):
            shown.add_column(column, justify="left" if position < table.words else "right")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)


def goal_table(goals: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of goals and values reached. Figures without a goal have no verdict."""
    rows = []
    for goal in goals:
        value = math.inf if goal["value"] is None else goal["value"]
        bound = f"{'≥' if goal['at_least'] else '≤'} {goal['bound']:g} {goal['unit']}".rstrip()
        verdict = "yes" if goal["is_met"] else "no"
        shown = (bound, verdict) if goal["is_goal"] else (NOTHING, NOTHING)
        rows.append([goal["id"], goal["what"], f"{number(value)} {goal['unit']}".rstrip(), *shown])
    return Table("Goals", ["id", "what", "reached", "goal", "met"], rows, words=2)


def markdown(found: Mapping[str, Any], pictures: Sequence[tuple[str, str]] = ()) -> str:
    """Return the tables of `show` for the README. The *pictures*, as titles and paths, come before the tables."""
    parts = [_provenance(found), *(f"![{title}]({path})" for title, path in pictures)]
    parts.append(markdown_tables([goal_table(found["goals"]), *_tables(found)]))
    parts.append("\n".join(f"* {sentence}" for sentence in _remarks(found)))
    return "\n\n".join(part for part in parts if part)


def markdown_table(table: Table) -> str:
    """Return *table* in Markdown, without its title."""
    rule = ["---" if position < table.words else "--:" for position in range(len(table.columns))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (table.columns, rule, *table.rows))


def markdown_tables(some: Sequence[Table]) -> str:
    """Return tables in Markdown, each below its title."""
    return "\n\n".join(f"**{table.title}**\n\n{markdown_table(table)}" for table in some)


def between_marks(text: str, new: str, *, begin: str = BEGIN) -> str:
    """Put *new* between the marks of *text*, *begin* and `END`.

    Raises:
        ValueError: A mark is missing, repeated or out of order.
    """
    if text.count(begin) != 1 or text.count(END) != 1 or text.index(begin) > text.index(END):
        raise ValueError(f"expected {begin!r} and, after it, {END!r}, once each")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{new}\n\n{END}{rest.partition(END)[2]}"


def write_readme(
    found: Mapping[str, Any],
    path: Path = README,
    *,
    pictures: Sequence[tuple[str, str]] = (),
) -> None:
    """Replace the results in the README of the benchmarks.

    *pictures* are titles, and paths relative to *path*'s folder.
    """
    path.write_text(between_marks(path.read_text(), markdown(found, pictures)))


def _tables(found: Mapping[str, Any]) -> Iterator[Table]:
    for table in found["tables"]:
        yield Table(**{name: value for name, value in table.items() if name != "part"})


def _provenance(found: Mapping[str, Any]) -> str:
    machine, made_of = found["machine"], found["versions"]
    packages = ", ".join(f"{name} {made_of[name]}" for name in ("ors-sdk", "openreward", "uvicorn", "uvloop"))
    made_on = (
        f"{machine['cpus']} CPUs ({machine['cpu']}), {machine['memory']}, Linux {machine['kernel']}, "
        f"Python {machine['python']}; {packages}."
    )
    return " ".join([made_on, *(_told_of(run) for run in found["runs"])])


def _told_of(run: Mapping[str, Any]) -> str:
    commit = (run["source"]["commit"] or "no commit yet")[:12]
    changes = ", with uncommitted changes" if run["source"]["has_changes"] else ""
    parts = ", ".join(f"`{part}`" for part in run["parts"])
    return (
        f"{parts}: {run['taken_at']}, {run['size']} run of {run['seconds']:.0f} s at {commit}{changes}; load average "
        f"{run['load_average'][0]} before and {run['load_average_after'][0]} after."
    )


def _remarks(found: Mapping[str, Any]) -> Iterator[str]:
    wrong = {name: count for name, count in found["errors"].items() if count}
    yield f"Failed or wrongly answered requests: {wrong or 'none'}."
    for run in found["runs"]:
        yield from run["remarks"]
    for sentences in found["not_comparable"].values():
        yield from sentences


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

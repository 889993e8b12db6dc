"""The commands ``gateway top`` and ``gateway logs``, which watch a running gateway and its workers."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.live import Live
from rich.table import Table

from gateway.cli.admin_client import (
    EXIT_REFUSED,
    LOCALHOST,
    AsJson,
    Key,
    Url,
    ask,
    ask_over,
    client,
    fetch,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    import httpx

FAILED: Final = frozenset(("worker_lost", "out_of_memory", "timeout", "author_fault", "session_failed", "failed"))
"""Outcomes of calls that are errors, and no doing of agent or trainer."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """What one replica has counted since its start, by environment."""

    at: float
    opened: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    seconds: Mapping[str, Counter[float]] = field(default_factory=lambda: defaultdict(Counter))
    """Environment → upper bound of a duration → number of calls that took at most that long."""


def top(
    every_s: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look for one interval, print the table, and end.")] = False,
    url: Url = LOCALHOST,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Show slots, queues, openings, steps and errors of each environment; Ctrl-C ends it.

    Slots and queues are those of all replicas. Rates and durations are those of the replica that answers.

    \b
    Examples:
      gateway top
      gateway top --once --json
    """
    with client(url, key) as connection:
        before = _sample(connection)
        if as_json or once:
            while True:
                time.sleep(every_s)
                before, rows = _look(connection, before)
                if as_json:
                    print_json({"at": round(before.at, 3), "environments": rows})
                else:
                    print_table(_table(rows))
                if once:
                    return
        with Live(_table([]), auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(every_s)
                before, rows = _look(connection, before)
                live.update(_table(rows), refresh=True)


def logs(
    name: Annotated[str, typer.Argument(metavar="ENVIRONMENT|WORKER", help="A worker's id, or all of an environment.")],
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=100_000, help="Last lines of each worker.")] = 100,
    url: Url = LOCALHOST,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Print the last lines that workers wrote.

    \b
    Examples:
      gateway logs coding
      gateway logs 3f2a9c1b7d5e --lines 1000
    """
    workers = ask(url, key, "GET", "/admin/v1/workers")["workers"]
    found = [worker for worker in workers if worker["id"] == name] or [
        worker for worker in workers if worker["environment"] == name
    ]
    if not found:
        names = ", ".join(sorted({worker["environment"] for worker in workers})) or "none"
        typer.echo(f"{name}: there is no such worker, and no worker of such an environment; running: {names}", err=True)
        raise typer.Exit(EXIT_REFUSED)
    for worker in found:
        log = ask(url, key, "GET", f"/admin/v1/workers/{worker['id']}/log", params={"lines": str(lines)})["log"]
        if as_json:
            print_json({"worker": worker["id"], "environment": worker["environment"], "log": log})
            continue
        if len(found) > 1:
            typer.echo(f"== worker {worker['id']} of {worker['environment']} ({worker['state']})")
        typer.echo(log, nl=not log.endswith("\n"))


def _look(connection: httpx.Client, before: _Sample) -> tuple[_Sample, list[dict[str, Any]]]:
    """Return a new sample, and each environment's row since the sample *before*."""
    pool = ask_over(connection, "GET", "/admin/v1/workers", kind=dict)
    now = _sample(connection)
    names = {worker["environment"] for worker in pool["workers"]} | pool["waiting"].keys() | now.opened.keys()
    return now, [_row(name, pool, before, now) for name in sorted(names)]


def _row(name: str, pool: Mapping[str, Any], before: _Sample, now: _Sample) -> dict[str, Any]:
    workers = [worker for worker in pool["workers"] if worker["environment"] == name]
    ready = [worker for worker in workers if worker["state"] == "ready"]
    past_s = max(1e-9, now.at - before.at)
    counts = now.seconds[name] - before.seconds[name]
    return {
        "environment": name,
        "workers": len(workers),
        "ready": len(ready),
        "used": sum(worker["used"] for worker in workers),
        "slots": sum(worker["slots"] for worker in ready),
        "waiting": pool["waiting"].get(name, 0),
        "opens_per_s": round((now.opened[name] - before.opened[name]) / past_s, 2),
        "steps_per_s": round((now.calls[name] - before.calls[name]) / past_s, 2),
        "p50_s": _quantile(counts, 0.5),
        "p99_s": _quantile(counts, 0.99),
        "errors": now.errors[name],
    }


def _sample(connection: httpx.Client) -> _Sample:
    from prometheus_client.parser import text_string_to_metric_families

    text = fetch(connection, "/metrics").decode()
    sample = _Sample(time.monotonic())
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            name, value = one.labels.get("environment", ""), int(one.value)
            if one.name == "gateway_sessions_opened_total":
                sample.opened[name] += value
            elif one.name == "gateway_calls_total":
                sample.calls[name] += value
                sample.errors[name] += value if one.labels["outcome"] in FAILED else 0
            elif one.name == "gateway_call_seconds_bucket":
                sample.seconds[name][float(one.labels["le"])] += value
    return sample


def _quantile(counts: Mapping[float, int], share: float) -> float | None:
    """Return the upper bound of the bucket with the quantile *share*; None: there were no calls, or it has no bound."""
    total = max(counts.values(), default=0)
    bounds = [bound for bound, count in sorted(counts.items()) if count >= share * total]
    return bounds[0] if total and bounds and bounds[0] != float("inf") else None


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("environment", "workers", "slots", "waiting", "opens/s", "steps/s", "p50", "p99", "errors")
    for row in rows:
        times = ("" if row[name] is None else f"≤ {row[name]:g} s" for name in ("p50_s", "p99_s"))
        rates = (f"{row['opens_per_s']:g}", f"{row['steps_per_s']:g}")
        pool = (f"{row['ready']}/{row['workers']}", f"{row['used']}/{row['slots']}", str(row["waiting"]))
        table.add_row(row["environment"], *pool, *rates, *times, str(row["errors"]))
    return table

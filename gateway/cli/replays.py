"""The commands ``gateway replay`` and ``gateway audit``, which let a running gateway play recorded episodes again."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gateway.cli.admin_client import (
    EXIT_FOUND,
    LOCALHOST,
    PAGE,
    AsJson,
    Key,
    Url,
    ask_over,
    client,
    counted,
    listed_episodes,
    print_json,
    print_table,
    requested,
)
from gateway.core.errors import ConfigError
from gateway.tasks.curricula.flaky import interval

if TYPE_CHECKING:
    import httpx

REPLAY_S: Final = 1_860.0
"""Seconds to wait for a replay, which the gateway itself ends earlier."""
THRESHOLD: Final = 0.01
"""Rate of differing replays above which an audit marks a task. A task that fails once in 60 replays is above it."""

Repeat = Annotated[int, typer.Option("--repeat", "-r", min=1, max=10_000, help="Replay each episode this often.")]
OtherImage = Annotated[
    bool, typer.Option("--other-image", help="Replay also if the environment has another image or scorer now.")
]
Outcome = tuple[str, dict[str, Any]]
"""``same``, ``different`` or ``skipped``, and the gateway's report or refusal."""


def replay(
    episodes: Annotated[
        list[str],
        typer.Argument(metavar="EPISODE...|FILE", help="Ids or session names, or files of `gateway sessions export`."),
    ],
    url: Url = LOCALHOST,
    key: Key = "",
    repeat: Repeat = 1,
    other_image: OtherImage = False,
    as_json: AsJson = False,
) -> None:
    """Play recorded episodes again, and compare observations and rewards.

    The exit code is 0 if all replays gave the same, and 3 if one differed or could not be played.

    \b
    Examples:
      gateway replay 3f2a9c...
      gateway replay episodes.jsonl --repeat 10
    """
    requests = [one for name in episodes for one in _requests(name) for _ in range(repeat)]
    query = {"other_image": "true"} if other_image else {}
    outcomes = []
    with client(url, key, timeout_s=REPLAY_S) as connection:
        for path, document in requests:
            outcome = _played(connection, path, document, query, wait_s=0.0)
            outcomes.append(outcome)
            if as_json:
                print_json({"result": outcome[0], **outcome[1]})
            else:
                _print_report(outcome)
    if any(result != "same" for result, _ in outcomes):
        raise typer.Exit(EXIT_FOUND)


def audit(
    sample: Annotated[
        int, typer.Option("--sample", "-n", min=1, max=10_000, help="Number of episodes to replay.")
    ] = 50,
    environment: Annotated[str, typer.Option("--environment", "-e", help="Only episodes of this environment.")] = "",
    task: Annotated[str, typer.Option("--task", help="Only episodes on this task.")] = "",
    repeat: Repeat = 1,
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="Mark tasks with a higher rate of differing replays.")
    ] = THRESHOLD,
    mark: Annotated[
        bool, typer.Option("--mark/--no-mark", help="Mark flaky tasks, so that curricula skip them.")
    ] = True,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1, max=64, help="Replays at a time.")] = 4,
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for an idle slot.")] = 600.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the random choice of episodes.")] = None,
    url: Url = LOCALHOST,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Replay a random sample of recent episodes in idle slots, and report how often each task differs.

    A replay waits while trainers wait for a slot of its environment. The exit code is 3 if a task is flaky.

    \b
    Examples:
      gateway audit --sample 50
      gateway audit --environment coding --sample 20 --repeat 5
      gateway audit --task train/17 --sample 1 --repeat 60
    """
    with client(url, key, timeout_s=REPLAY_S) as connection:
        wanted = {"environment": environment, "task": task, "reason": "deleted"}
        query = {name: value for name, value in wanted.items() if value}
        recent = listed_episodes(connection, query, max(PAGE, 4 * sample))
        known = [one for one in recent if one["outcome"] in ("finished", "stopped")]
        if not known:
            raise ConfigError("no episode that a trainer played to its end is recorded for this choice")
        chosen = random.Random(seed).sample(known, min(sample, len(known)))
        found = _audited(connection, [one for one in chosen for _ in range(repeat)], concurrency, wait_s)
        rows = [_row(place, outcomes) for place, outcomes in sorted(found.items())]
        for row in rows:
            row["is_flaky"] = row["rate"] is not None and row["rate"] > threshold
            if row["is_flaky"] and mark:
                body = {"replays": row["replays"], "differing": row["differing"]}
                path = f"/admin/v1/flaky/{row['environment']}/{row['task']}"
                ask_over(connection, "PUT", path, kind=dict, json=body)
                row["is_marked"] = True
    if as_json:
        print_json({"episodes": len(chosen), "tasks": rows})
    else:
        _print_audit(rows, len(chosen))
    if any(row["is_flaky"] for row in rows):
        raise typer.Exit(EXIT_FOUND)


def _requests(name: str) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield path and body of the replays that an argument asks for. Raises ``ConfigError`` if a file is not valid."""
    file = Path(name)
    if not file.is_file():
        if "/" in name or file.suffix in (".json", ".jsonl"):
            raise ConfigError(f"{name}: there is no such file")
        yield f"/admin/v1/episodes/{name}/replay", None
        return
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if line.strip():
            try:
                document = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{name}:{number}: not JSON: {error}; a file has one episode a line") from None
            yield "/admin/v1/replays", document


def _played(
    connection: httpx.Client, path: str, document: dict[str, Any] | None, query: Mapping[str, str], *, wait_s: float
) -> Outcome:
    """Request a replay. While no slot is idle, ask again for *wait_s* seconds."""
    deadline = time.monotonic() + wait_s
    while True:
        status, body, retry_s = requested(connection, "POST", path, params=query, json=document)
        if status == 200:
            return ("same" if body["is_same"] else "different"), body
        if status != 503 or time.monotonic() + retry_s > deadline:
            return "skipped", {"status": status, "episode": path.split("/")[-2] if document is None else None, **body}
        time.sleep(retry_s)


def _audited(
    connection: httpx.Client, episodes: Sequence[Mapping[str, Any]], concurrency: int, wait_s: float
) -> dict[tuple[str, str], list[Outcome]]:
    """Replay *episodes*. Return the outcomes by environment and task."""
    found: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    with (
        ThreadPoolExecutor(concurrency) as threads,
        Progress(
            console=Console(stderr=True), transient=True, disable=not Console(stderr=True).is_terminal
        ) as progress,
    ):
        bar = progress.add_task("replays", total=len(episodes))
        waiting = {
            threads.submit(
                _played, connection, f"/admin/v1/episodes/{one['id']}/replay", None, {"idle": "true"}, wait_s=wait_s
            ): (str(one["environment"]), str(one["task"]))
            for one in episodes
        }
        for done in as_completed(waiting):
            found[waiting[done]].append(done.result())
            progress.advance(bar)
    return found


def _row(place: tuple[str, str], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return what an audit found of one task."""
    replays = [report for result, report in outcomes if result != "skipped"]
    differing = [report for report in replays if not report["is_same"]]
    skipped = [report for result, report in outcomes if result == "skipped"]
    return {
        "environment": place[0],
        "task": place[1],
        "replays": len(replays),
        "differing": len(differing),
        "rate": len(differing) / len(replays) if replays else None,
        "interval": interval(len(differing), len(replays)) if replays else None,
        "episodes": sorted({report["episode"] for report in differing}),
        "skipped": sorted({str(report.get("detail", "")) for report in skipped}),
        "is_marked": False,
    }


def _print_report(outcome: Outcome) -> None:
    result, report = outcome
    if result == "skipped":
        typer.echo(f"{report['episode'] or 'episode'}: not replayed: {report.get('detail', report['status'])}")
        return
    rewards = report["reward"]
    typer.echo(
        f"{report['episode']}: {result}, {counted(report['steps'], 'step')}, "
        f"reward {rewards['recorded']} recorded, {rewards['replayed']} replayed"
    )
    if report["stopped"] is not None:
        stopped = report["stopped"]
        typer.echo(f"  not compared from step {stopped['number']} on: it ended as {stopped['outcome']}")
    for one in report["differences"]:
        where = "episode" if one["number"] is None else f"step {one['number']}"
        typer.echo(f"  {where}: {one['field']}: recorded {one['recorded']!r}, replayed {one['replayed']!r}")


def _print_audit(rows: Sequence[Mapping[str, Any]], episodes: int) -> None:
    table = Table(
        *("environment", "task", "replays", "differing", "rate", "95 % interval", "result"),
        title=f"{counted(episodes, 'episode')} of {counted(len(rows), 'task')}",
    )
    for row in rows:
        if row["rate"] is None:
            table.add_row(
                row["environment"], row["task"], "0", "", "", "", f"not replayed: {'; '.join(row['skipped'])}"
            )
            continue
        low, high = row["interval"]
        result = ("flaky, marked" if row["is_marked"] else "flaky") if row["is_flaky"] else "steady"
        numbers = (str(row["replays"]), str(row["differing"]), f"{row['rate']:.1%}", f"{low:.1%} to {high:.1%}")
        table.add_row(row["environment"], row["task"], *numbers, result)
    print_table(table)

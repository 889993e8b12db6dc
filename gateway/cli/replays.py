"""The commands ``gateway replay`` and ``gateway audit``, which let a running gateway play recorded episodes again."""

from __future__ import annotations

import difflib
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import cycle, islice
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
from gateway.core.task_name import TaskName
from gateway.tasks.curricula.flaky import EPISODES_KEPT, MIN_REPLAYS, Verdict, verdict

if TYPE_CHECKING:
    import httpx

REPLAY_S: Final = 1_860.0
"""Seconds to wait for a replay, which the gateway itself ends earlier."""
THRESHOLD: Final = 0.01
"""Rate of replays with another reward or end above which a task is flaky."""
DIFF_LINES: Final = 20
"""Maximum number of lines in the diff of a text."""
DIGEST_CHARS: Final = 12
"""Characters of a task's digest in the table."""

Repeat = Annotated[int, typer.Option("--repeat", "-r", min=1, max=10_000, help="Replay each episode this often.")]
OtherImage = Annotated[
    bool, typer.Option("--other-image", help="Replay also if the environment has another image or scorer now.")
]
Outcome = tuple[str, dict[str, Any]]
"""``same``, ``different`` or ``skipped``, and the gateway's report or refusal."""
Place = tuple[str, str, str]
"""Environment, task and digest of the task."""


def replay(
    episodes: Annotated[
        list[str],
        typer.Argument(metavar="EPISODE...|FILE", help="Ids or session names, or files of `gateway sessions export`."),
    ],
    url: Url = LOCALHOST,
    key: Key = "",
    repeat: Repeat = 1,
    other_image: OtherImage = False,
    texts: Annotated[bool, typer.Option("--texts", help="Also a text that differs makes a replay different.")] = False,
    as_json: AsJson = False,
) -> None:
    """Play recorded episodes again, and compare rewards and ends. Texts that differ are shown below.

    The exit code is 0 if all replays gave the same rewards and ends, and 3 if one differed or could not be played.

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
            outcome = _played(connection, path, document, query, wait_s=0.0, texts=texts)
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
    confirm: Annotated[
        int,
        typer.Option("--confirm", min=0, max=10_000, help="Further replays of a task that differed and is undecided."),
    ] = MIN_REPLAYS,
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="A task is flaky if the rate of differing replays is above.")
    ] = THRESHOLD,
    mark: Annotated[bool, typer.Option("--mark", help="Mark flaky tasks, so that curricula skip them.")] = False,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1, max=64, help="Replays at a time.")] = 4,
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for an idle slot.")] = 600.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the random choice of episodes.")] = None,
    url: Url = LOCALHOST,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Replay a random sample of recent episodes in idle slots, and report how often rewards or ends of a task differ.

    A replay waits while trainers wait for a slot of its environment. The gateway adds the counts to earlier audits of
    the same task and scorer. A task is flaky if, in at least 20 replays, the 95 % interval of the rate is above the
    threshold. Texts that differ are counted apart. The exit code is 3 if a task is flaky.

    \b
    Examples:
      gateway audit --sample 50
      gateway audit --environment coding --sample 20 --repeat 5 --mark
      gateway audit --task train/17 --sample 1 --repeat 62
    """
    with client(url, key, timeout_s=REPLAY_S) as connection:
        wanted = {"environment": environment, "task": task, "reason": "deleted"}
        query = {name: value for name, value in wanted.items() if value}
        recent = listed_episodes(connection, query, max(PAGE, 4 * sample))
        known = [one for one in recent if one["outcome"] in ("finished", "stopped")]
        if not known:
            raise ConfigError("no episode that a trainer played to its end is recorded for this choice")
        chosen = random.Random(seed).sample(known, min(sample, len(known)))
        found = _audited(connection, [(one["id"], _place(one)) for one in chosen] * repeat, concurrency, wait_s)
        totals = {place: _added(connection, place, outcomes) for place, outcomes in found.items()}
        further = [
            (id, place)
            for place, outcomes in found.items()
            if _verdict(totals[place], threshold) == Verdict.UNDECIDED
            for id in islice(cycle([report["episode"] for report in _differing(outcomes)]), confirm)
        ]
        for place, outcomes in _audited(connection, further, concurrency, wait_s).items():
            totals[place] = _added(connection, place, outcomes) or totals[place]
            found[place] += outcomes
        rows = [_row(place, outcomes, totals[place], threshold) for place, outcomes in sorted(found.items())]
        for row in rows:
            if mark and row["verdict"] == Verdict.FLAKY:
                row["is_marked"] = _mark(connection, row)
    if as_json:
        print_json({"episodes": len(chosen), "tasks": rows})
    else:
        _print_audit(rows, len(chosen))
    if any(row["verdict"] == Verdict.FLAKY for row in rows):
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
    connection: httpx.Client,
    path: str,
    document: dict[str, Any] | None,
    query: Mapping[str, str],
    *,
    wait_s: float,
    texts: bool = False,
) -> Outcome:
    """Request a replay. While no slot is idle, ask again for *wait_s* seconds. With *texts*, texts count too."""
    deadline = time.monotonic() + wait_s
    while True:
        status, body, retry_s = requested(connection, "POST", path, params=query, json=document)
        if status == 200:
            is_same = body["is_same"] and not (texts and "text" in body["differs_in"])
            return ("same" if is_same else "different"), body
        if status != 503 or time.monotonic() + retry_s > deadline:
            return "skipped", {"status": status, "episode": path.split("/")[-2] if document is None else None, **body}
        time.sleep(retry_s)


# -- audits ---------------------------------------------------------------------------------------------------------


def _place(episode: Mapping[str, Any]) -> Place:
    return str(episode["environment"]), str(episode["task"]), str(episode["task_digest"] or "")


def _audited(
    connection: httpx.Client, episodes: Sequence[tuple[str, Place]], concurrency: int, wait_s: float
) -> dict[Place, list[Outcome]]:
    """Replay *episodes*, each an id and the place of its task. Return the outcomes by place."""
    found: dict[Place, list[Outcome]] = defaultdict(list)
    with (
        ThreadPoolExecutor(concurrency) as threads,
        Progress(
            console=Console(stderr=True), transient=True, disable=not Console(stderr=True).is_terminal
        ) as progress,
    ):
        bar = progress.add_task("replays", total=len(episodes))
        waiting = {
            threads.submit(
                _played, connection, f"/admin/v1/episodes/{id}/replay", None, {"idle": "true"}, wait_s=wait_s
            ): place
            for id, place in episodes
        }
        for done in as_completed(waiting):
            found[waiting[done]].append(done.result())
            progress.advance(bar)
    return found


def _reports(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [report for result, report in outcomes if result != "skipped"]


def _differing(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [report for report in _reports(outcomes) if not report["is_same"]]


def _added(connection: httpx.Client, place: Place, outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """Add the counts of *outcomes* to those of earlier audits. Return the sums; None: there was no replay."""
    if not (reports := _reports(outcomes)):
        return None
    rewards = {report["episode"]: report["reward"] for report in _differing(outcomes)}
    body = {
        "replays": len(reports),
        "differing": len(_differing(outcomes)),
        "scorer": reports[-1]["scorer"],
        "episodes": [{"episode": id, **reward} for id, reward in islice(rewards.items(), EPISODES_KEPT)],
    }
    path = _route(*place)
    found: dict[str, Any] = ask_over(connection, "POST", path, kind=dict, json=body)
    return found


def _route(environment: str, task: str, digest: str) -> str:
    """Return the route of an audited task. The name with its digest also means a former line of the task."""
    return f"/admin/v1/flaky/{environment}/{TaskName.of_label(task, digest).key}"


def _verdict(total: Mapping[str, Any] | None, threshold: float) -> Verdict | None:
    return None if total is None else verdict(total["differing"], total["replays"], threshold)


def _mark(connection: httpx.Client, row: Mapping[str, Any]) -> bool:
    """Mark the task of *row*. A refusal, such as too many marks, is printed and does not end the audit."""
    status, body, _ = requested(connection, "PUT", _route(row["environment"], row["task"], row["task_digest"]))
    if status != 200:
        typer.echo(f"{row['environment']} {row['task']} is not marked: {body.get('detail', status)}", err=True)
    return status == 200


def _row(
    place: Place, outcomes: Sequence[Outcome], total: Mapping[str, Any] | None, threshold: float
) -> dict[str, Any]:
    """Return what this audit and, in *total*, all audits found of one task."""
    reports = _reports(outcomes)
    return {
        "environment": place[0],
        "task": place[1],
        "task_digest": place[2],
        "replays": len(reports),
        "differing": len(_differing(outcomes)),
        "texts_differing": sum("text" in report["differs_in"] for report in reports),
        "total": total and {name: total[name] for name in ("replays", "differing")},
        "rate": total and total["rate"],
        "interval": total and total["interval"],
        "verdict": _verdict(total, threshold),
        "is_marked": total is not None and total["marked_at"] is not None,
        "episodes": total["episodes"] if total else [],
        "skipped": [str(report.get("detail", report["status"])) for result, report in outcomes if result == "skipped"],
    }


# -- output ---------------------------------------------------------------------------------------------------------


def _print_report(outcome: Outcome) -> None:
    result, report = outcome
    if result == "skipped":
        typer.echo(f"{report['episode'] or 'episode'}: not replayed: {report.get('detail', report['status'])}")
        return
    rewards = report["reward"]
    kinds = {"reward": "rewards", "end": "ends", "text": "texts"}
    differ = " and ".join(kinds[kind] for kind in report["differs_in"])
    typer.echo(
        f"{report['episode']}: {result}, {counted(report['steps'], 'step')}, reward {rewards['recorded']} recorded, "
        f"{rewards['replayed']} replayed{f'; {differ} differ' if differ else ''}"
    )
    if report["stopped"] is not None:
        stopped = report["stopped"]
        typer.echo(f"  not compared from step {stopped['number']} on: it ended as {stopped['outcome']}")
    for one in report["differences"]:
        where = "episode" if one["number"] is None else f"step {one['number']}"
        recorded, replayed = one["recorded"], one["replayed"]
        if one["kind"] == "text" and isinstance(recorded, str) and isinstance(replayed, str):
            typer.echo(f"  {where}: {one['field']}:")
            for line in _diff(recorded, replayed):
                typer.echo(f"    {line}")
        else:
            typer.echo(f"  {where}: {one['field']}: recorded {recorded!r}, replayed {replayed!r}")


def _diff(recorded: str, replayed: str) -> Iterator[str]:
    """Yield the lines of a short unified diff of two texts that differ."""
    lines = difflib.unified_diff(recorded.split("\n"), replayed.split("\n"), "recorded", "replayed", n=1, lineterm="")
    yield from islice(lines, DIFF_LINES)
    if more := sum(1 for _ in lines):
        yield f"… ({counted(more, 'further line')})"


def _print_audit(rows: Sequence[Mapping[str, Any]], episodes: int) -> None:
    names = ("environment", "task", "task digest", "replays", "rewards differ", "rate", "95 % interval", "texts differ")
    table = Table(*names, "verdict", title=f"{counted(episodes, 'episode')} of {counted(len(rows), 'task')}")
    for row in rows:
        place = (row["environment"], row["task"], row["task_digest"][:DIGEST_CHARS])
        skipped = (
            f"{len(row['skipped'])} not replayed: {'; '.join(sorted(set(row['skipped'])))}" if row["skipped"] else ""
        )
        if row["total"] is None:
            table.add_row(*place, "0", "", "", "", "", skipped)
            continue
        low, high = row["interval"]
        total = row["total"]
        numbers = (str(total["replays"]), str(total["differing"]), f"{row['rate']:.1%}", f"{low:.1%} to {high:.1%}")
        texts = f"{row['texts_differing']} of {row['replays']}"
        result = ", ".join(one for one in (row["verdict"], "marked" if row["is_marked"] else "", skipped) if one)
        table.add_row(*place, *numbers, texts, result)
    print_table(table)
    for row in rows:
        for one in row["episodes"]:
            rewards = f"reward {one['recorded']} recorded, {one['replayed']} replayed"
            typer.echo(f"{row['environment']} {row['task']}: episode {one['episode']}: {rewards}")

"""The command ``gateway tasks prove``: plays an author's tasks with and without their references, on a gateway."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table

from gateway.cli.admin_client import (
    EXIT_FOUND,
    EXIT_REFUSED,
    EXIT_UNREACHABLE,
    LOCALHOST,
    AsJson,
    Url,
    client,
    counted,
    print_json,
    print_result,
    print_table,
    requested,
)
from gateway.cli.run import import_client
from gateway.cli.tasks import ROUTE, For, check_documents, documents_of
from gateway.core.curriculum import PREFIX
from gateway.core.errors import ConfigError
from gateway.tasks.documents import read_file
from gateway.tasks.schema import parse, variants_of

if TYPE_CHECKING:
    from env_gateway_client.client import Gateway

    from gateway.cli.proofs import Proof, Subject

SHOWN: Final = 12
"""Tasks that the output lists for each reason why a play was left out."""
SUFFIXES: Final = (".json", ".jsonl", ".yaml", ".yml")


def prove(
    subject: Annotated[
        str, typer.Argument(metavar="ENVIRONMENT|FILE", help="Environment, or file: .json, .jsonl, .yaml or a bundle.")
    ],
    environment: For = "",
    split: Annotated[str, typer.Option("--split", "-s", help="Only this split; without it, all splits.")] = "",
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Stop after this many tasks.")] = None,
    text_tool: Annotated[str, typer.Option(help="Tool for texts; without it, the one that requires one text.")] = "",
    text_argument: Annotated[str, typer.Option(help="Argument of --text-tool that gets the text.")] = "",
    at_once: Annotated[int, typer.Option(min=1, help="Episodes at the same time.")] = 8,
    url: Url = LOCALHOST,
    key: Annotated[str, typer.Option(help="A trainer's key.", envvar="GATEWAY_KEY")] = "",
    operator_key: Annotated[
        str, typer.Option(help="An operator's key, for references of ENVIRONMENT.", envvar="GATEWAY_OPERATOR_KEY")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Prove that tasks can be won, and not by doing nothing.

    Plays the reference twice, an empty text, the prompt, the most frequent reference, and no action, on a running
    gateway. The exit code is 3 if a reference does not win twice with the same reward, if doing nothing earns more than
    the task's reward_floor (0), or if a play fails. A failed play has no reward. Tasks without a reference are listed.

    \b
    Examples:
      gateway tasks prove login.yaml --url http://127.0.0.1:8080 --key KEY
      gateway tasks prove tasks/math/test.jsonl -e math
      gateway tasks prove coding --split test --text-tool submit --text-argument code --operator-key KEY
    """
    if bool(text_tool) != bool(text_argument):
        raise ConfigError("--text-tool and --text-argument: give both, or neither")
    clients, errors = import_client("client"), import_client("errors")
    from gateway.cli import proofs  # it imports the client package

    found: list[Proof] = []
    problem, status = "", 0
    try:
        with clients.Gateway(url, key) as gateway:
            if Path(subject).is_file() or Path(subject).suffix in SUFFIXES:
                if split:
                    raise ConfigError("--split: only an environment has splits; leave it out for a file")
                subjects = _of_file(gateway, Path(subject), environment)[:limit]
            else:
                subjects = _of_environment(gateway, subject, split, limit, url, operator_key)
        text_call = (text_tool, text_argument) if text_tool else None
        proving = proofs.prove_all(clients.AsyncGateway(url, key), subjects, at_once=at_once, text_call=text_call)
        found = asyncio.run(proving)
    except* KeyboardInterrupt:
        problem, status = "interrupted, and closed the open episodes", 130
    except* errors.GatewayError as group:
        error: Any = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        problem = f"gateway {url}: {error}"
        status = EXIT_REFUSED if 400 <= error.status < 500 else EXIT_UNREACHABLE
    if problem:
        typer.echo(problem, err=True)
        raise typer.Exit(status)
    report = proofs.summed(found)
    print_json(report) if as_json else _print(report)
    if report["problems"]:
        raise typer.Exit(EXIT_FOUND)


def _of_file(gateway: Gateway, file: Path, environment: str) -> list[Subject]:
    """Return the tasks of a file. Ends the command with a line for each mistake."""
    from gateway.cli.proofs import Subject

    subjects = []
    valid, complaints = check_documents(documents_of(read_file(file), file), None, environment)
    if not complaints:
        offered = gateway.environments()
        for place, task in ((place, parse(one)) for place, document in valid for one in variants_of(document)):
            kind = str(task.get("env_type") or "")
            name = kind if kind in offered else environment or kind  # another name of an environment needs the option
            id = str(task.get("id") or place)
            subjects.append(Subject(environment=name, id=id, place=place, task=task, opening=task))
            if not name:
                complaints.append(f"{place}: env_type: is missing; name the environment here, or with --environment")
            elif name not in offered:
                has = f"the gateway has no environment {name!r}; it has {', '.join(offered)}"
                complaints.append(f"{place}: env_type: {has}")
    if complaints:
        print_result(False, None, *complaints, err=True)
        raise typer.Exit(EXIT_REFUSED)
    return subjects


def _of_environment(
    gateway: Gateway, environment: str, split: str, limit: int | None, url: str, operator_key: str
) -> list[Subject]:
    """Return the tasks that the gateway has of an environment, each with what only operators see.

    Raises:
        ConfigError: There is no task, or the operator's key is missing or wrong.
    """
    from gateway.cli.proofs import Subject

    splits = [split] if split else [one.name for one in gateway.splits(environment)]
    subjects: list[Subject] = []
    with client(url, operator_key) as connection:
        for name in splits:
            if name.startswith(PREFIX) and not split:  # a curriculum, which draws from the other splits
                continue
            left = None if limit is None else limit - len(subjects)
            for listed in gateway.tasks(environment, name, 0, left):
                task = listed.spec
                if "evaluation" not in task:
                    status, body, _ = requested(connection, "GET", f"{ROUTE}/{environment}/{listed.id}")
                    if status == 200:
                        task = body["task"]
                    elif status != 404:  # a task of an image, which lists it completely
                        detail = body.get("detail", f"status {status}")
                        fix = "give an operator's key with --operator-key or GATEWAY_OPERATOR_KEY, or prove a file"
                        raise ConfigError(
                            f"{url}: the complete task {listed.id!r} cannot be read: {detail} (fix: {fix})"
                        )
                id = listed.id or f"{name}/{listed.index}"
                subjects.append(Subject(environment=environment, id=id, task=task, opening=listed.spec))
    if not subjects:
        raise ConfigError(f"{environment} has no tasks{f' in split {split!r}' if split else ''}")
    return subjects


def _print(report: Mapping[str, list[dict[str, Any]]]) -> None:
    from gateway.cli.proofs import EFFORTLESS

    table = Table(
        "environment", "tag", "tasks", "reference won", *(f"{play}: max, mean" for play in EFFORTLESS), "failed"
    )
    for row in report["groups"]:
        cells = [f"{row[play]['max']:.2f}, {row[play]['mean']:.2f}" if row[play] else "-" for play in EFFORTLESS]
        won = f"{row['won']} of {row['references']}"
        table.add_row(row["environment"], row["tag"], str(row["tasks"]), won, *cells, str(row["failed"]))
    print_table(table)
    for one in report["problems"]:
        typer.echo(f"{_named(one)}: {one['play']}: {one['problem']}")
    for one in report["remarks"]:
        typer.echo(f"{_named(one)}: {one['play']}: {one['remark']}; no problem if that text is the answer")
    skipped: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for one in report["skipped"]:
        skipped[one["play"], one["reason"]].append(one["task"])
    for (play, reason), ids in skipped.items():
        more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
        typer.echo(f"no {play} in {counted(len(ids), 'task')} ({reason}): {', '.join(ids[:SHOWN])}{more}")
    tasks = counted(sum(row["tasks"] for row in report["groups"]), "task")
    typer.echo(f"{tasks}, {counted(len(report['problems']), 'problem')}")


def _named(one: Mapping[str, Any]) -> str:
    return f"{one['place']}: {one['task']}" if one["place"] not in ("", one["task"]) else str(one["task"])

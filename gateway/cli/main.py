"""The command ``gateway``: every command is thin, a request to the API or a call of a module."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.table import Table

from gateway import __version__, logs
from gateway.app import Gateway
from gateway.catalog.catalog import describe, load_catalog
from gateway.catalog.doctor import examine, failures
from gateway.cli.admin_client import LOCALHOST, Key, Url, ask, counted, print_table
from gateway.cli.curricula import curricula_app
from gateway.cli.doctor import doctor, lines_of
from gateway.cli.env import env_app
from gateway.cli.export import export
from gateway.cli.keys import keys_app
from gateway.cli.node import node_app
from gateway.cli.replays import audit, replay
from gateway.cli.serve import serve as serve_until_ended
from gateway.cli.sessions import sessions_app, verify
from gateway.cli.tasks import tasks_app
from gateway.cli.top import logs as worker_logs
from gateway.cli.top import top
from gateway.content import Content, load_content
from gateway.core.environment import Environment, SplitType
from gateway.core.errors import ConfigError, GatewayError
from gateway.node.tls import CA_FILE, GATEWAY_FILES, NODE_FILES, make_certificates
from gateway.settings import Settings, load
from gateway.tasks.importing import agentbench, coding
from gateway.tasks.importing.batch import check_target, gather, print_lines, write_lines
from gateway.tasks.importing.rows import Entry

app = typer.Typer(no_args_is_help=True, help="A gateway between RL trainers and environments.")
import_app = typer.Typer(no_args_is_help=True, help="Convert a public benchmark's files to tasks.")
tasks_app.add_typer(import_app, name="import")
tasks_app.command()(export)
app.add_typer(tasks_app, name="tasks")
app.add_typer(env_app, name="env")
app.add_typer(curricula_app, name="curricula")
app.add_typer(keys_app, name="keys")
app.add_typer(node_app, name="node")
app.add_typer(sessions_app, name="sessions")
app.command("doctor")(doctor)
app.command("top")(top)
app.command("logs")(worker_logs)
app.command("replay")(replay)
app.command("verify")(verify)
app.command("audit")(audit)


@app.command("certs")
def certs(
    directory: Annotated[Path, typer.Argument(help="Folder for the files; created if missing.")],
    days: Annotated[int, typer.Option("--days", min=1, help="Validity of the certificates in days.")] = 825,
) -> None:
    """Create a CA, and its certificates for the gateways and nodes of a cluster.

    \b
    Examples:
      gateway certs certificates
      gateway certs certificates --days 90
    """
    make_certificates(directory, days=days)
    for (cert, key), use in (
        (GATEWAY_FILES, "to each gateway"),
        (NODE_FILES, "to each node"),
    ):
        typer.echo(f"{use}: {directory / CA_FILE[0]}, {directory / cert}, {directory / key}")
    typer.echo(f"to no machine: {directory / CA_FILE[1]} (it signs further certificates: keep it offline)")


EXIT_CONFIG = 2
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Write to this file, not to standard output.")]
ForEnvironment = Annotated[
    str | None, typer.Option("--environment", "-e", help="Write to this environment's task folder; needs --split.")
]
ToSplit = Annotated[
    str | None, typer.Option("--split", "-s", help="Split of the environment; the file is SPLIT.jsonl.")
]
Force = Annotated[bool, typer.Option("--force", "-f", help="Overwrite an existing file.")]
Limit = Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Stop after this many tasks.")]
SkipInvalid = Annotated[bool, typer.Option("--skip-invalid", help="Leave out invalid entries.")]
Part = Annotated[SplitType | None, typer.Option("--part", help="Import only this part of the benchmark.")]


@app.command("serve")
def serve_command(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve a public address without keys.")] = False,
    static: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=URL", help="A running server outside the gateway; may be repeated."),
    ] = None,
) -> None:
    """Serve trainers until SIGTERM. GATEWAY_ variables configure everything else.

    \b
    Examples:
      gateway serve
      gateway serve --static counter=http://127.0.0.1:8000
    """
    settings = load(host=host, port=port, insecure=insecure or None, static=tuple(static) if static else None)
    logs.configure(settings.log_level, settings.log_format)
    uvloop.run(serve_until_ended(settings))


@app.command()
def check() -> None:
    """Check settings, environments, tasks and curricula, query static servers, and print the result."""
    settings = load().checked()
    content = asyncio.run(_checked(settings))
    catalog, tasks, curricula = content.catalog, content.tasks, content.curricula
    table = Table(title=f"{settings.backend} backend, store {settings.store.partition(':')[0]}")
    for column in ("environment", "protocol", "isolation", "workers", "idle", "splits", "loosened"):
        table.add_column(column)
    for environment in catalog:
        shown = describe(environment)
        splits = [f"{s.name} {tasks.count(environment.name, s.name)}" for s in tasks.splits(environment.name)]
        loosened = ", ".join(shown["loosened"]) or "nothing"
        table.add_row(
            environment.name,
            shown["protocol"],
            shown["isolation"],
            _workers(environment),
            f"{shown['idle_s']:g} s",
            ", ".join(splits) or "none",
            loosened,
        )
        for split, variant in environment.splits.items():
            table.add_row(variant.name, "", "", _workers(variant), "", split, "")
    print_table(table)
    for name, reason in catalog.left_out.items():
        typer.echo(f"{name}: not available: {reason}")
    for environment in catalog:
        for remark in describe(environment)["remarks"]:
            typer.echo(f"{environment.name}: {remark}")
    for name, curriculum in curricula.items():
        names = dict.fromkeys(component.environment for component in curriculum.components)
        typer.echo(f"curriculum {name}: {curriculum.sampler.kind} on {', '.join(names)}")
    typer.echo(f"default environment: {catalog.default.name}")
    for finding in failures(asyncio.run(examine(settings, catalog))):
        for line in lines_of(finding):
            typer.echo(line)


async def _checked(settings: Settings) -> Content:
    """Read what `serve` reads, and wire a gateway without connecting to anything. Raises ``ConfigError``."""
    content = await load_content(settings)
    Gateway(settings, content)
    return content


def _workers(environment: Environment) -> str:
    shown = describe(environment)
    return f"{shown['workers']}, {shown['resources']}".replace(", ", "\n")  # one value a line: terminals are narrow


@app.command()
def ps(
    url: Url = LOCALHOST,
    key: Key = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print all details as one JSON object.")] = False,
) -> None:
    """Show a running gateway's workers and sessions, and its machines if it has several."""
    found = {name: ask(url, key, "GET", f"/admin/v1/{name}")[name] for name in ("nodes", "workers", "sessions")}
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
        return
    if found["nodes"]:
        columns = ("id", "name", "state", "draining", "workers", "containers", "max_containers")
        _print_rows("node", found["nodes"], columns)
    _print_rows("worker", found["workers"], ("id", "environment", "state", "used", "slots", "age_s"))
    columns = ("id", "name", "environment", "owner", "state", "worker", "task")
    _print_rows("session", found["sessions"], columns)


def _print_rows(noun: str, rows: list[dict[str, object]], columns: tuple[str, ...]) -> None:
    table = Table(*columns, title=counted(len(rows), noun))
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    print_table(table)


@app.command()
def restart(
    environment: Annotated[str, typer.Argument(help="Replace this environment's workers.")],
    url: Url = LOCALHOST,
    key: Key = "",
) -> None:
    """Replace an environment's workers. Running workers take no more sessions and stop with their last one."""
    draining = ask(url, key, "POST", f"/admin/v1/environments/{environment}/restart")["draining"]
    typer.echo(f"{counted(len(draining), 'worker')} of {environment} will be replaced")


@import_app.command("agentbench-os")
def import_agentbench(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="AgentBench's data/os_interaction, or a checkout.")],
    part: Part = None,
    out: Out = None,
    environment: ForEnvironment = None,
    split: ToSplit = None,
    limit: Limit = None,
    force: Force = False,
    skip_invalid: SkipInvalid = False,
) -> None:
    """Read AgentBench's OS-interaction items as tasks of the os environment.

    The standard sets are its test, the development set its validation, the training set its train part.

    \b
    Examples:
      gateway tasks import agentbench-os AgentBench --part test --out agentbench.jsonl
      gateway tasks import agentbench-os AgentBench --part test -e os -s agentbench
    """
    entries = agentbench.read_agentbench(folder, part=part)
    _import(entries, target=_target(out, environment, split), limit=limit, force=force, skip_invalid=skip_invalid)


@import_app.command("humaneval")
def import_humaneval(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="HumanEval.jsonl.gz, or unpacked.")],
    out: Out = None,
    environment: ForEnvironment = None,
    split: ToSplit = None,
    limit: Limit = None,
    force: Force = False,
    skip_invalid: SkipInvalid = False,
) -> None:
    """Read HumanEval as tasks of the coding environment; the file's solutions go into no task.

    \b
    Examples:
      gateway tasks import humaneval HumanEval.jsonl.gz --limit 1
      gateway tasks import humaneval HumanEval.jsonl.gz -e coding -s humaneval
    """
    entries = coding.read_humaneval(file)
    _import(entries, target=_target(out, environment, split), limit=limit, force=force, skip_invalid=skip_invalid)


@import_app.command("mbpp")
def import_mbpp(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="mbpp.jsonl or sanitized-mbpp.json.")],
    part: Part = None,
    out: Out = None,
    environment: ForEnvironment = None,
    split: ToSplit = None,
    limit: Limit = None,
    force: Force = False,
    skip_invalid: SkipInvalid = False,
) -> None:
    """Read MBPP as tasks of the coding environment; the file's solutions go into no task.

    \b
    Examples:
      gateway tasks import mbpp sanitized-mbpp.json --part train > train.jsonl
      gateway tasks import mbpp mbpp.jsonl --part test -e coding -s mbpp
    """
    entries = coding.read_mbpp(file, part=part)
    _import(entries, target=_target(out, environment, split), limit=limit, force=force, skip_invalid=skip_invalid)


def _import(
    entries: Iterable[Entry], *, target: Path | None, limit: int | None, force: bool, skip_invalid: bool
) -> None:
    if target is not None:
        check_target(target, force=force, remedy="--force overwrites it")
    batch = gather(entries, limit=limit)
    for line in (*batch.remarks(), *batch.complaints()):
        typer.echo(line, err=True)
    if batch.refused and not skip_invalid:
        said = f"{len(batch.refused)} of {batch.entries} entries cannot be used; nothing was written"
        raise ConfigError(f"{said} (--skip-invalid leaves them out)")
    if not batch.lines:
        raise ConfigError("no entry became a task; nothing was written")
    if target is None:
        print_lines(batch.lines)
    else:
        write_lines(target, batch.lines, force=force)
    typer.echo(f"{batch.summary()}; written to {target or 'standard output'}", err=True)


def _target(out: Path | None, environment: str | None, split: str | None) -> Path | None:
    """Return the file to write; None means standard output."""
    if out is not None and (environment or split):
        raise ConfigError("--out is one place to write to, --environment and --split are another")
    if environment is None or split is None:
        if environment or split:
            raise ConfigError("--environment and --split go together")
        return None if out == Path("-") else out
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", split):
        raise ConfigError(f"--split {split}: a split's name has letters, digits, dots, dashes and underscores")
    folder = load_catalog(load().catalog_dir, names=(environment,)).default.tasks
    if folder is None:
        raise ConfigError(f"{environment} has no task folder: its environment.toml names none under [tasks]")
    return folder / f"{split}.jsonl"


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Run the command; print an error that an operator can fix as one line, with exit status 2 and no traceback."""
    try:
        app()
    except GatewayError as error:
        print(f"gateway: {error.detail}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)

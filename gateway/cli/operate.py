"""The commands ``gateway ps``, ``restart``, ``certs`` and ``version``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from gateway import __version__
from gateway.cli.admin_client import LOCALHOST, AsJson, Key, Url, ask, counted, print_table


def ps(
    url: Url = LOCALHOST,
    key: Key = "",
    as_json: AsJson = False,
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


def restart(
    environment: Annotated[str, typer.Argument(help="Replace this environment's workers.")],
    url: Url = LOCALHOST,
    key: Key = "",
) -> None:
    """Replace an environment's workers. Running workers take no more sessions and stop with their last one."""
    draining = ask(url, key, "POST", f"/admin/v1/environments/{environment}/restart")["draining"]
    typer.echo(f"{counted(len(draining), 'worker')} of {environment} will be replaced")


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
    from gateway.node.tls import CA_FILE, GATEWAY_FILES, NODE_FILES, make_certificates

    make_certificates(directory, days=days)
    for (cert, key), use in (
        (GATEWAY_FILES, "to each gateway"),
        (NODE_FILES, "to each node"),
    ):
        typer.echo(f"{use}: {directory / CA_FILE[0]}, {directory / cert}, {directory / key}")
    typer.echo(f"to no machine: {directory / CA_FILE[1]} (it signs further certificates: keep it offline)")


def version() -> None:
    """Print the version."""
    typer.echo(__version__)

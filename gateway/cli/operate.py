"""The commands ``gateway ps``, ``restart``, ``certs`` and ``version``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from gateway import __version__
from gateway.cli.admin_client import LOCALHOST, AsJson, Key, Url, ask, counted, print_json, print_result, print_table


def ps(
    url: Url = LOCALHOST,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Show a running gateway's workers and sessions, and its machines if it has several."""
    found = {name: ask(url, key, "GET", f"/admin/v1/{name}")[name] for name in ("nodes", "workers", "sessions")}
    if as_json:
        print_json(found)
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
    as_json: AsJson = False,
) -> None:
    """Replace an environment's workers. Running workers take no more sessions and stop with their last one."""
    found = ask(url, key, "POST", f"/admin/v1/environments/{environment}/restart")
    line = f"{counted(len(found['draining']), 'worker')} of {environment} will be replaced"
    print_result(as_json, {"environment": environment, **found}, line)


def certs(
    directory: Annotated[Path, typer.Argument(help="Folder for the files; created if missing.")],
    days: Annotated[int, typer.Option("--days", min=1, help="Validity of the certificates in days.")] = 825,
    as_json: AsJson = False,
) -> None:
    """Create a CA, and its certificates for the gateways and nodes of a cluster.

    \b
    Examples:
      gateway certs certificates
      gateway certs certificates --days 90
    """
    from gateway.node.tls import CA_FILE, GATEWAY_FILES, NODE_FILES, make_certificates

    make_certificates(directory, days=days)
    found = {
        "gateway": [directory / name for name in (CA_FILE[0], *GATEWAY_FILES)],
        "node": [directory / name for name in (CA_FILE[0], *NODE_FILES)],
        "offline": [directory / CA_FILE[1]],
    }
    print_result(
        as_json,
        found,
        *(f"to each {use}: {', '.join(map(str, found[use]))}" for use in ("gateway", "node")),
        f"to no machine: {found['offline'][0]} (it signs further certificates: keep it offline)",
    )


def version(as_json: AsJson = False) -> None:
    """Print the version."""
    print_result(as_json, {"version": __version__}, __version__)

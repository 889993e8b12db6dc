"""The command ``gateway certs``: the certificates with which the parts of a cluster know each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.node.tls import CA_FILE, GATEWAY_FILES, NODE_FILES, make_certificates


def mount(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command("certs")(certs)


def certs(
    directory: Annotated[Path, typer.Argument(help="Where to write them; made if it is not there.")],
    days: Annotated[int, typer.Option("--days", min=1, help="How long they are good for.")] = 825,
) -> None:
    """Make a CA, and certificates of it for the gateways and for the nodes of a cluster.

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
    typer.echo(f"to nobody: {directory / CA_FILE[1]} (it makes further certificates: keep it off the machines)")

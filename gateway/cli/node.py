"""The commands ``gateway node``: serve the engine gate, and list the ids of this machine's images."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
import uvloop

from gateway import logs
from gateway.cli.admin_client import AsJson, print_result
from gateway.content import load_files
from gateway.settings import load

node_app = typer.Typer(invoke_without_command=True)


@node_app.callback()
def node(
    context: typer.Context,
    log_as_json: Annotated[bool, typer.Option("--json", help="Write the log as JSON.")] = False,
) -> None:
    """Serve the engine gate: the only process that needs the Docker socket."""
    if context.invoked_subcommand is not None:
        return
    from gateway.node.serve import run_node  # imported here, because the other commands need no Docker SDK

    settings = load(log_format="json" if log_as_json else None)
    logs.configure(settings.log_level, settings.log_format)
    catalog, _ = load_files(settings, on_engine=True)
    uvloop.run(run_node(settings, catalog, makes_folders=settings.node_makes_folders))


@node_app.command()
def images(as_json: AsJson = False) -> None:
    """Print the ids of this machine's images in the format of the file GATEWAY_NODE_IMAGE_IDS, for all nodes.

    \b
    Examples:
      gateway node images > image-ids
    """
    from gateway.node.image_ids import image_lines  # see above
    from gateway.node.policy import Rules

    settings = load()
    catalog, _ = load_files(settings, on_engine=True)
    rules = Rules.of(catalog, instance=settings.instance, socket_root="", forwarder_image=settings.forwarder_image)
    lines = asyncio.run(image_lines(settings.node_engine, rules.images))
    found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    print_result(as_json, {"images": found, "missing": sorted(rules.images - found.keys())}, *lines)

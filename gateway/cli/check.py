"""The command ``gateway check``."""

from __future__ import annotations

import asyncio

import typer
from rich.table import Table

from gateway.app import Gateway
from gateway.catalog.catalog import describe
from gateway.catalog.doctor import examine, failures
from gateway.cli.admin_client import print_table
from gateway.cli.doctor import lines_of
from gateway.content import Content, load_content
from gateway.core.environment import Environment
from gateway.settings import Settings, load


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

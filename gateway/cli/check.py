"""The command ``gateway check``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.table import Table

from gateway.app import Gateway
from gateway.catalog.catalog import describe
from gateway.catalog.doctor import Finding, examine, failures
from gateway.cli.admin_client import AsJson, print_json, print_table
from gateway.cli.doctor import lines_of
from gateway.content import Content, load_content
from gateway.core.environment import Environment
from gateway.settings import Settings, load


def check(as_json: AsJson = False) -> None:
    """Check settings, environments, tasks and curricula, query static servers, and print the result."""
    settings = load().checked()
    content = asyncio.run(_checked(settings))
    found = failures(asyncio.run(examine(settings, content.catalog)))
    if as_json:
        print_json(_described(settings, content, found))
        return
    catalog = content.catalog
    print_table(_table(settings, content))
    for name, reason in catalog.left_out.items():
        typer.echo(f"{name}: not available: {reason}")
    for environment in catalog:
        for remark in describe(environment)["remarks"]:
            typer.echo(f"{environment.name}: {remark}")
    for name, curriculum in content.curricula.items():
        names = dict.fromkeys(component.environment for component in curriculum.components)
        typer.echo(f"curriculum {name}: {curriculum.sampler.kind} on {', '.join(names)}")
    typer.echo(f"default environment: {catalog.default.name}")
    for finding in found:
        for line in lines_of(finding):
            typer.echo(line)


def _table(settings: Settings, content: Content) -> Table:
    table = Table(title=f"{settings.backend} backend, store {settings.store.partition(':')[0]}")
    for column in ("environment", "protocol", "isolation", "workers", "idle", "splits", "loosened"):
        table.add_column(column)
    for environment in content.catalog:
        shown = describe(environment)
        table.add_row(
            environment.name,
            shown["protocol"],
            shown["isolation"],
            _workers(environment),
            f"{shown['idle_s']:g} s",
            ", ".join(f"{name} {count}" for name, count in _splits(content, environment).items()) or "none",
            ", ".join(shown["loosened"]) or "nothing",
        )
        for split, variant in environment.splits.items():
            table.add_row(variant.name, "", "", _workers(variant), "", split, "")
    return table


def _described(settings: Settings, content: Content, found: Sequence[Finding]) -> dict[str, Any]:
    """Return what the command prints, for ``--json``."""
    return {
        "backend": settings.backend,
        "store": settings.store.partition(":")[0],
        "environments": [{**describe(one), "splits": _splits(content, one)} for one in content.catalog],
        "default": content.catalog.default.name,
        "left_out": dict(content.catalog.left_out),
        "curricula": {name: one.sampler.kind for name, one in content.curricula.items()},
        "failures": [asdict(one) for one in found],
    }


def _splits(content: Content, environment: Environment) -> dict[str, int | None]:
    """Return the number of tasks of each of an environment's splits."""
    tasks = content.tasks
    return {split.name: tasks.count(environment.name, split.name) for split in tasks.splits(environment.name)}


async def _checked(settings: Settings) -> Content:
    """Read what `serve` reads, and wire a gateway without connecting to anything. Raises ``ConfigError``."""
    content = await load_content(settings)
    Gateway(settings, content)
    return content


def _workers(environment: Environment) -> str:
    shown = describe(environment)
    return f"{shown['workers']}, {shown['resources']}".replace(", ", "\n")  # one value a line: terminals are narrow

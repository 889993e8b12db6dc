"""The command: run the benchmarks, write ``bench/results/latest.json``, print tables.

``python -m bench.run --quick``, or ``python -m bench.run --only footprint --only opens``, from the project's root.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from docker.errors import DockerException
from rich.console import Console

from bench.load.episodes import WrongAnswer
from bench.measures import (
    areal,
    calls,
    cold,
    footprint,
    many_containers,
    nodes,
    openenv,
    openenv_tasks,
    opens,
    proxies,
    sandboxes,
    scale,
    step_log,
    store_trips,
    tenants,
)
from bench.reporting import plots, results
from bench.reporting.machine import commit, load_average, machine, versions
from bench.subjects.processes import StartError
from bench.subjects.targets import servers

BUSY_SHARE = 0.5
"""Share of the CPUs. A load average above it, before the run, adds a warning to the results."""


class Part(StrEnum):
    """A benchmark."""

    CALLS = "calls"
    PROXIES = "proxies"
    FOOTPRINT = "footprint"
    OPENS = "opens"
    AREAL = "areal"
    OPENENV = "openenv"
    SANDBOXES = "sandboxes"
    OPENENV_TASKS = "openenv_tasks"
    DOCKER = "docker"
    STORE = "store"
    SCALE = "scale"
    MANY_CONTAINERS = "many_containers"
    TENANTS = "tenants"
    NODES = "nodes"
    STEP_LOG = "step_log"


ON_DOCKER = (Part.OPENENV_TASKS, Part.DOCKER, Part.MANY_CONTAINERS)
"""Parts that always need an engine."""
ON_LAB = (Part.NODES,)
"""Parts that start their own machines. They run only if they are named."""


MEASURES: Mapping[Part, Any] = {
    Part.CALLS: calls,
    Part.STEP_LOG: step_log,
    Part.PROXIES: proxies,
    Part.FOOTPRINT: footprint,
    Part.OPENS: opens,
    Part.AREAL: areal,
    Part.OPENENV: openenv,
    Part.SANDBOXES: sandboxes,
    Part.OPENENV_TASKS: openenv_tasks,
    Part.DOCKER: cold,
    Part.STORE: store_trips,
    Part.SCALE: scale,
    Part.MANY_CONTAINERS: many_containers,
    Part.TENANTS: tenants,
    Part.NODES: nodes,
}
"""The module of each part, with ``Plan``, a short plan as ``QUICK``, and ``run(servers, plan)``."""


def plan_of(part: Part, *, quick: bool, **options: object) -> Any:
    """Return the short plan of *part* or the full plan, with the *options* that it has."""
    measure = MEASURES[part]
    plan = measure.QUICK if quick else measure.Plan()
    known = {each.name for each in fields(plan)}
    return replace(plan, **{name: value for name, value in options.items() if name in known})


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Shorter: some three minutes.")] = False,
    only: Annotated[list[Part] | None, typer.Option(help="Run these parts only; may stand several times.")] = None,
    docker: Annotated[bool, typer.Option("--docker", help="Measure on a Docker engine, too.")] = False,
    engine: Annotated[str, typer.Option(help="That engine.")] = cold.ENGINE,
    base_image: Annotated[str, typer.Option(help="What the container's image is built on.")] = cold.BASE_IMAGE,
    folder: Annotated[
        Path | None, typer.Option(help="For sockets and logs; for --docker one that the engine sees, too.")
    ] = None,
    output: Annotated[Path, typer.Option(help="The results.")] = results.LATEST,
    write_readme: Annotated[bool, typer.Option("--write-readme", help="Put the results into bench/README.md.")] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the results that are there of parts that are not run now.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Run nothing; use the results that are there.")] = False,
) -> None:
    """Run the benchmarks against servers on this machine's loopback, and nothing else."""
    console = Console()
    if not again:
        chosen = tuple(only) if only else by_default(docker=docker)
        plans = {
            part: plan_of(part, quick=quick, docker=docker, engine=engine, base_image=base_image) for part in chosen
        }
        try:
            new = uvloop.run(run(plans, size="quick" if quick else "full", folder=folder, console=console))
            if keep and output.exists():
                new = results.merged(results.read(output), new, order=tuple(Part))
            results.write(new, output)
        except asyncio.CancelledError:
            raise typer.Exit(128 + signal.SIGTERM) from None
        except (StartError, WrongAnswer, DockerException, ValueError) as error:
            typer.echo(f"bench: {error}", err=True)
            raise typer.Exit(1) from None
    found = results.read(output)
    results.show(found, console)
    console.print(f"{output}")
    can_draw = plots.are_possible()
    if can_draw:
        plots.draw(found, output.parent)
    else:
        typer.echo("bench: no plots: there is no matplotlib (scripts/install bench)", err=True)
    if write_readme:
        small = plots.draw(found, plots.SMALL, small=True) if can_draw else []
        results.write_readme(found, pictures=[(title, f"{plots.SMALL.name}/{name}") for title, name in small])


def by_default(*, docker: bool) -> tuple[Part, ...]:
    """Return the parts that run if no part is named."""
    left_out = ON_LAB if docker else (*ON_LAB, *ON_DOCKER)
    return tuple(part for part in Part if part not in left_out)


async def run(plans: Mapping[Part, Any], *, size: str, folder: Path | None, console: Console) -> dict[str, object]:
    """Run the parts of *plans* one after the other. Return the findings and the facts of the run.

    Raises:
        StartError: A server does not start.
    """
    facts: dict[str, object] = {
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "size": size,
        "machine": machine(),
        "versions": versions(),
        "load_average": load_average(),
        "source": commit(),
    }
    _end_on_sigterm()
    remarks = _remarks()
    began_at = time.perf_counter()
    reports, seconds = [], {}
    for part, plan in plans.items():
        console.print(f"{part.value} …", highlight=False)
        part_began_at = time.perf_counter()
        async with servers(folder or _folder(part)) as made:
            reports.append(await MEASURES[part].run(made, plan))
        seconds[part.value] = time.perf_counter() - part_began_at
    facts |= {"seconds": time.perf_counter() - began_at, "seconds_by_part": seconds}
    facts["load_average_after"] = load_average()
    return results.results(reports, facts, remarks=remarks)


def _end_on_sigterm() -> None:
    """Make SIGTERM cancel the run, so that the servers end, too. An immediate end would leave them running."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _folder(part: Part) -> Path | None:
    """Return the folder for the sockets of *part*. A container's folder must have one path here and for the engine.
    Shared memory has this property even if the engine has another root."""
    shared = Path("/dev/shm")
    return shared if part in (Part.SANDBOXES, *ON_DOCKER, *ON_LAB) and shared.is_dir() else None


def _remarks() -> list[str]:
    here = machine()
    if here["load_average"][0] > BUSY_SHARE * here["cpus_usable"]:
        return ["Other programs used this machine when the run started: absolute figures are provisional."]
    return []


if __name__ == "__main__":
    typer.run(main)

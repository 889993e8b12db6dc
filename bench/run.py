"""The command: run the benchmarks, write ``bench/results/latest.json``, print tables.

``python -m bench.run --quick``, or ``python -m bench.run --only footprint --only opens``, from the project's root.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

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
    sandboxes_report,
    scale,
    store_trips,
)
from bench.reporting import plots, results
from bench.reporting.machine import commit, load_average, machine, versions
from bench.reporting.report import Report
from bench.subjects.processes import StartError
from bench.subjects.targets import Servers, servers

BUSY_SHARE = 0.5
"""A load average above this share of the CPUs, before anything was started, is said with the results."""


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
    NODES = "nodes"


ON_DOCKER = (Part.OPENENV_TASKS, Part.DOCKER, Part.MANY_CONTAINERS)
"""Parts that are nothing without an engine."""
ON_LAB = (Part.NODES,)
"""Parts that bring up machines of their own: run only where they are asked for by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """How long to measure what, for each part."""

    size: str
    calls: calls.Plan
    proxies: proxies.Plan
    footprint: footprint.Plan
    opens: opens.Plan
    areal: areal.Plan
    openenv: openenv.Plan
    sandboxes: sandboxes_report.Plan
    openenv_tasks: openenv_tasks.Plan
    docker: cold.Plan
    store: store_trips.Plan
    scale: scale.Plan
    many_containers: many_containers.Plan
    nodes: nodes.Plan

    @classmethod
    def of(cls, *, quick: bool, docker: bool, engine: str, base_image: str) -> Plans:
        """The quick ones or the full ones; *docker* lets parts use *engine* that do without it else."""
        boxes = sandboxes_report.QUICK if quick else sandboxes_report.Plan()
        return cls(
            size="quick" if quick else "full",
            calls=calls.QUICK if quick else calls.Plan(),
            proxies=proxies.QUICK if quick else proxies.Plan(),
            footprint=footprint.QUICK if quick else footprint.Plan(),
            opens=opens.QUICK if quick else opens.Plan(),
            areal=areal.QUICK if quick else areal.Plan(),
            openenv=openenv.QUICK if quick else openenv.Plan(),
            openenv_tasks=replace(
                openenv_tasks.QUICK if quick else openenv_tasks.Plan(), engine=engine, base_image=base_image
            ),
            sandboxes=replace(boxes, docker=docker, engine=engine),
            docker=replace(cold.QUICK if quick else cold.Plan(), engine=engine, base_image=base_image),
            store=store_trips.QUICK if quick else store_trips.Plan(),
            scale=scale.QUICK if quick else scale.Plan(),
            many_containers=replace(
                many_containers.QUICK if quick else many_containers.Plan(), engine=engine, base_image=base_image
            ),
            nodes=replace(nodes.QUICK if quick else nodes.Plan(), engine=engine, base_image=base_image),
        )

    async def run(self, part: Part, made: Servers) -> Report:
        """Run one part with servers of its own."""
        if part is Part.CALLS:
            return await calls.run(made, self.calls)
        if part is Part.PROXIES:
            return await proxies.run(made, self.proxies)
        if part is Part.FOOTPRINT:
            return await footprint.run(made, self.footprint)
        if part is Part.OPENS:
            return await opens.run(made, self.opens)
        if part is Part.AREAL:
            return await areal.run(made, self.areal)
        if part is Part.OPENENV:
            return await openenv.run(made, self.openenv)
        if part is Part.OPENENV_TASKS:
            return await openenv_tasks.run(made, self.openenv_tasks)
        if part is Part.SANDBOXES:
            return await sandboxes.run(made, self.sandboxes)
        if part is Part.STORE:
            return await store_trips.run(made, self.store)
        if part is Part.SCALE:
            return await scale.run(made, self.scale)
        if part is Part.MANY_CONTAINERS:
            return await many_containers.run(made, self.many_containers)
        if part is Part.NODES:
            return await nodes.run(made, self.nodes)
        return await cold.run(made, self.docker)


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
        plans = Plans.of(quick=quick, docker=docker, engine=engine, base_image=base_image)
        try:
            new = uvloop.run(run(chosen, plans, folder=folder, console=console))
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
    """The parts that are run where none is named."""
    left_out = ON_LAB if docker else (*ON_LAB, *ON_DOCKER)
    return tuple(part for part in Part if part not in left_out)


async def run(parts: Sequence[Part], plans: Plans, *, folder: Path | None, console: Console) -> dict[str, object]:
    """Run *parts* one after the other, and say what was found and on what.

    Raises:
        StartError: a server does not start.
    """
    facts: dict[str, object] = {
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "size": plans.size,
        "machine": machine(),
        "versions": versions(),
        "load_average": load_average(),
        "source": commit(),
    }
    _end_on_sigterm()
    remarks = _remarks()
    began_at = time.perf_counter()
    reports, seconds = [], {}
    for part in parts:
        console.print(f"{part.value} …", highlight=False)
        part_began_at = time.perf_counter()
        async with servers(folder or _folder(part)) as made:
            reports.append(await plans.run(part, made))
        seconds[part.value] = time.perf_counter() - part_began_at
    facts |= {"seconds": time.perf_counter() - began_at, "seconds_by_part": seconds}
    facts["load_average_after"] = load_average()
    return results.results(reports, facts, remarks=remarks)


def _end_on_sigterm() -> None:
    """Let SIGTERM end the servers, too: a process that it ends at once would leave them running."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _folder(part: Part) -> Path | None:
    """Where *part* keeps its sockets: a container's must have one path here and for the engine, which shared memory
    has even where the engine lives on another root."""
    shared = Path("/dev/shm")
    return shared if part in (Part.SANDBOXES, *ON_DOCKER, *ON_LAB) and shared.is_dir() else None


def _remarks() -> list[str]:
    here = machine()
    if here["load_average"][0] > BUSY_SHARE * here["cpus_usable"]:
        return ["Others were at work on this machine when the run began: absolute figures are provisional."]
    return []


if __name__ == "__main__":
    typer.run(main)

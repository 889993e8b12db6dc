"""The soak: two replicas on one Redis and one engine under a long mixed load, during faults.

Run ``make soak MINUTES=20``, or ``python -m bench.soak --minutes 1``. The same ``--seed`` repeats the faults at the
same times, as far as a machine repeats its behaviour. The soak exits with 1 if it found a violation.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import redis
import typer
import uvloop
from docker.errors import DockerException
from rich.console import Console

from bench.reporting.machine import commit, load_average, machine, versions
from bench.reporting.report import Table
from bench.reporting.results import show_tables, write
from bench.soak.errors import Ledger
from bench.soak.faults import Faults
from bench.soak.samples import (
    FILES_AT_REST,
    THREADS_AT_REST,
    Process,
    Sample,
    Samples,
    Verdict,
    flatness,
    sample_table,
    verdict_table,
)
from bench.soak.trainers import Numbers, Trainers
from bench.soak.world import ALONE_WORKERS, IDLE_S, SHARED_WORKERS, World, read_status, world
from bench.subjects.processes import StartError, Usage, usage
from bench.subjects.targets import servers

OUTPUT = Path(__file__).parents[1] / "results" / "soak.json"
SAMPLE_S = 3.0
SESSIONS_S = IDLE_S + 30.0
"""Seconds after the load until no session, wait or lease may be left: half a minute after the last expiry."""
QUIET_S = 240.0
"""Seconds after that until nothing may be left. The pool keeps a free slot for each recent opening during a worker's
start. It forgets half of these in 20 s. From 10 openings a second and starts of 5 s, this takes some two minutes."""
HELD = ("session", "held", "ticket", "queue", "waits", "deadlines")
"""Kinds of keys of a session, or of a waiting opening."""
LOOK_S = 0.5
CONTAINERS_MAX = SHARED_WORKERS + ALONE_WORKERS + 6
"""Maximum number of containers at one moment: all allowed workers, and workers that are about to end."""
FINISH_S = 200.0
"""Seconds after the end for the last episodes: two answers, each with the maximum time."""
BUGS = ("Traceback", "_broken ", "tick_failed", "audit_failed", "notes_failed", "pool_task_failed", "ping_failed")
"""Words of a log line that reports a bug."""
NOT_BUGS = ("call_broken", "engine_events_broken")


@dataclass(slots=True)
class Found:
    """All findings of a run."""

    ledger: Ledger = field(default_factory=Ledger)
    samples: Samples = field(default_factory=Samples)
    verdicts: list[Verdict] = field(default_factory=list)
    load_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """True if there is no violation and all verdicts hold."""
        return not self.ledger.violations and all(verdict.holds for verdict in self.verdicts)


def main(
    minutes: Annotated[float, typer.Option(help="How long the load and the faults last.", min=0.2)] = 20.0,
    seed: Annotated[int | None, typer.Option(help="For the order of faults and of what trainers do.")] = None,
    folder: Annotated[Path, typer.Option(help="For sockets and logs; one that the engine sees, too.")] = Path(
        "/dev/shm"
    ),
    output: Annotated[Path, typer.Option(help="The results.")] = OUTPUT,
    keep_logs: Annotated[Path | None, typer.Option(help="Write all that the replicas logged there.")] = None,
) -> None:
    """Soak a gateway that is started for it, with a Redis and containers of its own."""
    console = Console()
    seed = seed if seed is not None else random.SystemRandom().randrange(10**6)
    console.print(f"soak: {minutes:g} minutes, seed {seed}", highlight=False)
    facts = {"taken_at": datetime.now(UTC).isoformat(timespec="seconds"), "minutes": minutes, "seed": seed}
    facts |= {"machine": machine(), "versions": versions(), "source": commit()}
    try:
        found = uvloop.run(soak(minutes * 60, seed=seed, folder=folder, console=console, keep_logs=keep_logs))
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None
    except (StartError, DockerException) as error:
        typer.echo(f"soak: {error}", err=True)
        raise typer.Exit(1) from None
    write(facts | {"load_average_after": load_average()} | results(found), output)
    show(found, console)
    console.print(f"{output}")
    raise typer.Exit(0 if found.is_good else 1)


async def soak(seconds: float, *, seed: int, folder: Path, console: Console, keep_logs: Path | None = None) -> Found:
    """Run the soak.

    Raises:
        StartError: A server does not start, or does not start again.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    found = Found()
    async with servers(folder) as made, world(made) as here:
        try:
            await _run(here, found, seconds, seed=seed, console=console)
        finally:
            if keep_logs is not None:
                await asyncio.to_thread(keep_logs.write_text, here.logs())
    return found


async def _run(here: World, found: Found, seconds: float, *, seed: int, console: Console) -> None:
    ledger, stopping = found.ledger, asyncio.Event()
    trainers = Trainers(here, ledger, seed=seed, stopping=stopping)
    await trainers.warm_up()
    await _until(lambda: _is_empty(here), QUIET_S)
    constant = await asyncio.to_thread(here.lasting_keys)
    at_rest = _processes(here)
    ledger.steps.clear()
    ledger.episodes.clear()

    faults = Faults(here, ledger, seed=seed)
    began_at = time.monotonic()
    load = asyncio.create_task(trainers.run(Numbers()))
    others = [
        asyncio.create_task(faults.run(stopping)),
        asyncio.create_task(_sample(here, found, began_at, stopping)),
    ]
    try:
        await _first(seconds / 2, load, *others)
        faults.spares_first = True
        console.print(f"half of it: {ledger.steps.total():,} steps, {len(ledger.violations)} violations")
        await _first(seconds / 2, load, *others)
        stopping.set()
        found.load_s = time.monotonic() - began_at
        await asyncio.wait({*others}, timeout=FINISH_S)
        if (await asyncio.wait({load}, timeout=FINISH_S))[1]:
            ledger.violate(f"trainers still wait {FINISH_S:g} s after the end")
    finally:
        for task in (load, *others):
            task.cancel()
        results = await asyncio.gather(load, *others, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    await _at_the_end(here, found, constant, at_rest)


async def _first(seconds: float, *tasks: asyncio.Task[None]) -> None:
    """Wait for *seconds*, or until one of *tasks* ends, which is too early. Raise that task's error, if any."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


# -- samples ------------------------------------------------------------------------------------------------------


async def _sample(here: World, found: Found, began_at: float, stopping: asyncio.Event) -> None:
    while not stopping.is_set():
        keys, redis_mib = await asyncio.to_thread(_redis, here)
        containers = len(await here.containers())
        found.samples.all.append(
            Sample(
                at_s=time.monotonic() - began_at,
                replicas=_processes(here),
                keys=keys,
                redis_mib=redis_mib,
                containers=containers,
                steps=found.ledger.steps.total(),
            )
        )
        if containers > CONTAINERS_MAX:
            found.ledger.violate(f"{containers} containers at once")
        await asyncio.sleep(SAMPLE_S)


def _redis(here: World) -> tuple[int | None, float | None]:
    try:
        with here.redis.client() as client:
            return int(client.dbsize()), int(client.info("memory")["used_memory"]) / 2**20
    except redis.RedisError:
        return None, None


def _processes(here: World) -> list[Process]:
    rows = []
    for replica in here.replicas:
        pid = replica.process.pid
        try:
            used = usage(pid)
        except (FileNotFoundError, ProcessLookupError):
            used = Usage(0.0, 0)
        files, threads = read_status(pid)
        rows.append(Process(life=len(replica.lives), rss_mib=used.rss_bytes / 2**20, files=files, threads=threads))
    return rows


# -- the end ------------------------------------------------------------------------------------------------------


async def _at_the_end(here: World, found: Found, constant: set[str], before: list[Process]) -> None:
    await _until(lambda: _holds_nothing(here), SESSIONS_S)
    held = await asyncio.to_thread(here.lasting_keys, HELD)
    await _until(lambda: _is_empty(here), QUIET_S)
    containers = await here.containers()
    await _until(lambda: _has_only(here, constant), QUIET_S)
    astray = await asyncio.to_thread(here.lasting_keys) - constant
    folders = here.folders()
    after = _processes(here)
    bugs = [
        line
        for line in here.logs().splitlines()
        if any(word in line for word in BUGS) and not any(word in line for word in NOT_BUGS)
    ]
    for what, some in (
        ("sessions", held),
        ("containers", [each.id for each in containers]),
        ("keys", astray),
        ("folders", folders),
    ):
        if some:
            found.ledger.violate(f"{what} that are left: {sorted(some)[:10]}")
    for line in bugs[:10]:
        found.ledger.violate(f"log: {line}")
    found.verdicts = [
        Verdict(f"keys of sessions and waits, {SESSIONS_S:g} s after the load", len(held), 0),
        Verdict("containers that are left", len(containers), 0),
        Verdict("keys of Redis that are left", len(astray), 0),
        Verdict("workers' folders that are left", len(folders), 0),
        Verdict("lines of logs that tell of a bug", len(bugs), 0),
        *(
            verdict
            for n, (then, now) in enumerate(zip(before, after, strict=True))
            for verdict in (
                Verdict(f"files of replica {n + 1} at rest, more than before", now.files - then.files, FILES_AT_REST),
                Verdict(
                    f"threads of replica {n + 1} at rest, more than before", now.threads - then.threads, THREADS_AT_REST
                ),
            )
        ),
        *flatness(found.samples, found.load_s),
        Verdict("violations", len(found.ledger.violations), 0),
    ]


async def _is_empty(here: World) -> bool:
    return not await here.containers() and not here.folders()


async def _holds_nothing(here: World) -> bool:
    return not await asyncio.to_thread(here.lasting_keys, HELD)


async def _has_only(here: World, constant: set[str]) -> bool:
    return not await asyncio.to_thread(here.lasting_keys) - constant


async def _until(holds: Callable[[], Awaitable[bool]], seconds: float) -> None:
    """Wait until *holds* returns True, for at most *seconds*."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not await holds():  # noqa: ASYNC110  # there is no event to wait for
        await asyncio.sleep(LOOK_S)


# -- results ------------------------------------------------------------------------------------------------------


def results(found: Found) -> dict[str, Any]:
    """Return all findings for the JSON, verdicts first."""
    ledger = found.ledger
    return {
        "is_good": found.is_good,
        "verdicts": [asdict(each) | {"holds": each.holds} for each in found.verdicts],
        "violations": ledger.violations,
        "load_s": found.load_s,
        "faults": dict(ledger.faults),
        "steps": dict(ledger.steps),
        "episodes": dict(ledger.episodes),
        "errors": dict(ledger.errors),
        "examples": ledger.examples,
        "samples": [asdict(each) for each in found.samples.all],
    }


def show(found: Found, console: Console) -> None:
    """Print the tables."""
    ledger = found.ledger
    counted = Table(
        "What happened",
        ["what", "how often"],
        [
            *([f"fault: {name}", str(count)] for name, count in sorted(ledger.faults.items())),
            *([f"right steps: {name}", f"{count:,}"] for name, count in sorted(ledger.steps.items())),
            *([f"episodes: {name}", f"{count:,}"] for name, count in sorted(ledger.episodes.items())),
            *([f"typed errors: {name}", str(count)] for name, count in sorted(ledger.errors.items())),
        ],
    )
    tables = [counted, verdict_table(found.verdicts)]
    if found.samples.all:
        tables.insert(0, sample_table(found.samples))
    show_tables(tables, console)
    for sentence in ledger.violations:
        console.print(f"- {sentence}", highlight=False, markup=False)

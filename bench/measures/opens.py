"""Opening an episode: on a warm pool, in a burst, and on a pool without workers (S6, S9).

The ``noop`` environment keeps a warm worker for many sessions. ``cold`` starts a worker for each session.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from bench.load.closed_loop import Round, Step, at_once, connections
from bench.load.episodes import Episode
from bench.load.http1 import Address, Connection, connect
from bench.reporting.report import NOTHING, Goal, Report, Table, number, p50_p99
from bench.reporting.stats import latencies, percentile
from bench.subjects.targets import ENVSERVER, GATEWAY, OFFICIAL, Servers

S6_P50_MS, S6_P99_MS = 3.0, 10.0
S9_LAST_S = 0.5
OPENED = (*OFFICIAL, ENVSERVER, GATEWAY)
BURST_S = 60.0
BURST_COLUMNS = ("half of them", "the last", "the last, worst burst", "errors")
WARM_SHARE = 10
"""Divisor of the number of openings that gives the number of warm-up openings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Numbers of openings and bursts."""

    opens: int = 2_000
    burst: int = 256
    bursts: int = 7
    cold_opens: int = 10


QUICK = Plan(opens=100, bursts=1, cold_opens=2)


@dataclass(slots=True)
class Opens:
    """Samples of one server, in seconds."""

    create_s: list[float] = field(default_factory=list)
    """``/create`` alone."""
    first_prompt_s: list[float] = field(default_factory=list)
    """``/create`` and ``/prompt``. S6 bounds this time."""
    whole_s: list[float] = field(default_factory=list)
    """``/create_session``, ``/create`` and ``/prompt``, as in the SDKs."""


@dataclass(slots=True)
class Bursts:
    """All bursts on one server."""

    last_s: list[float] = field(default_factory=list)
    """Seconds from the start of a burst to its last prompt, including the connections."""
    p50_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, became: Round) -> None:
        """Add one burst."""
        self.errors += became.errors
        if became.samples_s:
            self.last_s.append(max(became.samples_s))
            self.p50_s.append(percentile(became.samples_s, 0.5))

    def cells(self) -> list[str]:
        """Return the cells of `BURST_COLUMNS`."""
        times = [median(self.p50_s), median(self.last_s), max(self.last_s)] if self.last_s else []
        return [*([number(time * 1e3) for time in times] or [NOTHING] * 3), str(sum(self.errors.values()))]


async def run(servers: Servers, plan: Plan) -> Report:
    """Run all measurements of this part and return their report.

    Raises:
        StartError: A server does not start.
        WrongAnswer: A sequential opening failed.
    """
    opens: dict[str, Opens] = {}
    bursts: dict[str, Bursts] = {}
    cold: list[float] = []
    for name in OPENED:
        async with servers.running(name) as process:
            opens[name] = await in_turn(process.address, plan.opens)
            bursts[name] = Bursts()
            for _ in range(plan.bursts):
                bursts[name].add(await _burst(process.address, plan.burst))
            if name == GATEWAY:
                cold = await cold_opens(process.address, plan.cold_opens)
    return make_report(opens, bursts, cold, plan=plan)


async def in_turn(address: Address, count: int, *, environment: str = "noop", warmup: bool = True) -> Opens:
    """Open and end *count* sessions one after the other. *warmup* adds openings before them that do not count."""
    opens = Opens()
    async with connections(address, 1) as (connection,):
        for _ in range(count // WARM_SHARE + 1 if warmup else 0):
            await _open(connection, environment, Opens())
        for _ in range(count):
            await _open(connection, environment, opens)
    return opens


async def _open(connection: Connection, environment: str, opens: Opens) -> None:
    episode = Episode(connection, environment=environment)
    times = [time.perf_counter()]
    for step in (episode.create_session, episode.create, episode.prompt):
        await step()
        times.append(time.perf_counter())
    await episode.delete()
    await episode.delete_session()
    began_at, named_at, created_at, ready_at = times
    opens.create_s.append(created_at - named_at)
    opens.first_prompt_s.append(ready_at - named_at)
    opens.whole_s.append(ready_at - began_at)


async def _burst(address: Address, count: int) -> Round:
    """Open *count* sessions on one task at the same moment, each over a new connection. End them afterwards."""
    opened: list[Episode] = []

    async def one(_: int) -> None:
        connection = await connect(address)
        episode = Episode(connection)
        opened.append(episode)
        await episode.create()
        await episode.prompt()

    try:
        became = await at_once([one] * count, within_s=BURST_S)
        if not became.errors:
            (await at_once([_ending(episode) for episode in opened], within_s=BURST_S)).raise_errors()
    finally:
        for episode in opened:
            episode.connection.close()
    return became


def _ending(episode: Episode) -> Step:
    async def end(_: int) -> None:
        await episode.delete()

    return end


async def cold_opens(address: Address, count: int) -> list[float]:
    """Return the seconds from ``/create`` to the prompt if each session starts its own worker."""
    return (await in_turn(address, count, environment="cold")).first_prompt_s


def make_report(opens: dict[str, Opens], bursts: dict[str, Bursts], cold_s: Sequence[float], *, plan: Plan) -> Report:
    """Turn samples into a report. *cold_s* are the seconds of openings with a worker's start."""
    return Report(
        name="opens",
        figures={
            "plan": asdict(plan),
            "in_turn": {name: open_figures(each) for name, each in opens.items()},
            "bursts": {name: burst_figures(each) for name, each in bursts.items()},
            "cold_process_ms": [each * 1e3 for each in cold_s],
        },
        goals=_goals(opens[GATEWAY], bursts[GATEWAY], plan.burst),
        tables=[
            open_table("Opening an episode on a warm pool, ms: p50 / p99", opens),
            _burst_table(bursts, plan.burst),
        ],
        errors=sum(sum(each.errors.values()) for each in bursts.values()),
        not_comparable=(
            "A server that is called directly has no pool. Its times are the cost of an opening without a gateway.",
        ),
    )


def open_figures(opens: Opens) -> dict[str, Any]:
    """Return one server's openings for the JSON."""
    return {
        "create": asdict(latencies(opens.create_s)),
        "create_and_prompt": asdict(latencies(opens.first_prompt_s)),
        "create_session_create_and_prompt": asdict(latencies(opens.whole_s)),
    }


def burst_figures(bursts: Bursts) -> dict[str, Any]:
    """Return one server's bursts for the JSON."""
    return {
        "last_ms": median(bursts.last_s) * 1e3 if bursts.last_s else None,
        "last_ms_by_burst": [each * 1e3 for each in bursts.last_s],
        "p50_ms": median(bursts.p50_s) * 1e3 if bursts.p50_s else None,
        "errors": dict(bursts.errors),
    }


def _goals(opens: Opens, bursts: Bursts, size: int) -> list[Goal]:
    first = latencies(opens.first_prompt_s)
    what = "create to first prompt on a warm pool of processes"
    goals = [
        Goal(id="S6", what=f"{what}, p50", value=first.p50_ms, bound=S6_P50_MS, unit="ms"),
        Goal(id="S6", what=f"{what}, p99", value=first.p99_ms, bound=S6_P99_MS, unit="ms"),
        Goal(id="S9", what=f"failures of bursts of {size} creates", value=sum(bursts.errors.values()), bound=0),
    ]
    if bursts.last_s:
        what = f"last prompt of a burst of {size} creates of one task, shared"
        goals.append(Goal(id="S9", what=what, value=median(bursts.last_s), bound=S9_LAST_S, unit="s"))
    return goals


def open_table(title: str, opens: Mapping[str, Opens]) -> Table:
    """Return a table with one row for each server. Each cell has p50 and p99."""
    rows = []
    for name, each in opens.items():
        found = [latencies(part) for part in (each.create_s, each.first_prompt_s, each.whole_s)]
        rows.append([name, *map(p50_p99, found)])
    return Table(title, ["server", "create", "create, prompt", "create_session, create, prompt"], rows)


def _burst_table(bursts: Mapping[str, Bursts], size: int) -> Table:
    title = f"Bursts of {size} creates of one task, ms from their begin to a prompt"
    return Table(title, ["server", *BURST_COLUMNS], [[name, *each.cells()] for name, each in bursts.items()])

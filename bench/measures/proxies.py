"""Calls through proxies: the gateway, nginx, configurable-http-proxy, httpx and a bare forwarder (S1, S2, S3).

Each proxy has its own worker of the same kind. All proxies run throughout and take turns. Every request is a call of a
session that stays open. The load generator compares each answer as a whole. Afterwards wrk repeats the comparison of
rates with nothing pinned, because the project's own load generator limits the faster proxies.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import Any

from bench.load.closed_loop import Round, Step, connections, load
from bench.load.episodes import Episode
from bench.load.http1 import Connection
from bench.load.wrk import SESSIONS_PER_CALLER
from bench.load.wrk import rate as wrk_rate
from bench.measures.footprint import MIB
from bench.reporting.grid import (
    GENERATOR,
    Cell,
    Grid,
    by_callers,
    columns,
    count_errors,
    figures,
    latency_table,
    rate_table,
    rotated,
    turns,
)
from bench.reporting.report import Goal, Report, Table, number
from bench.reporting.stats import percentile, ratio
from bench.subjects.peers import (
    ALL,
    CALLERS_MAX,
    CHP,
    DIRECTLY,
    GATEWAY,
    GATEWAY_OPEN,
    HTTPX_GATEWAY,
    NGINX,
    OURS,
    PROXY,
    VARIANTS,
    WORKER,
    Cpus,
    Found,
    Subject,
    find,
    running,
    shared_out,
)
from bench.subjects.targets import Servers

TOOL = "echo_inline"
OPENERS = 16
"""Number of connections that open the sessions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The subjects, numbers of callers and durations of the measurement."""

    names: tuple[str, ...] = ALL
    callers: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    rounds: int = 4
    round_s: float = 1.5
    warmup_s: float = 1.0
    pinned: bool = True
    """True to give proxies their own CPU if there are two."""
    wrk_rounds: int = 5
    wrk_round_s: int = 4


QUICK = Plan(
    names=tuple(name for name in ALL if name not in VARIANTS),
    callers=(1, 64, 1024),
    rounds=2,
    round_s=0.4,
    warmup_s=0.2,
    wrk_rounds=2,
    wrk_round_s=1,
)


class Keyed(Episode):
    """An episode that sends a key in every request. A server without keys ignores it."""

    def __init__(self, connection: Connection, key: str) -> None:
        super().__init__(connection, tool=TOOL)
        self._key = key

    @property
    def named(self) -> dict[str, str]:
        """The headers with the session id and the key."""
        return super().named | {"Authorization": f"Bearer {self._key}"}


async def run(servers: Servers, plan: Plan) -> Report:
    """Run all measurements of this part and return their report.

    Raises:
        StartError: A server does not start.
        WrongAnswer: A server cannot open the sessions for the load.
    """
    found = await asyncio.to_thread(find)
    key = secrets.token_hex(16)
    present = [name for name in plan.names if found.has(name)]
    with shared_out(wanted=plan.pinned) as cpus:
        grid, sizes = await _measured(servers, plan, present, found, key, cpus)
    return make_report(
        grid,
        await _wrk_rates(servers, plan, [name for name in WRK_PEERS if name in present], found, key),
        plan=asdict(plan),
        cpus=cpus,
        versions=found.versions() | {"httpx": version("httpx"), "httpcore": version("httpcore")},
        missing=[name for name in plan.names if name not in present] + ([] if found.wrk else ["wrk"]),
        rss_bytes=sizes,
    )


async def _measured(
    servers: Servers, plan: Plan, names: Sequence[str], found: Found, key: str, cpus: Cpus | None
) -> tuple[Grid, dict[str, dict[str, int]]]:
    """Return the rounds' cells, and the resident memory of each proxy and worker, idle and after the load."""
    sizes: dict[str, dict[str, int]] = {}
    async with AsyncExitStack() as stack:
        subjects = []
        for name in names:
            subjects.append(await stack.enter_async_context(running(name, servers, found, key=key, cpus=cpus)))
        for subject in subjects:
            sizes[subject.name] = {f"{part}_idle": used.rss_bytes for part, used in subject.usage().items()}
        sessions = {
            subject.name: await opened(subject, max(callers_of(subject.name, plan)), key) for subject in subjects
        }
        grid = await take_turns(subjects, plan, lambda subject: sessions[subject.name])
        for subject in subjects:
            sizes[subject.name] |= {f"{part}_loaded": used.rss_bytes for part, used in subject.usage().items()}
    return grid, sizes


async def _wrk_rates(
    servers: Servers, plan: Plan, names: Sequence[str], found: Found, key: str
) -> dict[str, list[float]]:
    """Return each round's calls a second by wrk with ``S2_CALLERS`` callers; nothing if wrk is not installed.

    Raises:
        StartError: A server does not start.
        WrongAnswer: A call fails.
    """
    if found.wrk is None:
        return {}
    rates: dict[str, list[float]] = {name: [] for name in names}
    folder = Servers(servers.folder / "wrk")
    folder.folder.mkdir()
    async with AsyncExitStack() as stack:
        subjects = [await stack.enter_async_context(running(name, folder, found, key=key, cpus=None)) for name in rates]
        sessions = {each.name: await opened(each, S2_CALLERS * SESSIONS_PER_CALLER, key) for each in subjects}
        for turn in range(plan.wrk_rounds):
            for subject in rotated(subjects, turn):
                rates[subject.name].append(
                    await wrk_rate(
                        found.wrk,
                        subject.address,
                        sessions[subject.name],
                        callers=S2_CALLERS,
                        duration_s=plan.wrk_round_s,
                        script=folder.folder / "wrk.lua",
                    )
                )
    return rates


def callers_of(name: str, plan: Plan) -> tuple[int, ...]:
    """Return the numbers of callers for *name*, at least the smallest number of the plan."""
    most = max(CALLERS_MAX.get(name, max(plan.callers)), min(plan.callers))
    return tuple(callers for callers in plan.callers if callers <= most)


async def opened(subject: Subject, count: int, key: str) -> list[Episode]:
    """Open *count* sessions, several at a time. Each gets a new connection when it is used.

    Raises:
        WrongAnswer, OSError, ProtocolError: A session cannot be opened.
    """
    episodes: list[Episode] = []
    async with connections(subject.address, min(OPENERS, count)) as over:

        async def some(connection: Connection, share: int) -> None:
            for _ in range(share):
                episode = Keyed(connection, key)
                await episode.create()
                await episode.prompt()
                episodes.append(episode)

        async with asyncio.TaskGroup() as group:
            for place, connection in enumerate(over):
                group.create_task(some(connection, len(range(place, count, len(over)))))
    return episodes


async def take_turns(subjects: Sequence[Subject], plan: Plan, sessions: Callable[[Subject], Sequence[Episode]]) -> Grid:
    """Let the subjects take turns. Each round begins with another subject."""
    grid: Grid = {subject.name: {callers: Cell() for callers in callers_of(subject.name, plan)} for subject in subjects}
    for subject in subjects:
        for callers in {min(grid[subject.name]), max(grid[subject.name])}:  # the latter for the connections behind it
            await _round(subject, sessions(subject)[:callers], plan.warmup_s, Cell())
    for subject, callers in turns(subjects, plan.callers, plan.rounds):
        if (cell := grid[subject.name].get(callers)) is not None:
            await _round(subject, sessions(subject)[:callers], plan.round_s, cell)
    return grid


async def _round(subject: Subject, episodes: Sequence[Episode], round_s: float, cell: Cell) -> None:
    async with connections(subject.address, len(episodes)) as over:
        for episode, connection in zip(episodes, over, strict=True):
            episode.attach(connection)
        before = subject.usage()
        became = await _loaded([episode.call for episode in episodes], round_s)
        cell.add(became, before, subject.usage())


async def _loaded(steps: Sequence[Step], round_s: float) -> Round:
    """Run a round of load. A round whose answers do not come counts as timeouts only."""
    try:
        return await load(steps, duration_s=round_s)
    except TimeoutError:
        return Round(round_s, errors=Counter({"TimeoutError: no answer": len(steps)}))


# -- the report -------------------------------------------------------------------------------------------------------

S1_ADDED_MS, S1_TIMES = 0.25, 8.0
S2_PER_S, S2_CALLERS = 8000.0, 64
S2_TIMES = {HTTPX_GATEWAY: 8.0, CHP: 1.3}
S2_TIMES_WRK = {NGINX: 0.7}
WRK_PEERS = (NGINX, CHP, GATEWAY)
S3_SHARE = 0.8
QUANTILES = 200
"""Number of points of a drawn distribution, without the points of its tail."""
TAIL = (0.9975, 0.999, 0.9995, 0.9999)
DRAWN = (1, 64)
"""Numbers of callers for which distributions are drawn."""

NOT_COMPARABLE = (
    "nginx, configurable-http-proxy and the two forwarders have no sessions, keys, deadlines or typed errors: they "
    "forward bytes. The gateway looks up the session, checks its owner, and sends a new request to its worker.",
    "The bare forwarder only moves bytes. It is the lower bound for Python, and not usable as a gateway.",
    "The httpx gateway is this gateway with httpx as its transport to workers. The difference is the effect of the "
    "gateway's own transport.",
    "The default limits of httpx are 100 connections, of which 20 are kept alive. With more callers, calls wait for "
    "each other.",
    "For each call, httpx searches all connections and all waiting calls. So subjects built on it run with fewer "
    "callers: otherwise a round would take minutes.",
    "nginx runs without buffering, so that an event does not wait for the next one, and with unlimited reuse of "
    "connections.",
    "A rate is limited by the slower of two: the proxy, or the worker with the load generator. If the latter is the "
    "limit, compare the proxies' CPU time. Rates by wrk do not have this limit.",
)
PINNED = (
    "In `proxies` the proxy has CPU {proxy} alone, and its worker shares CPU {load} with the load generator. So does "
    "the worker that is called directly.",
)
UNPINNED = ("In `proxies` no process is pinned: proxies, workers and the load generator share all CPUs.",)


def make_report(
    grid: Grid,
    wrk_rates: Mapping[str, Sequence[float]],
    *,
    plan: Mapping[str, Any],
    cpus: Cpus | None,
    versions: Mapping[str, str | None],
    missing: Sequence[str],
    rss_bytes: Mapping[str, Mapping[str, int]],
) -> Report:
    """Turn cells into a report. Errors of third-party proxies are in the tables, but are not this project's errors."""
    left_out = (
        [f"Left out because the program is not installed (scripts/bench-peers --chp): {', '.join(missing)}."]
        if missing
        else []
    )
    pinning = PINNED if cpus is not None else UNPINNED
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return Report(
        name="proxies",
        figures={
            "plan": plan,
            "cpus": None if cpus is None else asdict(cpus),
            "versions": versions,
            "missing": list(missing),
            "calls": figures(grid),
            "wrk_calls_per_s": wrk_rates,
            "latency_quantiles_ms": {f"c{callers}": _distributions(grid, callers) for callers in DRAWN},
            "rss_bytes": rss_bytes,
        },
        goals=[*goals(grid), *_wrk_goals(wrk_rates)],
        tables=[
            rate_table("Calls a second through a proxy", grid, head="proxy"),
            *_wrk_table(wrk_rates),
            latency_table("Latency of a call through a proxy, ms: p50 / p99", grid, head="proxy"),
            _cpu(grid),
            _memory(rss_bytes),
        ],
        errors=count_errors({name: grid[name] for name in OURS if name in grid}),
        not_comparable=[
            *(each.format(**({} if cpus is None else asdict(cpus))) for each in pinning),
            *([f"Proxies measured: {named}."] if named else []),
            *left_out,
            *NOT_COMPARABLE,
        ],
    )


def goals(grid: Grid) -> Iterator[Goal]:
    """Yield the goals of the gateway with keys, and the same figures of the other subjects."""
    for name in grid:
        if name != DIRECTLY:
            yield from _added(grid, name)
    yield from _throughput(grid)
    yield from _no_collapse(grid)


def _added(grid: Grid, name: str) -> Iterator[Goal]:
    if DIRECTLY not in grid or 1 not in grid[name]:
        return
    through, direct = grid[name][1].latencies, grid[DIRECTLY][1].latencies
    if through is None or direct is None:
        return
    is_goal = name == GATEWAY
    what = f"p50 of a call that a proxy adds, c=1: {name}"
    yield Goal(id="S1", what=what, value=through.p50_ms - direct.p50_ms, bound=S1_ADDED_MS, unit="ms", is_goal=is_goal)
    if name in (GATEWAY, GATEWAY_OPEN):
        what = f"p50 of a call through the proxy ÷ directly, c=1: {name}"
        times = ratio(through.p50_ms, direct.p50_ms)
        yield Goal(id="S1", what=what, value=times, bound=S1_TIMES, unit="x", is_goal=is_goal)


def _throughput(grid: Grid) -> Iterator[Goal]:
    if GATEWAY not in grid or S2_CALLERS not in grid[GATEWAY]:
        return
    cell = grid[GATEWAY][S2_CALLERS]
    at = f"c={S2_CALLERS}"
    yield Goal(
        id="S2", what=f"steps/s through one gateway, {at}", value=cell.rate, bound=S2_PER_S, at_least=True, unit="1/s"
    )
    errors = sum(cell.errors.values())
    yield Goal(id="S2", what=f"errors of these steps, {at}", value=errors, bound=0)
    for name, row in grid.items():
        if name in (GATEWAY, DIRECTLY):
            continue
        times = ratio(cell.rate, row[S2_CALLERS].rate)
        yield Goal(
            id="S2",
            what=f"steps/s, gateway ÷ {name}, {at}",
            value=times,
            bound=S2_TIMES.get(name, 1.0),
            at_least=True,
            unit="x",
            is_goal=name in S2_TIMES,
        )
        if name in (*S2_TIMES, NGINX):
            what = f"CPU time of a step, {name} ÷ gateway, {at}"
            times = ratio(row[S2_CALLERS].cpu_s_per_1000(PROXY), cell.cpu_s_per_1000(PROXY))
            yield Goal(id="S2", what=what, value=times, bound=1.0, at_least=True, unit="x", is_goal=False)


def _wrk_goals(rates: Mapping[str, Sequence[float]]) -> Iterator[Goal]:
    for name in rates:
        if name != GATEWAY and GATEWAY in rates:
            yield Goal(
                id="S2",
                what=f"steps/s by wrk, nothing pinned, gateway ÷ {name}, c={S2_CALLERS}",
                value=median(map(ratio, rates[GATEWAY], rates[name])),
                bound=S2_TIMES_WRK.get(name, 1.0),
                at_least=True,
                unit="x",
                is_goal=name in S2_TIMES_WRK,
            )


def _wrk_table(rates: Mapping[str, Sequence[float]]) -> list[Table]:
    rows = [[name, *(number(bound(row)) for bound in (median, min, max))] for name, row in rates.items() if row]
    title = f"Calls a second through a proxy by wrk, nothing pinned, c={S2_CALLERS}"
    return [Table(title, ["proxy", "median", "lowest round", "highest round"], rows)] if rows else []


def _no_collapse(grid: Grid) -> Iterator[Goal]:
    for name, row in grid.items():
        most = max(row)
        if name == DIRECTLY or most <= S2_CALLERS:
            continue
        is_goal = name == GATEWAY
        what = f"steps/s at c={most:,} ÷ at the best number of callers: {name}"
        share = ratio(row[most].rate, max(cell.rate for cell in row.values()))
        yield Goal(id="S3", what=what, value=share, bound=S3_SHARE, at_least=True, unit="x", is_goal=is_goal)
        if is_goal:
            wrong = sum(row[most].errors.values())
            yield Goal(id="S3", what=f"time-outs and other errors at c={most:,}: {name}", value=wrong, bound=0)


def quantiles(samples_s: Sequence[float]) -> list[tuple[float, float]]:
    """Return few points of the distribution of *samples_s*: shares (0 to 1) and the milliseconds that bound them.

    Raises:
        ValueError: There is no sample.
    """
    ordered = sorted(samples_s)
    shares = [place / QUANTILES for place in range(QUANTILES)] + list(TAIL) + [1.0]
    return [(share, percentile(ordered, share) * 1e3) for share in shares]


def _distributions(grid: Grid, callers: int) -> dict[str, list[tuple[float, float]]]:
    """Return the quantiles of each proxy's latencies with *callers*. A proxy without samples is left out."""
    measured = {name: row[callers].rounds for name, row in grid.items() if callers in row}
    samples = {name: [one for each in rounds for one in each.samples_s] for name, rounds in measured.items()}
    return {name: quantiles(found) for name, found in samples.items() if found}


def _cpu(grid: Grid) -> Table:
    rows = []
    for name in grid:
        for part, label in ((PROXY, name), (WORKER, f"{name}: its worker"), (GENERATOR, f"{name}: its load")):
            if part != PROXY or name != DIRECTLY:
                rows.append([label, *by_callers(grid, name, partial(_cpu_of, part=part))])
    return Table("CPU seconds for 1,000 calls through a proxy, by process", ["process", *columns(grid)], rows)


def _cpu_of(cell: Cell, *, part: str) -> str:
    return number(cell.cpu_s_per_1000(part))


def _memory(rss_bytes: Mapping[str, Mapping[str, int]]) -> Table:
    rows = [
        [name, *(number(sizes[at] / MIB) for at in (f"{PROXY}_idle", f"{PROXY}_loaded"))]
        for name, sizes in rss_bytes.items()
        if f"{PROXY}_idle" in sizes
    ]
    return Table("Resident memory of a proxy, MiB", ["proxy", "idle", "after the load"], rows)

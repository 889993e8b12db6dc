"""Calls and whole episodes a second: the gateway with its worker against official servers called directly (S4, S1).

All servers run throughout and take turns, round after round. So a temporarily slow machine affects all of them. The
load generator shares the machine's CPUs with the loaded server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from bench.load.closed_loop import Step, connections, load
from bench.load.episodes import Episode
from bench.load.http1 import Connection
from bench.measures.footprint import MIB
from bench.reporting.grid import GENERATOR, Cell, Grid, columns, count_errors, figures, latency_table, rate_table, turns
from bench.reporting.report import Goal, Report, Table, number
from bench.reporting.stats import ratio
from bench.subjects.targets import ENVSERVER, FAST, GATEWAY, OFFICIAL, Servers, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Numbers and durations of the measurement."""

    callers: tuple[int, ...] = (1, 16, 64)
    rounds: int = 5
    call_round_s: float = 3.0
    episode_round_s: float = 2.0
    warmup_s: float = 0.5


QUICK = Plan(callers=(1, 64), rounds=2, call_round_s=0.4, episode_round_s=0.2, warmup_s=0.1)


@dataclass(frozen=True, slots=True)
class Subject:
    """One row of the tables: a server, and the called tool."""

    name: str
    target: Target
    tool: str = "echo"


Steps: TypeAlias = Callable[[Subject, Sequence[Connection]], Awaitable[list[Step]]]
"""Makes the repeated step of each caller of one round, for each connection."""


async def run(servers: Servers, plan: Plan) -> Report:
    """Run all measurements of this part and return their report.

    Raises:
        StartError: A server does not start.
        WrongAnswer: A server cannot open the sessions for the load.
    """
    async with AsyncExitStack() as stack:
        targets = []
        for name in (*OFFICIAL, FAST, ENVSERVER, GATEWAY):
            targets.append(await stack.enter_async_context(_target(servers, name)))
        subjects = [Subject(target.name, target) for target in targets]
        ours = [each for each in subjects if each.name in (ENVSERVER, GATEWAY)]
        inline = [Subject(f"{each.name} ({INLINE})", each.target, "echo_inline") for each in ours]
        idle = {target.name: target.rss_bytes() for target in targets}
        calls = await _measure([*subjects, *inline], plan, plan.call_round_s, _Sessions().calls)
        episodes = await _measure(subjects, plan, plan.episode_round_s, _episodes)
        loaded = {target.name: target.rss_bytes() for target in targets}
    return make_report(calls, episodes, plan=asdict(plan), idle_bytes=idle, loaded_bytes=loaded)


@asynccontextmanager
async def _target(servers: Servers, name: str) -> AsyncIterator[Target]:
    async with servers.running(name) as process:
        if name != GATEWAY:
            yield Target(name, process)
            return
        async with connections(process.address, 1) as (connection,):
            await _whole(Episode(connection), 0)  # waits for the first worker
        (worker,) = process.children()
        yield Target(name, process, parts={WORKER: worker})


async def _measure(subjects: Sequence[Subject], plan: Plan, round_s: float, steps: Steps) -> Grid:
    """Let the subjects take turns. Each round begins with another subject."""
    grid: Grid = {subject.name: {callers: Cell() for callers in plan.callers} for subject in subjects}
    for subject in subjects:
        await _round(subject, max(plan.callers), plan.warmup_s, steps, Cell())
    for subject, callers in turns(subjects, plan.callers, plan.rounds):
        await _round(subject, callers, round_s, steps, grid[subject.name][callers])
    return grid


async def _round(subject: Subject, callers: int, round_s: float, steps: Steps, cell: Cell) -> None:
    # New connections each time: official servers close idle connections after 60 s, before the next turn.
    async with connections(subject.target.address, callers) as opened:
        ready = await steps(subject, opened)
        before = subject.target.usage()
        became = await load(ready, duration_s=round_s)
        cell.add(became, before, subject.target.usage())


class _Sessions:
    """Sessions that stay open between rounds, so that rounds of calls contain only calls."""

    def __init__(self) -> None:
        self._open: dict[str, list[Episode]] = {}

    async def calls(self, subject: Subject, opened: Sequence[Connection]) -> list[Step]:
        """Return a session's call for each connection."""
        episodes = self._open.setdefault(subject.name, [])
        for episode, connection in zip(episodes, opened, strict=False):
            episode.attach(connection)
        for connection in opened[len(episodes) :]:
            episode = Episode(connection, environment=subject.target.environment, tool=subject.tool)
            await episode.create_session()
            await episode.create()
            await episode.prompt()
            episodes.append(episode)
        return [episode.call for episode in episodes[: len(opened)]]


async def _episodes(subject: Subject, opened: Sequence[Connection]) -> list[Step]:
    """Return a step of one whole episode for each connection."""

    def on(connection: Connection) -> Step:
        def episode(number: int) -> Awaitable[None]:
            made = Episode(connection, environment=subject.target.environment, tool=subject.tool)
            return _whole(made, number)

        return episode

    return [on(connection) for connection in opened]


async def _whole(episode: Episode, number: int) -> None:
    await episode.create_session()
    await episode.create()
    await episode.prompt()
    await episode.call(number)
    await episode.delete()
    await episode.delete_session()


# -- the report -------------------------------------------------------------------------------------------------------

WORKER = "worker"
INLINE = "inline"
A_SECOND = f" a second, and as a multiple of {OFFICIAL[0]}"
S1_ADDED_MS, S1_TIMES, S4_TIMES, S4_P99_MS = 0.25, 8.0, 3.0, 35.0

Sizes = Mapping[str, Mapping[str, int]]
"""Resident bytes by target and process."""

NOT_COMPARABLE = (
    "The load generator and the loaded server share this machine's CPUs, so a fast server's rate is limited by both. "
    "The table of CPU time shows the load generator's share.",
    "The gateway's rows are two processes, gateway and worker, which may use two CPUs. An official server is one "
    "process.",
    "Official servers keep each result for 60 s and become slower as results accumulate, also over rounds.",
)


def make_report(
    calls: Grid, episodes: Grid, *, plan: Mapping[str, Any], idle_bytes: Sizes, loaded_bytes: Sizes
) -> Report:
    """Turn cells into a report, with *idle_bytes* before and *loaded_bytes* after all rounds."""
    return Report(
        name="calls",
        figures={
            "plan": plan,
            "calls": figures(calls),
            "episodes": figures(episodes),
            "idle_rss_bytes": idle_bytes,
            "loaded_rss_bytes": loaded_bytes,
        },
        goals=[*_against_official(calls, episodes), *_against_direct(calls)],
        tables=[
            rate_table(f"Calls{A_SECOND}", calls, baseline=OFFICIAL[0]),
            latency_table("Latency of a call, ms: p50 / p99", calls),
            rate_table(f"Whole episodes (6 requests each){A_SECOND}", episodes, baseline=OFFICIAL[0]),
            latency_table("Latency of a whole episode, ms: p50 / p99", episodes),
            _cpu(calls),
            _memory(idle_bytes, loaded_bytes),
        ],
        errors=count_errors(calls) + count_errors(episodes),
        not_comparable=NOT_COMPARABLE,
    )


def _against_official(calls: Grid, episodes: Grid) -> Iterator[Goal]:
    most = max(calls[GATEWAY])
    through = calls[GATEWAY][most]
    for name in (*OFFICIAL, FAST):
        what = f"calls/s through gateway and worker ÷ {name} directly, c={most}"
        yield Goal(
            id="S4",
            what=what,
            value=ratio(through.rate, calls[name][most].rate),
            bound=S4_TIMES,
            at_least=True,
            unit="x",
            is_goal=name in OFFICIAL,
        )
    if (found := through.latencies) is not None:
        what = f"p99 of a call through gateway and worker, c={most}"
        yield Goal(id="S4", what=what, value=found.p99_ms, bound=S4_P99_MS, unit="ms")
    for name in OFFICIAL:
        what = f"episodes/s through gateway and worker ÷ {name} directly, c={most}"
        times = ratio(episodes[GATEWAY][most].rate, episodes[name][most].rate)
        yield Goal(id="S4", what=what, value=times, bound=1.0, at_least=True, unit="x", is_goal=False)


def _against_direct(calls: Grid) -> Iterator[Goal]:
    for suffix in ("", f" ({INLINE})"):
        through, direct = calls[GATEWAY + suffix][1].latencies, calls[ENVSERVER + suffix][1].latencies
        if through is None or direct is None:
            continue
        what = f"p50 of a call that the gateway adds, c=1{suffix}"
        yield Goal(id="S1", what=what, value=through.p50_ms - direct.p50_ms, bound=S1_ADDED_MS, unit="ms")
        what = f"p50 of a call through the gateway ÷ directly, c=1{suffix}"
        yield Goal(id="S1", what=what, value=ratio(through.p50_ms, direct.p50_ms), bound=S1_TIMES, unit="x")


def _cpu(calls: Grid) -> Table:
    rows = []
    for name, row in calls.items():
        parts = [part for part in next(iter(row.values())).cpu_s if part != GENERATOR]
        for part in parts:
            label = f"{name}: {part}" if part == WORKER else name
            rows.append([label, *(number(cell.cpu_s_per_1000(part)) for cell in row.values())])
        rows.append([f"{name}: its load", *(number(cell.cpu_s_per_1000(GENERATOR)) for cell in row.values())])
    return Table("CPU seconds for 1,000 calls, by process", ["process", *columns(calls)], rows)


def _memory(idle: Sizes, loaded: Sizes) -> Table:
    rows = [
        [name if part == name else f"{name}: {part}", number(size / MIB), number(loaded[name][part] / MIB)]
        for name, parts in idle.items()
        for part, size in parts.items()
    ]
    return Table("Resident memory, MiB", ["process", "before the load", "after it"], rows)

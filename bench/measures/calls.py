"""Calls and whole episodes a second: the gateway with its worker against official servers called directly (S4, S1).

All servers run throughout and take turns, round after round, so that a machine that is slower for a while is so for
all of them. The load generator shares the machine's CPUs with the server that it loads.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import TypeAlias

from bench.load.closed_loop import Step, connections, load
from bench.load.episodes import Episode
from bench.load.http1 import Connection
from bench.measures.calls_report import INLINE, WORKER, make_report
from bench.reporting.grid import Cell, Grid
from bench.reporting.report import Report
from bench.subjects.targets import ENVSERVER, FAST, GATEWAY, OFFICIAL, Servers, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long to measure what."""

    callers: tuple[int, ...] = (1, 16, 64)
    rounds: int = 5
    call_round_s: float = 3.0
    episode_round_s: float = 2.0
    warmup_s: float = 0.5


QUICK = Plan(callers=(1, 64), rounds=2, call_round_s=0.4, episode_round_s=0.2, warmup_s=0.1)


@dataclass(frozen=True, slots=True)
class Subject:
    """One row of the tables: a server, and the tool that is called on it."""

    name: str
    target: Target
    tool: str = "echo"


Steps: TypeAlias = Callable[[Subject, Sequence[Connection]], Awaitable[list[Step]]]
"""Makes what the callers of one round repeat, one on each connection."""


async def run(servers: Servers, plan: Plan) -> Report:
    """Measure.

    Raises:
        StartError: a server does not start.
        WrongAnswer: a server can't even open the sessions that are to be loaded.
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
    """Let the subjects take turns; each round begins with another one."""
    grid: Grid = {subject.name: {callers: Cell() for callers in plan.callers} for subject in subjects}
    for subject in subjects:
        await _round(subject, max(plan.callers), plan.warmup_s, steps, Cell())
    for turn in range(plan.rounds):
        first = turn % len(subjects)
        for callers in plan.callers:
            for subject in (*subjects[first:], *subjects[:first]):
                await _round(subject, callers, round_s, steps, grid[subject.name][callers])
    return grid


async def _round(subject: Subject, callers: int, round_s: float, steps: Steps, cell: Cell) -> None:
    # New connections each time: the official servers close one after 60 s, and a turn may come later than that.
    async with connections(subject.target.address, callers) as opened:
        ready = await steps(subject, opened)
        before = subject.target.usage()
        became = await load(ready, duration_s=round_s)
        cell.add(became, before, subject.target.usage())


class _Sessions:
    """Sessions that stay open from round to round, so that rounds of calls hold calls only."""

    def __init__(self) -> None:
        self._open: dict[str, list[Episode]] = {}

    async def calls(self, subject: Subject, opened: Sequence[Connection]) -> list[Step]:
        """A session's calls, on each connection."""
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
    """Whole episodes one after the other, on each connection."""

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

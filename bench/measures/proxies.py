"""Calls through proxies: the gateway beside nginx, configurable-http-proxy, httpx and a bare forwarder (S1, S2, S3).

Each proxy has a worker of its own, of the same kind, and all run throughout and take turns. Every request is a call of
a session that stays open, and each answer is compared whole.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version

from bench.load.closed_loop import Round, Step, connections, load
from bench.load.episodes import Episode
from bench.load.http1 import Connection
from bench.measures.proxies_report import make_report
from bench.reporting.grid import Cell, Grid
from bench.reporting.report import Report
from bench.subjects.peers import ALL, CALLERS_MAX, VARIANTS, Cpus, Found, Subject, find, running, shared_out
from bench.subjects.targets import Servers

TOOL = "echo_inline"
OPENERS = 16
"""Connections over which sessions are opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long to measure what."""

    names: tuple[str, ...] = ALL
    callers: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    rounds: int = 4
    round_s: float = 1.5
    warmup_s: float = 1.0
    pinned: bool = True
    """Whether to give proxies a CPU of their own, where there are two."""


QUICK = Plan(
    names=tuple(name for name in ALL if name not in VARIANTS),
    callers=(1, 64, 1024),
    rounds=2,
    round_s=0.4,
    warmup_s=0.2,
)


class Keyed(Episode):
    """An episode that shows a key in every request; who asks for none takes no notice."""

    def __init__(self, connection: Connection, key: str) -> None:
        super().__init__(connection, tool=TOOL)
        self._key = key

    @property
    def named(self) -> dict[str, str]:
        """The session, and who asks."""
        return super().named | {"Authorization": f"Bearer {self._key}"}


async def run(servers: Servers, plan: Plan) -> Report:
    """Measure.

    Raises:
        StartError: a server does not start.
        WrongAnswer: a server can't even open the sessions that are to be loaded.
    """
    found = await asyncio.to_thread(find)
    key = secrets.token_hex(16)
    present = [name for name in plan.names if found.has(name)]
    with shared_out(wanted=plan.pinned) as cpus:
        grid, sizes = await _measured(servers, plan, present, found, key, cpus)
    return make_report(
        grid,
        plan=asdict(plan),
        cpus=cpus,
        versions=found.versions() | {"httpx": version("httpx"), "httpcore": version("httpcore")},
        missing=[name for name in plan.names if name not in present],
        rss_bytes=sizes,
    )


async def _measured(
    servers: Servers, plan: Plan, names: Sequence[str], found: Found, key: str, cpus: Cpus | None
) -> tuple[Grid, dict[str, dict[str, int]]]:
    """What the rounds gave, and the resident memory of each proxy and worker, idle and after the load."""
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
        grid = await turns(subjects, plan, lambda subject: sessions[subject.name])
        for subject in subjects:
            sizes[subject.name] |= {f"{part}_loaded": used.rss_bytes for part, used in subject.usage().items()}
    return grid, sizes


def callers_of(name: str, plan: Plan) -> tuple[int, ...]:
    """The numbers of callers that *name* is measured with; at least the least of the plan."""
    most = max(CALLERS_MAX.get(name, max(plan.callers)), min(plan.callers))
    return tuple(callers for callers in plan.callers if callers <= most)


async def opened(subject: Subject, count: int, key: str) -> list[Episode]:
    """Open *count* sessions, several at a time; each is told its connection when it is used.

    Raises:
        WrongAnswer, OSError, ProtocolError: one can't be opened.
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


async def turns(subjects: Sequence[Subject], plan: Plan, sessions: Callable[[Subject], Sequence[Episode]]) -> Grid:
    """Let the subjects take turns; each round begins with another one."""
    grid: Grid = {subject.name: {callers: Cell() for callers in callers_of(subject.name, plan)} for subject in subjects}
    for subject in subjects:
        for callers in {min(grid[subject.name]), max(grid[subject.name])}:  # the latter for the connections behind it
            await _round(subject, sessions(subject)[:callers], plan.warmup_s, Cell())
    for turn in range(plan.rounds):
        first = turn % len(subjects)
        for callers in plan.callers:
            for subject in (*subjects[first:], *subjects[:first]):
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
    """A round of load; one whose answers do not come at all is a round of nothing but time-outs."""
    try:
        return await load(steps, duration_s=round_s)
    except TimeoutError:
        return Round(round_s, errors=Counter({"TimeoutError: no answer": len(steps)}))

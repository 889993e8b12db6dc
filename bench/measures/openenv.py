"""Steps a second over OpenEnv's WebSocket: through gateway and worker, against the official server directly (S5).

The part also measures the cost of the gateway before that same server, a third-party image to the gateway. It measures
the memory of an open socket with an episode (S11), and how long a large result of one session delays another's steps
(S17). All servers run throughout and take turns, round after round.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from statistics import median

from bench.load.closed_loop import load
from bench.load.websocket import Player, connect_socket, fetch_large
from bench.measures.footprint import KIB
from bench.reporting.grid import GENERATOR, Cell, Grid, columns, count_errors, figures, latency_table, rate_table, turns
from bench.reporting.report import Goal, Report, Table, beside, number
from bench.reporting.stats import latencies, ratio
from bench.subjects.processes import ServerProcess, StartError
from bench.subjects.targets import BENCH, GATEWAY, UVICORN_READY, Servers, Target

VENVS = BENCH.parent / ".venv-openenv"
OFFICIAL = {
    "openenv": ("0.10.0", "sync"),
    "openenv-fast": ("server", "sync"),
    "openenv-fast (async)": ("server", "async"),
}
"""The official server's venv and its environment's kind: as the package installs it, and on uvloop."""
OURS = {GATEWAY: "counting", f"{GATEWAY} (inline)": "counting-inline"}
BEFORE = "gateway before openenv"
"""The gateway that relays frames unchanged to and from the official server."""
S5_TIMES, S11_SOCKET_KIB, S17_MS = 1.0, 25.0, 200.0
LARGE_S = 60.0
"""Maximum seconds without a byte of a large result."""
NOT_COMPARABLE = (
    "The load generator and the loaded server share this machine's CPUs. The table of CPU time shows the load "
    "generator's share.",
    "The gateway's rows are two processes, gateway and worker, which may use two CPUs. The official server is one "
    "process.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Numbers and durations of the measurement."""

    callers: tuple[int, ...] = (1, 16, 64)
    rounds: int = 5
    round_s: float = 3.0
    warmup_s: float = 0.5
    resets: int = 500
    sockets: int = 1_000
    """Number of open sockets, each with an episode, for the measurement of memory."""
    large_characters: int = 20_000_000
    """Characters of the result that must not delay another session's steps."""


QUICK = Plan(rounds=2, round_s=0.4, warmup_s=0.1, resets=50, sockets=200)


@dataclass(frozen=True, slots=True)
class Subject:
    """One row of the tables."""

    name: str
    target: Target
    path: str
    """Path of its socket."""


async def run(made: Servers, plan: Plan) -> Report:
    """Run all measurements of this part and return their report.

    Raises:
        StartError: A server does not start, or the official server is not installed.
        WrongAnswer: A server cannot open the episodes for the load.
    """
    async with AsyncExitStack() as stack:
        subjects = [await stack.enter_async_context(_official(made, name)) for name in OFFICIAL]
        subjects.append(await stack.enter_async_context(_before(made, subjects[0])))
        subjects += await stack.enter_async_context(_gateway(made))
        grid: Grid = {subject.name: {callers: Cell() for callers in plan.callers} for subject in subjects}
        for subject in subjects:
            await _round(subject, max(plan.callers), plan.warmup_s, Cell())
        for subject, callers in turns(subjects, plan.callers, plan.rounds):
            await _round(subject, callers, plan.round_s, grid[subject.name][callers])
        resets = {subject.name: await _resets(subject, plan.resets) for subject in subjects}
        sockets = {
            subject.name: await _socket_kib(subject, plan.sockets)
            for subject in subjects
            if subject.name in (GATEWAY, *OFFICIAL)
        }
        ours = next(subject for subject in subjects if subject.name == GATEWAY)
        delays = [await _delays(ours, plan.large_characters) for _ in range(plan.rounds)]
    return make_report(grid, resets, sockets, delays, plan=plan)


@asynccontextmanager
async def _official(made: Servers, name: str) -> AsyncIterator[Subject]:
    venv, kind = OFFICIAL[name]
    python = VENVS / venv / "bin" / "python"
    if not python.exists():
        raise StartError(f"{python}: not there; run scripts/openenv-clients --server")
    process = ServerProcess(
        [str(python), "-W", "ignore", str(BENCH / "references" / "openenv_server.py"), kind],
        variables={"NO_COLOR": "1"},
        ready=UVICORN_READY,
        log=made.folder / f"{venv}-{kind}.log",
    )
    try:
        await process.start()
        yield Subject(name, Target(name, process), "/ws")
    finally:
        await process.stop()


@asynccontextmanager
async def _gateway(made: Servers) -> AsyncIterator[list[Subject]]:
    """Start the gateway with one worker for each of its environments."""
    async with made.running(GATEWAY, {"GATEWAY_ENVIRONMENTS": ",".join(OURS.values())}) as process:
        paths = {name: f"/openenv/{environment}/ws" for name, environment in OURS.items()}
        for name, path in paths.items():
            async with _playing(Subject(name, Target(name, process), path), 1):
                pass  # waits for the first worker
        # Each environment has one worker. The process does not show its environment, but an unused worker is idle.
        workers = {f"worker {number}": pid for number, pid in enumerate(sorted(process.children()), 1)}
        yield [Subject(name, Target(name, process, parts=workers), path) for name, path in paths.items()]


@asynccontextmanager
async def _before(made: Servers, official: Subject) -> AsyncIterator[Subject]:
    """Start a further gateway before the *official* server, which also serves other subjects."""
    url = f"http://127.0.0.1:{official.target.address.port}"
    async with made.running(GATEWAY, {"GATEWAY_STATIC": f"counting={url}", "GATEWAY_ENVIRONMENTS": ""}) as process:
        parts = {"its server": official.target.process.pid}
        yield Subject(BEFORE, Target(BEFORE, process, parts=parts), "/openenv/counting/ws")


@asynccontextmanager
async def _playing(subject: Subject, count: int) -> AsyncIterator[list[Player]]:
    """Open *count* episodes, each on its own socket."""
    players: list[Player] = []
    try:
        for _ in range(count):
            players.append(Player(await connect_socket(subject.target.address, subject.path)))
            await players[-1].reset()
        yield players
    finally:
        for player in players:
            player.socket.close()


async def _round(subject: Subject, callers: int, round_s: float, cell: Cell) -> None:
    async with _playing(subject, callers) as players:
        before = subject.target.usage()
        became = await load([player.step for player in players], duration_s=round_s)
        cell.add(became, before, subject.target.usage())


async def _resets(subject: Subject, count: int) -> list[float]:
    """Return the seconds of *count* sequential resets on one socket, with a step after each."""
    found = []
    async with _playing(subject, 1) as (player,):
        for _ in range(count):
            began_at = time.perf_counter()
            await player.reset()
            found.append(time.perf_counter() - began_at)
            await player.step()
    return found


async def _socket_kib(subject: Subject, count: int) -> dict[str, float]:
    """Return the resident memory, in KiB by process, of each of *count* open sockets with an episode.

    This is measured once only. A second time would reuse freed memory and so hide its own cost.
    """
    before = subject.target.rss_bytes()
    async with _playing(subject, count):
        after = subject.target.rss_bytes()
    return {part: (size - before[part]) / KIB / count for part, size in after.items()}


@dataclass(frozen=True, slots=True)
class Delays:
    """The longest step of another session, in seconds, in one round."""

    alone_s: float
    """While no large result was on its way, for as long as one takes."""
    beside_s: float
    """While one was on its way."""
    written_s: float
    """Seconds to write the result once as JSON, which Python does without a pause for other sessions."""


async def _delays(subject: Subject, characters: int) -> Delays:
    began_at = time.perf_counter()
    json.dumps("x" * characters)
    written_s = time.perf_counter() - began_at
    async with _playing(subject, 1) as (player,):
        began_at = time.perf_counter()
        fetched = asyncio.to_thread(fetch_large, subject.target.address, subject.path, characters, LARGE_S)
        beside_s = await _longest(player, asyncio.ensure_future(fetched))
        took_s = time.perf_counter() - began_at
        alone_s = await _longest(player, asyncio.ensure_future(asyncio.sleep(took_s, characters)))
    return Delays(alone_s, beside_s, written_s)


async def _longest(player: Player, until: asyncio.Future[int]) -> float:
    longest_s = 0.0
    while not until.done():
        began_at = time.perf_counter()
        await player.step()
        longest_s = max(longest_s, time.perf_counter() - began_at)
    await until
    return longest_s


# -- the report ---------------------------------------------------------------------------------------------------


def make_report(
    grid: Grid,
    resets: dict[str, list[float]],
    sockets: dict[str, dict[str, float]],
    delays: list[Delays],
    *,
    plan: Plan,
) -> Report:
    """Turn samples into a report, with *resets* in seconds, *sockets* in KiB by process, and *delays* by round."""
    return Report(
        name="openenv",
        figures={
            "plan": asdict(plan),
            "steps": figures(grid),
            "resets": {name: asdict(latencies(found)) for name, found in resets.items()},
            "socket_kib": sockets,
            "delays": [asdict(found) for found in delays],
        },
        goals=[*_goals(grid), _socket_goal(sockets), *_delay_goals(delays, plan)],
        tables=[
            rate_table("Steps a second, and as a multiple of openenv", grid, baseline="openenv"),
            latency_table("Latency of a step, ms: p50 / p99", grid),
            _cpu(grid),
            _reset_table(resets),
            _socket_table(sockets, plan),
        ],
        errors=count_errors(grid),
        not_comparable=NOT_COMPARABLE,
    )


def _goals(grid: Grid) -> list[Goal]:
    pairs = [(GATEWAY, "openenv"), (GATEWAY, "openenv-fast"), (f"{GATEWAY} (inline)", "openenv-fast (async)")]
    return [
        Goal(
            id="S5",
            what=f"steps/s, {ours} ÷ {official} directly, c={callers}",
            value=ratio(grid[ours][callers].rate, grid[official][callers].rate),
            bound=S5_TIMES,
            at_least=True,
            unit="x",
            is_goal=official == "openenv" and callers > 1,
        )
        for ours, official in pairs
        for callers in grid[ours]
    ] + [
        Goal(
            id="relay",
            what=f"steps/s, {BEFORE} ÷ openenv directly, c={callers}",
            value=ratio(grid[BEFORE][callers].rate, grid["openenv"][callers].rate),
            bound=1.0,
            at_least=True,
            unit="x",
            is_goal=False,
        )
        for callers in grid[BEFORE]
    ]


def _socket_goal(sockets: dict[str, dict[str, float]]) -> Goal:
    what = "resident memory of the gateway, for each open WebSocket with an episode"
    return Goal(id="S11", what=what, value=sockets[GATEWAY][GATEWAY], bound=S11_SOCKET_KIB, unit="KiB")


def _delay_goals(delays: list[Delays], plan: Plan) -> list[Goal]:
    what = f"longest step beside another session's result of {plan.large_characters / 1e6:g} MB"
    beside_s = median(found.beside_s for found in delays)
    return [
        Goal(id="S17", what=what, value=1000 * beside_s, bound=S17_MS, unit="ms"),
        beside("S17", f"{what} ÷ writing it once", ratio(beside_s, median(found.written_s for found in delays)), "x"),
        beside("S17", f"{what} ÷ alone", ratio(beside_s, median(found.alone_s for found in delays)), "x"),
    ]


def _cpu(grid: Grid) -> Table:
    rows = []
    for name, row in grid.items():
        for part in next(iter(row.values())).cpu_s:
            if part == GENERATOR or not any(cell.cpu_s[part] for cell in row.values()):
                continue
            label = name if part == name else f"{name}: {part.partition(' ')[0] if name != BEFORE else part}"
            rows.append([label, *(number(cell.cpu_s_per_1000(part)) for cell in row.values())])
        rows.append([f"{name}: its load", *(number(cell.cpu_s_per_1000(GENERATOR)) for cell in row.values())])
    return Table("CPU seconds for 1,000 steps, by process", ["process", *columns(grid)], rows)


def _reset_table(resets: dict[str, list[float]]) -> Table:
    found = {name: latencies(samples) for name, samples in resets.items()}
    rows = [[name, number(it.p50_ms), number(it.p99_ms)] for name, it in found.items()]
    return Table("A reset, one after the other on one socket, ms", ["server", "p50", "p99"], rows)


def _socket_table(sockets: dict[str, dict[str, float]], plan: Plan) -> Table:
    rows = [
        [name if part == name else f"{name}: {part}", number(kib)]
        for name, parts in sockets.items()
        for part, kib in parts.items()
    ]
    return Table(f"Memory of {plan.sockets:,} open sockets with an episode each", ["process", "KiB a socket"], rows)

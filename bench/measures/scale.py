"""The capacity of one gateway: concurrent waiting steps, and sessions that stay idle until they expire (S13).

The steps: thousands of sessions of shared workers take a step of one second at the same moment. The idle sessions have
a number each, and the gateway ends them. Their worker records the time of each end. CPU is counted while no session is
due. ``many_containers`` measures the same with containers.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.load.closed_loop import Round, at_once, connections
from bench.load.http1 import Address, Connection
from bench.load.steps import OrsStepper
from bench.reporting.report import NOTHING, Goal, Report, Table, number
from bench.reporting.stats import latencies, percentile, ratio
from bench.subjects.catalogs import STEPS, steps_toml, write_catalog
from bench.subjects.processes import ServerProcess, Usage, usage
from bench.subjects.redis_server import RedisServer, redis_server
from bench.subjects.targets import GATEWAY, Servers

S13_P99_S, S13_CPU_SHARE, S13_LATE_S = 2.5, 0.01, 1.0
IDLE = "idle"
OPENERS = 32
"""Number of connections that open the idle sessions, one session after the other."""
EARLY_S = 0.05
"""Seconds by which the clocks of two processes and of the store may differ."""
WITHIN_S = 900.0
LOOK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Numbers and durations of the measurement."""

    at_once: int = 4_096
    step_s: float = 1.0
    rounds: int = 3
    idle: int = 100_000
    idle_s: int = 240
    """Seconds after which an idle session ends: longer than all openings and the count of CPU together."""
    still_s: float = 30.0
    """Seconds for which CPU is counted, before the first session is due."""


QUICK = Plan(rounds=1, idle=3_000, idle_s=9, still_s=3.0)


@dataclass(slots=True)
class Idle:
    """Figures of the idle sessions."""

    opened: int = 0
    open_s: float = 0.0
    still_s: float = 0.0
    """Seconds for which CPU was counted; 0 if the first session was due before the last was open."""
    cpu_share: dict[str, float] = field(default_factory=dict)
    """Share of one CPU, by process."""
    cpu_share_of_none: dict[str, float] = field(default_factory=dict)
    """The same share without any session."""
    rss_mib: dict[str, float] = field(default_factory=dict)
    late_s: list[float] = field(default_factory=list)
    """Seconds from each session's due time to its end in its worker."""
    early: int = 0
    """Number of sessions that ended sooner than the idle time after their create request."""
    never: int = 0
    """Number of sessions whose end no worker received."""
    errors: dict[str, int] = field(default_factory=dict)


async def run(servers: Servers, plan: Plan) -> Report:
    """Run all measurements of this part and return their report.

    Raises:
        StartError: A server does not start.
        WrongAnswer: The sessions for the steps cannot be opened.
    """
    steps = await _steps(servers, plan)
    idle = await _idle(servers, plan)
    return make_report(steps, idle, plan=plan)


# -- steps at once ------------------------------------------------------------------------------------------------


async def _steps(servers: Servers, plan: Plan) -> list[Round]:
    pool = {"slots": plan.at_once // 2 + 64, "min_workers": 2, "max_workers": 2}
    folder = _folder(servers, "steps")
    settings = write_catalog(folder, **{STEPS: steps_toml(STEPS, pool=pool)})
    async with redis_server(folder) as store:
        variables = settings | {"GATEWAY_STORE": store.url}
        async with (
            servers.running(GATEWAY, variables) as process,
            connections(process.address, plan.at_once) as opened,
        ):
            steppers = [OrsStepper(connection, STEPS) for connection in opened]
            await _each(steppers, lambda stepper: stepper.open())
            rounds = [await _round(steppers, turn, plan) for turn in range(plan.rounds)]
            await _each(steppers, lambda stepper: stepper.end())
    return rounds


async def _round(steppers: Sequence[OrsStepper], turn: int, plan: Plan) -> Round:
    async def step(place: int) -> None:
        await steppers[place].step(f"step-{turn}", plan.step_s)

    return await at_once([step] * len(steppers), within_s=WITHIN_S)


async def _each(steppers: Sequence[OrsStepper], act: Any) -> None:
    """Run *act* on each of *steppers*, ``OPENERS`` at a time."""
    left = iter(steppers)

    async def some(_: int) -> None:
        for stepper in left:
            await act(stepper)

    (await at_once([some] * OPENERS, within_s=WITHIN_S)).raise_errors()


# -- idle sessions ------------------------------------------------------------------------------------------------


async def _idle(servers: Servers, plan: Plan) -> Idle:
    workers = 4
    pool = {"slots": plan.idle // workers + 64, "min_workers": workers, "max_workers": workers}
    folder = _folder(servers, IDLE)
    tomls = {IDLE: steps_toml(IDLE, pool=pool, timeouts={"idle_s": plan.idle_s})}
    async with redis_server(folder) as store:
        variables = write_catalog(folder, **tomls) | {
            "GATEWAY_STORE": store.url,
            "GATEWAY_SOCKET_DIR": str(folder / "s"),
        }
        async with servers.running(GATEWAY, variables) as process:
            return await _watch(process, store, folder / "s", plan)


async def _watch(process: ServerProcess, store: RedisServer, sockets: Path, plan: Plan) -> Idle:
    idle = Idle()
    idle.cpu_share_of_none = await _cpu_share(process, store, plan.still_s)
    before = _usage(process, store)
    asked, deadlines, became = await _open(process.address, plan)
    idle.opened, idle.open_s, idle.errors = len(deadlines), became.duration_s, dict(became.errors)
    quiet = _usage(process, store)
    idle.rss_mib = {part: (quiet[part].rss_bytes - before[part].rss_bytes) / 2**20 for part in quiet}
    await asyncio.sleep(1.0)  # by then the notes of the last opening are written
    idle.still_s = max(0.0, min(plan.still_s, min(deadlines.values()) - time.time() - 1.0))
    if idle.still_s:
        idle.cpu_share = await _cpu_share(process, store, idle.still_s)
    ends = await _until_ended(sockets, deadlines)
    idle.late_s = [ends[place] - deadline for place, deadline in deadlines.items() if place in ends]
    idle.early = sum(ends[place] < at + plan.idle_s - EARLY_S for place, at in asked.items() if place in ends)
    idle.never = len(deadlines) - len(idle.late_s)
    return idle


async def _cpu_share(process: ServerProcess, store: RedisServer, seconds: float) -> dict[str, float]:
    """Return the share of a CPU that each process uses in *seconds* without requests."""
    began = _usage(process, store)
    await asyncio.sleep(seconds)
    ended = _usage(process, store)
    return {part: (ended[part].cpu_s - began[part].cpu_s) / seconds for part in began}


async def _open(address: Address, plan: Plan) -> tuple[dict[int, float], dict[int, float], Round]:
    """Open the sessions. Return the Unix times of the create request and of the due time by number, and the round."""
    asked: dict[int, float] = {}
    deadlines: dict[int, float] = {}
    numbers = iter(range(plan.idle))

    async with connections(address, OPENERS) as opened:

        async def some(place: int) -> None:
            connection: Connection = opened[place]
            for n in numbers:
                asked[n] = time.time()
                await OrsStepper(connection, IDLE).open({"n": n})
                deadlines[n] = time.time() + plan.idle_s

        became = await at_once([some] * OPENERS, within_s=WITHIN_S)
    return asked, deadlines, became


async def _until_ended(sockets: Path, deadlines: Mapping[int, float]) -> dict[int, float]:
    """Wait until all sessions have ended, or until half a minute passes without an end after the last due time."""
    last, ended_at = max(deadlines.values()), time.time()
    ends: dict[int, float] = {}
    while len(ends) < len(deadlines) and time.time() < max(last, ended_at) + 30:
        await asyncio.sleep(LOOK_S)
        found = await asyncio.to_thread(_read_ends, sockets)
        if len(found) > len(ends):
            ends, ended_at = found, time.time()
    return ends


def _read_ends(sockets: Path) -> dict[int, float]:
    lines = itertools.chain.from_iterable(file.read_text().splitlines() for file in sockets.glob("*/ends"))
    return {int(n): float(at) for n, at in (line.split() for line in lines if line.count(" ") == 1)}


def _usage(process: ServerProcess, store: RedisServer) -> dict[str, Usage]:
    workers = [usage(pid) for pid in process.children()]
    return {
        GATEWAY: process.usage(),
        "redis": store.usage(),
        "its workers": Usage(sum(each.cpu_s for each in workers), sum(each.rss_bytes for each in workers)),
    }


def _folder(servers: Servers, name: str) -> Path:
    folder = servers.folder / name
    folder.mkdir()
    return folder


# -- the report ---------------------------------------------------------------------------------------------------


def make_report(steps: Sequence[Round], idle: Idle, *, plan: Plan) -> Report:
    """Turn samples into a report."""
    failed = sum(plan.at_once - len(became.samples_s) for became in steps)
    return Report(
        name="scale",
        figures={
            "plan": asdict(plan),
            "steps_at_once": [_round_figures(became) for became in steps],
            "idle": {name: value for name, value in asdict(idle).items() if name != "late_s"} | {"late": _late(idle)},
        },
        goals=[*_step_goals(steps, failed, plan), *_idle_goals(idle, plan)],
        tables=[_step_table(steps, plan), _idle_table(idle, plan)],
        errors=failed + sum(idle.errors.values()),
        not_comparable=(
            "One load generator starts all steps of a second, so each time includes the load generator's time to "
            "send and read all of them.",
        ),
    )


def _round_figures(became: Round) -> dict[str, Any]:
    found = asdict(latencies(became.samples_s)) if became.samples_s else None
    return {"latency": found, "errors": dict(became.errors), "generator_cpu_s": became.generator_cpu_s}


def _late(idle: Idle) -> dict[str, float] | None:
    if not idle.late_s:
        return None
    shares = {f"p{share * 100:.0f}_s": percentile(idle.late_s, share) for share in (0.5, 0.99)}
    return shares | {"least_s": min(idle.late_s), "most_s": max(idle.late_s)}


def _step_goals(steps: Sequence[Round], failed: int, plan: Plan) -> list[Goal]:
    what = f"of {plan.at_once:,} shared sessions' steps of {plan.step_s:g} s at once"
    goals = [Goal(id="S13", what=f"{what}, failed", value=failed, bound=0)]
    samples = [sample for became in steps for sample in became.samples_s]
    if samples:
        p99 = percentile(samples, 0.99)
        goals += [
            Goal(id="S13", what=f"{what}, p99", value=p99, bound=S13_P99_S, unit="s"),
            Goal(id="S13", what=f"{what}, p99 ÷ one", value=p99 / plan.step_s, bound=0, unit="x", is_goal=False),
        ]
    return goals


def _idle_goals(idle: Idle, plan: Plan) -> list[Goal]:
    what = f"{plan.idle:,} idle sessions"
    lost = plan.idle - idle.opened + idle.never
    goals = [
        Goal(id="S13", what=f"of {what}, not opened or never ended", value=lost, bound=0),
        Goal(id="S13", what=f"of {what}, ended before their time", value=idle.early, bound=0),
    ]
    goals += [
        Goal(
            id="S13",
            what=f"{what}: share of a CPU while none is due, {part}",
            value=share * 100,
            bound=S13_CPU_SHARE * 100,
            unit="%",
        )
        for part, share in idle.cpu_share.items()
        if part != "its workers"
    ]
    if late := _late(idle):
        goals.append(
            Goal(id="S13", what=f"{what}: behind its time, p50", value=late["p50_s"], bound=S13_LATE_S, unit="s")
        )
        goals.append(
            Goal(id="S13", what=f"{what}: behind its time, the last", value=late["most_s"], bound=S13_LATE_S, unit="s")
        )
    return goals


def _step_table(steps: Sequence[Round], plan: Plan) -> Table:
    rows = []
    for turn, became in enumerate(steps):
        found = latencies(became.samples_s) if became.samples_s else None
        times = [found.p50_ms, found.p99_ms, found.max_ms] if found else []
        shown = [number(each / 1e3) for each in times] or [NOTHING] * 3
        rows.append([str(turn + 1), *shown, number(became.generator_cpu_s), str(plan.at_once - len(became.samples_s))])
    title = f"{plan.at_once:,} sessions of shared workers, each with a step of {plan.step_s:g} s at the same moment, s"
    return Table(title, ["round", "p50", "p99", "the last", "CPU of the generator", "errors"], rows)


def _idle_table(idle: Idle, plan: Plan) -> Table:
    late = _late(idle)
    rows = [
        ["opened", f"{idle.opened:,}"],
        ["opened a second", number(ratio(idle.opened, idle.open_s))],
        *([f"% of a CPU while none is due, {part}", number(each * 100)] for part, each in idle.cpu_share.items()),
        *([f"% of a CPU with no session, {part}", number(each * 100)] for part, each in idle.cpu_share_of_none.items()),
        *([f"memory that they add, MiB, {part}", number(each)] for part, each in idle.rss_mib.items()),
        ["ended before their time", str(idle.early)],
        ["never ended", str(idle.never)],
    ]
    if late:
        rows += [[f"s behind their time, {name}", number(late[key])] for name, key in _LATE.items()]
    return Table(f"{plan.idle:,} idle sessions, which end after {plan.idle_s} s", ["what", ""], rows)


_LATE = {"median": "p50_s", "p99": "p99_s", "the last": "most_s"}

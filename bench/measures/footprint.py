"""Resident memory, and the time from a server's start to its first answer (S11, S12).

"Ready" is the first 200 of ``/health``. "Resident" is the kernel's count for the process itself, with shared pages.
Memory per idle session is the memory that many openings add, divided by their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from bench.load.closed_loop import at_once, connections
from bench.load.episodes import Episode
from bench.reporting.report import Goal, Report, Table, number
from bench.subjects.processes import ServerProcess, usage
from bench.subjects.targets import ENVSERVER, GATEWAY, MATH_SERVER, OFFICIAL, Servers

MIB, KIB = 2**20, 2**10
S11_BARE_MIB, S11_MATH_MIB, S11_SESSION_KIB = 25.0, 150.0, 4.0
S12_BARE_MS, S12_MATH_MS = 250.0, 1500.0
STARTED = (*OFFICIAL, ENVSERVER, MATH_SERVER, GATEWAY)
HOLDING = (*OFFICIAL, ENVSERVER, GATEWAY)
OPENERS = 16
"""Number of connections that open the idle sessions, one session after the other."""
OPEN_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Numbers of starts and of sessions."""

    starts: int = 7
    idle_sessions: int = 10_000


QUICK = Plan(starts=1, idle_sessions=500)


@dataclass(slots=True)
class Starts:
    """All starts of one server."""

    start_ms: list[float] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)
    """Resident MiB right after the first answer."""


@dataclass(frozen=True, slots=True)
class Held:
    """Memory that idle sessions add to one process."""

    process: str
    sessions: int
    kib_a_session: float


async def run(servers: Servers, plan: Plan) -> Report:
    """Run all measurements of this part and return their report.

    Raises:
        StartError: A server does not start.
        WrongAnswer: A server does not open the required number of sessions.
    """
    starts = {name: Starts() for name in STARTED}
    for _ in range(plan.starts + 1):
        for name in STARTED:
            async with servers.running(name) as process:
                starts[name].start_ms.append(process.start_s * 1e3)
                starts[name].rss_mib.append(process.usage().rss_bytes / MIB)
    for each in starts.values():
        # The first start compiles new modules, and reads them from the disk.
        del each.start_ms[0], each.rss_mib[0]
    held = [each for name in HOLDING for each in await _hold(servers, name, plan.idle_sessions)]
    return make_report(starts, held, plan=plan)


async def _hold(servers: Servers, name: str, count: int) -> list[Held]:
    async with servers.running(name) as process:
        # The first sessions load modules and start a worker. These one-time costs do not count.
        await _open(process, OPENERS)
        parts = {name: process.pid}
        if name == GATEWAY:
            (parts["its worker"],) = process.children()
        before = {part: usage(pid).rss_bytes for part, pid in parts.items()}
        await _open(process, count)
        after = {part: usage(pid).rss_bytes for part, pid in parts.items()}
    return [Held(part, count, (after[part] - before[part]) / KIB / count) for part in parts]


async def _open(process: ServerProcess, count: int) -> None:
    """Open *count* sessions, and leave them open."""
    async with connections(process.address, OPENERS) as opened:

        async def some(number_of_opener: int) -> None:
            for _ in range(number_of_opener, count, OPENERS):
                episode = Episode(opened[number_of_opener])
                await episode.create()
                await episode.prompt()

        became = await at_once([some] * OPENERS, within_s=OPEN_S)
    became.raise_errors()


def make_report(starts: dict[str, Starts], held: Sequence[Held], *, plan: Plan) -> Report:
    """Turn samples into a report."""
    return Report(
        name="footprint",
        figures={
            "plan": asdict(plan),
            "starts": {name: _start_figures(each) for name, each in starts.items()},
            "idle_sessions": [asdict(each) for each in held],
        },
        goals=_goals(starts, held),
        tables=[_start_table(starts), _held_table(held)],
        not_comparable=(
            "These workers are local processes with this machine's Python. An image may have another version, and "
            "the start of the container adds to the time.",
        ),
    )


def _start_figures(each: Starts) -> dict[str, Any]:
    return {
        "start_ms": median(each.start_ms),
        "start_ms_by_start": each.start_ms,
        "rss_mib": median(each.rss_mib),
    }


def _goals(starts: dict[str, Starts], held: Sequence[Held]) -> list[Goal]:
    bare, maths = starts[ENVSERVER], starts[MATH_SERVER]
    gateway = next(each for each in held if each.process == GATEWAY)
    what = "resident memory of"
    return [
        Goal(id="S11", what=f"{what} a bare worker", value=median(bare.rss_mib), bound=S11_BARE_MIB, unit="MiB"),
        Goal(id="S11", what=f"{what} a math worker", value=median(maths.rss_mib), bound=S11_MATH_MIB, unit="MiB"),
        Goal(
            id="S11",
            what=f"{what} the gateway, for each idle session",
            value=gateway.kib_a_session,
            bound=S11_SESSION_KIB,
            unit="KiB",
        ),
        Goal(id="S12", what="start of a bare worker", value=median(bare.start_ms), bound=S12_BARE_MS, unit="ms"),
        Goal(id="S12", what="start of a math worker", value=median(maths.start_ms), bound=S12_MATH_MS, unit="ms"),
    ]


def _start_table(starts: dict[str, Starts]) -> Table:
    rows = [
        [
            name,
            number(median(each.start_ms)),
            number(min(each.start_ms)),
            number(max(each.start_ms)),
            number(median(each.rss_mib)),
        ]
        for name, each in starts.items()
    ]
    columns = ["process", "ms, median", "least", "most", "resident then, MiB"]
    return Table("From start to ready", columns, rows)


def _held_table(held: Sequence[Held]) -> Table:
    rows = [[each.process, f"{each.sessions:,}", number(each.kib_a_session)] for each in held]
    return Table("Memory of idle sessions", ["process", "sessions", "KiB a session"], rows)

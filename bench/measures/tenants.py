"""The effect of a trainer at the limits of its key on another trainer's openings and calls.

The measured trainer plays whole episodes, one after the other. In turns it is alone, beside a busy trainer of the same
gateway, and while the busy trainer uses a second gateway on the same machine. The second gateway shares only the CPUs
with the first one, so the difference is the effect of sharing a gateway.

The busy trainer steps all sessions that its key may have without a pause. So the limit of sessions decides how many of
its calls run at once, and the limit of calls how often. All limits of `Plan.busy` are measured.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count, product
from pathlib import Path
from typing import Any

from bench.load import busy_trainer
from bench.load.closed_loop import connections
from bench.load.episodes import Episode
from bench.load.http1 import Address
from bench.reporting.report import Goal, Report, Table, p50_p99
from bench.reporting.stats import Latencies, latencies, median_latencies
from bench.subjects.processes import ServerProcess
from bench.subjects.targets import GATEWAY, Servers
from gateway.settings.keys import NO_LIMITS, KeyLimits, Role, add_key

BOUND = 2.0
"""Largest ratio of a p99 beside a busy trainer to the p99 alone."""
TOOLS = INLINE, IN_THREAD = "echo_inline", "echo"
"""Tools of both trainers. The second one runs in a thread of the worker. All sessions of a shared worker share one
interpreter, so it measures the worker too."""
PLACES = ALONE, ELSEWHERE, BESIDE = "alone", "busy_elsewhere", "beside_a_busy_trainer"
MEASURED = (
    ("opens", "an opening, with its prompt", INLINE, "opens_s"),
    ("calls", "a call", INLINE, "calls_s"),
    ("calls_in_thread", "a call whose tool runs in a thread", IN_THREAD, "calls_s"),
)
"""Each row's name in the figures, its name for people, the tool of both trainers, and the field of `Samples`."""


@dataclass(frozen=True, slots=True)
class Busy:
    """The limits of a busy trainer's key."""

    sessions: int
    """Number of sessions that it may have, and steps without a pause."""
    calls_per_s: float = 0.0
    """Calls per second; 0: no limit."""

    def __str__(self) -> str:
        sessions = "1 session" if self.sessions == 1 else f"{self.sessions} sessions"
        return f"{sessions} and {self.calls_per_s:g} calls/s" if self.calls_per_s else sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Numbers of the measurement."""

    rounds: int = 5
    episodes: int = 150
    """Episodes of the measured trainer in each round."""
    calls: int = 4
    """Calls in each episode."""
    busy: tuple[Busy, ...] = (Busy(1), Busy(2), Busy(4), Busy(4, 1000), Busy(16, 500))
    openers: int = 100
    """Further openings of the busy trainer that wait all the time."""
    opens_per_s: float = 20.0


QUICK = Plan(rounds=3, episodes=100, busy=(Busy(1), Busy(4), Busy(4, 1000)))


@dataclass(slots=True)
class Samples:
    """The measured trainer's times of one round, in seconds."""

    opens_s: list[float] = field(default_factory=list)
    calls_s: list[float] = field(default_factory=list)


Found = dict[tuple[str, str, Busy | None], list[Samples]]
"""The rounds, by tool, place, and busy trainer, which is None if the measured one is alone."""


async def run(servers: Servers, plan: Plan) -> Report:
    """Run all measurements of this part and return their report.

    Raises:
        StartError: A gateway or the busy trainer does not start.
        WrongAnswer: A request of the measured trainer failed.
    """
    path = servers.folder / "keys.json"
    variables = {"GATEWAY_KEYS_FILE": str(path)}
    measured = add_key(path, "measured", role=Role.TRAINER, limits=NO_LIMITS)
    keys = {busy: _busy_key(path, busy, plan) for busy in plan.busy}
    logs = (servers.folder / f"busy-{number}.log" for number in count())
    found: Found = defaultdict(list)
    calls = 0
    async with servers.running(GATEWAY, variables) as gateway, servers.running(GATEWAY, variables) as other:
        for tool in TOOLS:
            await _episodes(gateway.address, measured, tool, plan)  # warms up
        for tool in TOOLS * plan.rounds:
            found[tool, ALONE, None].append(await _episodes(gateway.address, measured, tool, plan))
            for busy, (place, process) in product(plan.busy, ((ELSEWHERE, other), (BESIDE, gateway))):
                arguments = (process.address.port, keys[busy], tool, busy.sessions, plan.openers)
                async with _busy(arguments, next(logs)) as trainer:
                    found[tool, place, busy].append(await _episodes(gateway.address, measured, tool, plan))
                calls += int(re.findall(busy_trainer.CALLS, trainer.output)[-1])
    return make_report(found, busy_calls=calls, plan=plan)


def _busy_key(path: Path, busy: Busy, plan: Plan) -> str:
    limits = KeyLimits(
        max_sessions=busy.sessions, opens_per_s=plan.opens_per_s, calls_per_s=busy.calls_per_s, pool_share=0.5
    )
    return add_key(path, f"busy-{busy.sessions}-{busy.calls_per_s:g}", role=Role.TRAINER, limits=limits)


async def _episodes(address: Address, key: str, tool: str, plan: Plan) -> Samples:
    samples, clock = Samples(), time.perf_counter
    async with connections(address, 1) as (connection,):
        for _ in range(plan.episodes):
            episode = Episode(connection, key=key, tool=tool)
            began_at = clock()
            await episode.create()
            await episode.prompt()
            samples.opens_s.append(clock() - began_at)
            for number in range(plan.calls):
                began_at = clock()
                await episode.call(number)
                samples.calls_s.append(clock() - began_at)
            await episode.delete()
    return samples


@contextlib.asynccontextmanager
async def _busy(arguments: Sequence[object], log: Path) -> AsyncIterator[ServerProcess]:
    """Keep a busy trainer at its limits, in a process of its own: its load must not delay the measurement's clock."""
    command = [sys.executable, "-m", busy_trainer.__name__, *map(str, arguments)]
    process = ServerProcess(command, variables={}, ready=busy_trainer.READY, log=log)
    try:
        await process.start()
        yield process
    finally:
        await process.stop()


def make_report(found: Found, *, busy_calls: int, plan: Plan) -> Report:
    """Turn samples into a report. *busy_calls*: calls of the busy trainer in all rounds."""
    rows, goals = [], []
    figures: dict[str, Any] = {"plan": asdict(plan), "busy_calls": busy_calls}
    for busy, (name, what, tool, kind) in product(plan.busy, MEASURED):
        alone, elsewhere, beside = (
            _of(found[tool, place, trainer], kind)
            for place, trainer in ((ALONE, None), (ELSEWHERE, busy), (BESIDE, busy))
        )
        ratios = {"to_elsewhere": beside.p99_ms / elsewhere.p99_ms, "to_alone": beside.p99_ms / alone.p99_ms}
        measured = dict(zip(PLACES, map(asdict, (alone, elsewhere, beside)), strict=True))
        figures.setdefault(name, {})[str(busy)] = measured | ratios
        times = map(p50_p99, (alone, elsewhere, beside))
        rows.append([what, str(busy), *times, *(f"{ratio:.2f}" for ratio in ratios.values())])
        said = f"p99 of {what} beside a trainer whose key may have {busy}, divided by the p99"
        goals += [
            Goal(
                id="tenants",
                what=f"{said} while that trainer uses another gateway of this machine",
                value=ratios["to_elsewhere"],
                bound=BOUND,
                is_goal=False,
            ),
            Goal(id="tenants", what=f"{said} alone", value=ratios["to_alone"], bound=BOUND),
        ]
    title = "A trainer, and another one that steps all sessions of its key without a pause, ms: p50 / p99"
    head = ["", "its limits", "alone", "busy elsewhere", "beside", "p99 to elsewhere", "p99 to alone"]
    return Report(name="tenants", figures=figures, goals=goals, tables=[Table(title, head, rows)])


def _of(rounds: list[Samples], kind: str) -> Latencies:
    return median_latencies([latencies(getattr(one, kind)) for one in rounds])

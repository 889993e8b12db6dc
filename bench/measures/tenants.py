"""The effect of a trainer at the limits of its key on another trainer's openings and calls.

The measured trainer plays whole episodes, one after the other. In turns it is alone, beside a busy trainer of the same
gateway, and while the busy trainer uses a second gateway on the same machine. The second gateway shares only the CPUs
with the first one, so the difference is the effect of sharing a gateway.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from itertools import count
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
PLACES = ALONE, ELSEWHERE, BESIDE = "alone", "busy_elsewhere", "beside_a_busy_trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Numbers of the measurement."""

    rounds: int = 7
    episodes: int = 150
    """Episodes of the measured trainer in each round."""
    calls: int = 4
    """Calls in each episode."""
    sessions: int = 4
    """Sessions that the busy trainer may have, and steps without a pause."""
    openers: int = 100
    """Further openings of the busy trainer that wait all the time."""
    opens_per_s: float = 20.0


QUICK = Plan(rounds=3, episodes=100)


@dataclass(slots=True)
class Samples:
    """The measured trainer's times of one round, in seconds."""

    opens_s: list[float] = field(default_factory=list)
    calls_s: list[float] = field(default_factory=list)


async def run(servers: Servers, plan: Plan) -> Report:
    """Run all measurements of this part and return their report.

    Raises:
        StartError: A gateway or the busy trainer does not start.
        WrongAnswer: A request of the measured trainer failed.
    """
    path = servers.folder / "keys.json"
    variables = {"GATEWAY_KEYS_FILE": str(path)}
    measured = add_key(path, "measured", role=Role.TRAINER, limits=NO_LIMITS)
    limits = KeyLimits(max_sessions=plan.sessions, opens_per_s=plan.opens_per_s, pool_share=0.5)
    busy = add_key(path, "busy", role=Role.TRAINER, limits=limits)
    logs = (servers.folder / f"busy-{number}.log" for number in count())
    found: dict[str, list[Samples]] = {place: [] for place in PLACES}
    calls = 0
    async with servers.running(GATEWAY, variables) as gateway, servers.running(GATEWAY, variables) as other:
        await _episodes(gateway.address, measured, plan)  # warms up
        for _ in range(plan.rounds):
            found[ALONE].append(await _episodes(gateway.address, measured, plan))
            for place, process in ((ELSEWHERE, other), (BESIDE, gateway)):
                async with _busy(process.address, busy, plan, next(logs)) as trainer:
                    found[place].append(await _episodes(gateway.address, measured, plan))
                calls += int(re.findall(busy_trainer.CALLS, trainer.output)[-1])
    return make_report(found, busy_calls=calls, plan=plan)


async def _episodes(address: Address, key: str, plan: Plan) -> Samples:
    samples, clock = Samples(), time.perf_counter
    async with connections(address, 1) as (connection,):
        for _ in range(plan.episodes):
            episode = Episode(connection, key=key, tool=busy_trainer.TOOL)
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
async def _busy(address: Address, key: str, plan: Plan, log: Path) -> AsyncIterator[ServerProcess]:
    """Keep a busy trainer at its limits, in a process of its own: its load must not delay the measurement's clock."""
    command = [sys.executable, "-m", busy_trainer.__name__]
    command += [str(address.port), key, str(plan.sessions), str(plan.openers)]
    process = ServerProcess(command, variables={}, ready=busy_trainer.READY, log=log)
    try:
        await process.start()
        yield process
    finally:
        await process.stop()


def make_report(found: dict[str, list[Samples]], *, busy_calls: int, plan: Plan) -> Report:
    """Turn samples into a report. *busy_calls*: calls of the busy trainer in all rounds."""
    rows, goals = [], []
    figures: dict[str, Any] = {"plan": asdict(plan), "busy_calls": busy_calls}
    for what, name in (("an opening, with its prompt", "opens"), ("a call", "calls")):
        alone, elsewhere, beside = (_of(found[place], name) for place in PLACES)
        ratios = {"to_elsewhere": beside.p99_ms / elsewhere.p99_ms, "to_alone": beside.p99_ms / alone.p99_ms}
        figures[name] = dict(zip(PLACES, map(asdict, (alone, elsewhere, beside)), strict=True)) | ratios
        rows.append([what, *map(p50_p99, (alone, elsewhere, beside)), *(f"{ratio:.2f}" for ratio in ratios.values())])
        said = f"p99 of {what} beside a trainer at its limits, divided by the p99"
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
    title = "A trainer, and another one at the limits of its key, ms: p50 / p99"
    head = ["", "alone", "busy elsewhere", "beside", "p99 to elsewhere", "p99 to alone"]
    return Report(name="tenants", figures=figures, goals=goals, tables=[Table(title, head, rows)])


def _of(rounds: list[Samples], name: str) -> Latencies:
    return median_latencies([latencies(getattr(one, f"{name}_s")) for one in rounds])

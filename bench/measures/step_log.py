"""What the step log costs: calls a second of a gateway that records every call, and of one that records none.

Both run throughout, and take turns in short rounds, so a slow moment of the machine meets both. The figure is the
median of the ratios of neighboring rounds. The sessions stay open, so the rounds have calls only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from bench.load.closed_loop import connections, load
from bench.load.episodes import Episode
from bench.reporting.report import Goal, Report, Table, number
from bench.subjects.processes import ServerProcess
from bench.subjects.targets import GATEWAY, Servers

SHARE = 0.97
"""Smallest allowed ratio of calls per second with the log to calls per second without it."""
OFF = {"GATEWAY_STEP_LOG_BYTES": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Numbers and durations of the measurement."""

    callers: int = 64
    rounds: int = 60
    round_s: float = 1.0


QUICK = Plan(rounds=10, round_s=0.3)


async def run(servers: Servers, plan: Plan) -> Report:
    """Run the measurement and return its report.

    Raises:
        StartError: A gateway does not start.
        WrongAnswer: A call failed.
    """
    chance = random.Random(1)
    ratios: list[float] = []
    rates: dict[str, list[float]] = {"off": [], "full": []}
    async with servers.running(GATEWAY, OFF) as off, servers.running(GATEWAY) as full:
        both = {"off": off, "full": full}
        sessions = {name: await _sessions(process, plan) for name, process in both.items()}
        cpu_s = {name: process.usage().cpu_s for name, process in both.items()}
        for _ in range(plan.rounds):
            order = list(both)
            chance.shuffle(order)
            for name in order:
                rates[name].append(await _rate(both[name], sessions[name], plan))
            ratios.append(rates["full"][-1] / rates["off"][-1])
        cpu_s = {name: process.usage().cpu_s - cpu_s[name] for name, process in both.items()}
    calls = {name: sum(each) * plan.round_s for name, each in rates.items()}
    return make_report(
        ratios, {name: median(each) for name, each in rates.items()},
        {name: cpu_s[name] / calls[name] * 1e6 for name in rates}, plan,
    )  # fmt: skip


async def _sessions(process: ServerProcess, plan: Plan) -> list[Episode]:
    episodes = []
    async with connections(process.address, plan.callers) as opened:
        for connection in opened:
            episode = Episode(connection, tool="echo_inline")
            await episode.create()
            await episode.prompt()
            episodes.append(episode)
    return episodes


async def _rate(process: ServerProcess, sessions: Sequence[Episode], plan: Plan) -> float:
    async with connections(process.address, plan.callers) as opened:
        for episode, connection in zip(sessions, opened, strict=True):
            episode.attach(connection)
        became = await load([episode.call for episode in sessions], duration_s=plan.round_s)
    became.raise_errors()
    return became.rate


def make_report(ratios: Sequence[float], rates: dict[str, float], cpu_us: dict[str, float], plan: Plan) -> Report:
    """Return the report of the measured ratios, calls a second, and CPU microseconds of a call in the gateway."""
    share = median(ratios)
    figures: dict[str, Any] = {
        "plan": asdict(plan),
        "share_of_calls_per_s": share,
        "calls_per_s": rates,
        "gateway_cpu_us_per_call": cpu_us,
        "shares_by_round": list(ratios),
    }
    goal = Goal(
        id="L1",
        what="calls a second with the full step log, as a share of those without",
        value=share,
        bound=SHARE,
        at_least=True,
    )
    rows = [[name, number(rates[name]), number(cpu_us[name])] for name in rates]
    table = Table("The step log", ("step log", "calls/s", "gateway's CPU us a call"), rows)
    return Report("step_log", figures, [goal], [table])

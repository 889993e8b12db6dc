"""What the step log costs: calls a second in sessions whose calls are recorded, and in sessions whose calls are not.

All sessions are in one gateway and one worker, because two processes of the same program differ by a percent. The
environment ``sampled`` records half of its sessions. The two halves take turns in short rounds, in random order, so a
slow moment of the machine meets both. After each round the log has time to write what it got, and this time belongs to
the round's CPU time. Sessions stay open, so the rounds have calls only.

The callers keep the gateway busy all the time, so its calls a second are the inverse of its CPU time for a call. The
figure is the median of the ratios of neighboring rounds' CPU times: counted calls a second also depend on the callers
and the worker, and vary by ten percent from round to round. Their ratio is reported too.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median, stdev
from typing import Any

from bench.load.closed_loop import connections, load
from bench.load.episodes import Episode, WrongAnswer, ok
from bench.load.http1 import request_bytes
from bench.reporting.report import Goal, Report, Table, number
from bench.subjects.processes import ServerProcess
from bench.subjects.targets import GATEWAY, Servers

SHARE = 0.97
"""Smallest allowed ratio of calls per second with the log to calls per second without it."""
ENVIRONMENT = "sampled"
RECORDED_SHARE = 0.5
"""Share of the sessions that the environment records."""
WRITE_S = 0.3
"""Seconds after a round in which the log writes: more than the pause between its writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Numbers and durations of the measurement."""

    callers: int = 64
    rounds: int = 120
    round_s: float = 0.5


QUICK = Plan(rounds=10, round_s=0.3)


async def run(servers: Servers, plan: Plan) -> Report:
    """Run the measurement and return its report.

    Raises:
        StartError: The gateway does not start.
        WrongAnswer: A call failed.
    """
    chance = random.Random(1)
    rates: dict[str, list[float]] = {"off": [], "full": []}
    cpu_s: dict[str, list[float]] = {"off": [], "full": []}
    """Calls a second, and the gateway's CPU time for a call in seconds, of each round."""
    async with servers.running(GATEWAY, {"GATEWAY_ENVIRONMENTS": ENVIRONMENT}) as gateway:
        sessions = await _sessions(gateway, plan)
        for _ in range(plan.rounds):
            order = list(rates)
            chance.shuffle(order)
            for name in order:
                before_s = gateway.usage().cpu_s
                rate = await _rate(gateway, sessions[name], plan)
                await asyncio.sleep(WRITE_S)
                rates[name].append(rate)
                cpu_s[name].append((gateway.usage().cpu_s - before_s) / (rate * plan.round_s))
    return make_report(rates, cpu_s, plan)


async def _sessions(gateway: ServerProcess, plan: Plan) -> dict[str, list[Episode]]:
    """Open sessions. Return ``plan.callers`` recorded sessions, and as many others."""
    episodes: dict[str, Episode] = {}
    count = 3 * plan.callers  # that one half gets less than a third of them has a probability of 1e-6
    async with connections(gateway.address, count) as opened:
        for connection in opened:
            episode = Episode(connection, environment=ENVIRONMENT, tool="echo_inline")
            await episode.create()
            await episode.prompt()
            episodes[episode.sid] = episode
        listing = request_bytes("GET", f"/admin/v1/episodes?limit={count}", {})
        known = json.loads(ok(await opened[0].request(listing)).body)["episodes"]
    found: dict[str, list[Episode]] = {"off": [], "full": []}
    for line in known:  # the last digits of its lease decide whether a session is recorded
        is_recorded = int(line["id"][-8:], 16) < RECORDED_SHARE * 2**32
        found["full" if is_recorded else "off"].append(episodes[line["name"]])
    if min(map(len, found.values())) < plan.callers:
        raise WrongAnswer(f"of {len(known)} sessions, {len(found['full'])} are recorded: not half of them")
    return {name: some[: plan.callers] for name, some in found.items()}


async def _rate(gateway: ServerProcess, sessions: Sequence[Episode], plan: Plan) -> float:
    async with connections(gateway.address, plan.callers) as opened:
        for episode, connection in zip(sessions, opened, strict=True):
            episode.attach(connection)
        became = await load([episode.call for episode in sessions], duration_s=plan.round_s)
    became.raise_errors()
    return became.rate


def make_report(rates: dict[str, list[float]], cpu_s: dict[str, list[float]], plan: Plan) -> Report:
    """Return the report of calls a second, and of the gateway's CPU seconds for a call, of each round."""
    shares = [off / full for off, full in zip(cpu_s["off"], cpu_s["full"], strict=True)]
    counted = [full / off for off, full in zip(rates["off"], rates["full"], strict=True)]
    figures: dict[str, Any] = {
        "plan": asdict(plan),
        "share_of_calls_per_s": median(shares),
        "standard_error": stdev(shares) / len(shares) ** 0.5,
        "share_of_counted_calls_per_s": median(counted),
        "calls_per_s": {name: median(each) for name, each in rates.items()},
        "gateway_cpu_us_per_call": {name: median(each) * 1e6 for name, each in cpu_s.items()},
        "shares_by_round": shares,
    }
    goal = Goal(
        id="L1",
        what="calls a second with the full step log, as a share of those without",
        value=median(shares),
        bound=SHARE,
        at_least=True,
    )
    rows = [[name, number(median(rates[name])), number(median(cpu_s[name]) * 1e6)] for name in rates]
    table = Table("The step log", ("step log", "calls/s", "gateway's CPU us a call"), rows)
    return Report("step_log", figures, [goal], [table])

"""The effect of a trainer at the limits of its key on another trainer's openings and calls.

The busy trainer holds all the sessions that its key may have and steps them without a pause. Many more of its openings
wait all the time. The other trainer plays whole episodes, one after the other. Rounds without and with the busy trainer
take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.load.closed_loop import FAILURES, connections
from bench.load.episodes import Episode
from bench.load.http1 import Address, connect
from bench.reporting.report import Goal, Report, Table, p50_p99
from bench.reporting.stats import Latencies, latencies, median_latencies
from bench.subjects.targets import GATEWAY, Servers
from gateway.settings.keys import NO_LIMITS, KeyLimits, Role, add_key

BOUND = 2.0
"""Largest ratio of the p99 beside a busy trainer to the p99 alone."""
RETRY_S = 0.05
"""Pause of a waiting opener after a refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Numbers and durations of the measurement."""

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


QUICK = Plan(rounds=2, episodes=30)


@dataclass(slots=True)
class Samples:
    """The measured trainer's times of one round or of all rounds, in seconds."""

    opens_s: list[float] = field(default_factory=list)
    calls_s: list[float] = field(default_factory=list)


async def run(servers: Servers, plan: Plan) -> Report:
    """Run all measurements of this part and return their report.

    Raises:
        StartError: The gateway does not start.
        WrongAnswer: A request of the measured trainer failed.
    """
    path = servers.folder / "keys.json"
    process = servers.make(GATEWAY, {"GATEWAY_KEYS_FILE": str(path)})
    measured = add_key(path, "measured", role=Role.TRAINER, limits=NO_LIMITS)
    limits = KeyLimits(max_sessions=plan.sessions, opens_per_s=plan.opens_per_s, pool_share=0.5)
    busy = add_key(path, "busy", role=Role.TRAINER, limits=limits)
    alone: list[Samples] = []
    beside: list[Samples] = []
    steps = 0
    try:
        await process.start()
        await _episodes(process.address, measured, plan)  # warms up
        for _ in range(plan.rounds):
            alone.append(await _episodes(process.address, measured, plan))
            async with _busy(process.address, busy, plan) as counted:
                beside.append(await _episodes(process.address, measured, plan))
            steps += counted[0]
    finally:
        await process.stop()
    return make_report(alone, beside, steps=steps, plan=plan)


async def _episodes(address: Address, key: str, plan: Plan) -> Samples:
    samples, clock = Samples(), time.perf_counter
    async with connections(address, 1) as (connection,):
        for _ in range(plan.episodes):
            episode = Episode(connection, key=key)
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
async def _busy(address: Address, key: str, plan: Plan) -> AsyncIterator[list[int]]:
    """Keep the busy trainer at its limits. Yield a list whose first element counts its calls."""
    counted, opened = [0], []
    try:
        for _ in range(plan.sessions):
            episode = Episode(await connect(address), key=key)
            opened.append(episode)
            await episode.create()
            await episode.prompt()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_step(episode, counted)) for episode in opened]
            tasks += [group.create_task(_open(address, key)) for _ in range(plan.openers)]
            yield counted
            for task in tasks:
                task.cancel()
    finally:
        for episode in opened:
            episode.connection.close()
            # Over a new connection: the cancelled call may have left half an answer.
            with contextlib.suppress(*FAILURES):
                episode.attach(await connect(address))
                await episode.delete()
                episode.connection.close()


async def _step(episode: Episode, counted: list[int]) -> None:
    while True:
        await episode.call(counted[0])
        counted[0] += 1


async def _open(address: Address, key: str) -> None:
    """Try to open a session again and again. At the limit, each opening waits or is refused."""
    while True:
        connection = await connect(address)
        try:
            await Episode(connection, key=key).create()
        except FAILURES:
            await asyncio.sleep(RETRY_S)
        finally:
            connection.close()


def make_report(alone: list[Samples], beside: list[Samples], *, steps: int, plan: Plan) -> Report:
    """Turn samples into a report. *steps*: calls of the busy trainer in all rounds."""
    rows, goals = [], []
    figures: dict[str, Any] = {"plan": asdict(plan), "busy_calls": steps}
    for what, name in (("an opening, with its prompt", "opens"), ("a call", "calls")):
        one, other = _of(alone, name), _of(beside, name)
        ratio = other.p99_ms / one.p99_ms
        figures[name] = {"alone": asdict(one), "beside_a_busy_trainer": asdict(other), "p99_ratio": ratio}
        rows.append([what, p50_p99(one), p50_p99(other), f"{ratio:.2f}"])
        said = f"p99 of {what} beside a trainer at its limits, divided by the p99 alone"
        goals.append(Goal(id="tenants", what=said, value=ratio, bound=BOUND))
    title = "A trainer alone, and beside another one at the limits of its key, ms: p50 / p99"
    return Report(
        name="tenants",
        figures=figures,
        goals=goals,
        tables=[Table(title, ["", "alone", "beside", "p99 ratio"], rows)],
    )


def _of(rounds: list[Samples], name: str) -> Latencies:
    return median_latencies([latencies(getattr(one, f"{name}_s")) for one in rounds])

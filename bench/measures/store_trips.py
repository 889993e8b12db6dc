"""Round trips to the store per step: Redis' reads, minus its reads for a gateway at rest (S10).

Each caller has a session that takes a step, waits a moment and takes the next. At full speed, the one write a second
would be spread over so many steps that it would not be visible. Before this, the same sessions rest for the same time.
Redis' reads in that time are not the steps' reads.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.load.closed_loop import Round, at_once
from bench.load.http1 import Address
from bench.load.steps import PROTOCOLS, Stepper
from bench.reporting.report import Goal, Report, Table, number
from bench.reporting.stats import ratio
from bench.subjects.catalogs import STEPS, steps_toml, write_catalog
from bench.subjects.redis_server import Counted, RedisServer, redis_server
from bench.subjects.targets import GATEWAY, Servers

S10_TRIPS = 0.05
WITHIN_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Number of sessions, and durations."""

    callers: int = 64
    seconds: float = 20.0
    pause_s: float = 0.2
    """Seconds between two steps of one session."""


QUICK = Plan(seconds=2.0)


@dataclass(frozen=True, slots=True)
class Trips:
    """The counts of one protocol."""

    protocol: str
    steps: int
    seconds: float
    idle: Counted
    """Counts over the same time, with the same sessions at rest."""
    busy: Counted
    errors: Counter[str]

    @property
    def reads_a_step(self) -> float:
        """Round trips to the store for each step."""
        return ratio(max(0, self.busy.reads - self.idle.reads), self.steps)

    @property
    def commands_a_step(self) -> float:
        """Redis commands for each step, including commands within scripts."""
        return ratio(max(0, self.busy.commands - self.idle.commands), self.steps)


async def run(servers: Servers, plan: Plan) -> Report:
    """Run all measurements of this part and return their report.

    Raises:
        StartError: Redis or the gateway does not start.
        WrongAnswer: The sessions cannot be opened.
    """
    found = []
    async with redis_server(servers.folder) as store:
        settings = write_catalog(servers.folder, **{STEPS: steps_toml(STEPS, pool={"slots": 1024})})
        async with servers.running(GATEWAY, settings | {"GATEWAY_STORE": store.url}) as process:
            for protocol in PROTOCOLS:
                found.append(await _trips(protocol, process.address, store, plan))
    return make_report(found, plan=plan)


async def _trips(protocol: str, address: Address, store: RedisServer, plan: Plan) -> Trips:
    steppers: list[Stepper] = []

    async def open_one(_: int) -> None:
        steppers.append(await PROTOCOLS[protocol](address, STEPS))

    (await at_once([open_one] * plan.callers, within_s=WITHIN_S)).raise_errors()
    await _play(steppers, plan, until=time.perf_counter() + 1.0)  # first steps cost more than the steady state
    before = await store.counted()
    await asyncio.sleep(plan.seconds)
    between = await store.counted()
    began_at = time.perf_counter()
    became = await _play(steppers, plan, until=began_at + plan.seconds)
    after = await store.counted()
    seconds = time.perf_counter() - began_at
    await asyncio.gather(*(stepper.end() for stepper in steppers))
    return Trips(protocol, len(became.samples_s), seconds, _less(between, before), _less(after, between), became.errors)


async def _play(steppers: Sequence[Stepper], plan: Plan, *, until: float) -> Round:
    """Let each of *steppers* step and pause until the performance counter reaches *until*."""
    became = Round(0.0)

    async def one(place: int) -> None:
        await asyncio.sleep(plan.pause_s * place / len(steppers))  # spreads the steps over the pause
        turn = 0
        while (began_at := time.perf_counter()) < until or not turn:
            await steppers[place].step(f"{until}-{turn}")
            became.samples_s.append(time.perf_counter() - began_at)
            turn += 1
            await asyncio.sleep(plan.pause_s)

    whole = await at_once([one] * len(steppers), within_s=WITHIN_S + plan.seconds)
    became.errors += whole.errors
    return became


def _less(after: Counted, before: Counted) -> Counted:
    return Counted(after.reads - before.reads, after.commands - before.commands)


# -- the report ---------------------------------------------------------------------------------------------------


def make_report(found: Sequence[Trips], *, plan: Plan) -> Report:
    """Turn counts into a report."""
    return Report(
        name="store",
        figures={"plan": asdict(plan), "trips": [_figures(each) for each in found]},
        goals=[
            Goal(
                id="S10",
                what=f"store round trips for each step in the steady state, {each.protocol}",
                value=each.reads_a_step,
                bound=S10_TRIPS,
            )
            for each in found
        ],
        tables=[_table(found)],
        errors=sum(sum(each.errors.values()) for each in found),
    )


def _figures(each: Trips) -> dict[str, Any]:
    return asdict(each) | {"reads_a_step": each.reads_a_step, "commands_a_step": each.commands_a_step}


def _table(found: Sequence[Trips]) -> Table:
    rows = [
        [
            each.protocol,
            number(each.reads_a_step),
            number(each.commands_a_step),
            number(ratio(each.steps, each.seconds)),
            number(ratio(each.busy.reads, each.seconds)),
            number(ratio(each.idle.reads, each.seconds)),
            str(sum(each.errors.values())),
        ]
        for each in found
    ]
    columns = [
        "protocol",
        "trips a step",
        "commands a step",
        "steps/s",
        "trips/s, stepping",
        "trips/s, at rest",
        "errors",
    ]
    return Table("Round trips to the store", columns, rows)

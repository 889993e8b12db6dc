"""Episodes over AReaL's API on the math environment: many held episodes, and bursts of starts (S9, S11, S13).

As in AReaL's client, each request has its own connection, which is closed after the answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from bench.load.closed_loop import FAILURES, Round, Step, at_once
from bench.load.episodes import WrongAnswer
from bench.load.http1 import Address
from bench.load.steps import ask_areal
from bench.measures.footprint import KIB, S11_SESSION_KIB, Held
from bench.measures.opens import BURST_COLUMNS, S9_LAST_S, Bursts, burst_figures
from bench.reporting.report import NOTHING, Goal, Report, Table, number
from bench.reporting.stats import latencies, percentile
from bench.subjects.processes import ServerProcess, usage
from bench.subjects.targets import GATEWAY, Servers

MATH = "math"
SAMPLE = "sum"
CALLERS = 16
WRONG, NOT_RIGHT = "<answer>-1</answer>", "Not right. Attempts left: 9."
"""The action of each step, and the observation after it. The episode continues."""
ALL_S = 600.0
WARMUP = 64
SHARES = (0.5, 0.95, 0.99)

Act = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Numbers of episodes, and their idle time."""

    episodes: int = 2_048
    idle_s: float = 20.0
    alone: int = 500
    """Number of sequential episodes while the idle episodes are open."""
    burst: int = 256
    bursts: int = 5


QUICK = Plan(idle_s=1.0, alone=200, bursts=3)


@dataclass(slots=True)
class Samples:
    """All samples of a run."""

    acts: dict[str, Round] = field(default_factory=dict)
    """``start``, ``step`` and ``cancel`` of the held episodes, and of sequential episodes meanwhile."""
    active: int = 0
    """Number of active episodes that the gateway reports after the idle time."""
    held: list[Held] = field(default_factory=list)
    bursts: Bursts = field(default_factory=Bursts)


class Client:
    """A trainer's side of the API."""

    def __init__(self, address: Address) -> None:
        self._address = address

    async def start(self) -> str:
        """Start an episode, and return its id.

        Raises:
            WrongAnswer, OSError, ProtocolError: The request failed. All methods here raise these.
        """
        reply = await self._ask("POST", "episode/start", {"sample_id": SAMPLE, "config": {}})
        match reply:
            case {"episode_id": str(episode), "observation": {"type": "text", "content": str()}, "done": False}:
                return episode
        raise WrongAnswer(f"start: {reply!r}"[:200])

    async def step(self, episode: str) -> None:
        """Send a wrong answer. An episode allows several."""
        reply = await self._ask(
            "POST", "episode/step", {"episode_id": episode, "action": {"type": "text", "content": WRONG}}
        )
        match reply:
            case {"observation": {"content": str(seen)}, "reward": 0.0, "done": False} if NOT_RIGHT in seen:
                return
        raise WrongAnswer(f"step: {reply!r}"[:200])

    async def cancel(self, episode: str) -> None:
        """Cancel an episode."""
        reply = await self._ask("POST", "episode/cancel", {"episode_id": episode})
        if reply != {"status": "cancelled", "episode_id": episode}:
            raise WrongAnswer(f"cancel: {reply!r}"[:200])

    async def active(self) -> int:
        """Return the number of active episodes."""
        return int((await self._ask("GET", "health", None))["active_episodes"])

    async def _ask(self, method: str, path: str, body: Any) -> Any:
        return await ask_areal(self._address, MATH, method, path, body)


async def run(servers: Servers, plan: Plan) -> Report:
    """Run all measurements of this part and return their report.

    Raises:
        StartError: The gateway does not start.
    """
    samples = Samples()
    async with servers.running(GATEWAY, {"GATEWAY_ENVIRONMENTS": MATH}) as process:
        client = Client(process.address)
        await _burst(client, WARMUP)
        await _hold(process, client, plan, samples)
        for _ in range(plan.bursts):
            samples.bursts.add(await _burst(client, plan.burst))
    return make_report(samples, plan=plan)


async def _hold(process: ServerProcess, client: Client, plan: Plan, samples: Samples) -> None:
    workers = process.children()
    before = _memory(process.pid, workers)
    held = _Episodes(client)
    samples.acts[f"start, c={CALLERS}"] = await _each(plan.episodes, held.start, CALLERS)
    after = _memory(process.pid, workers)
    samples.held = [Held(name, plan.episodes, (after[name] - before[name]) / KIB / plan.episodes) for name in before]
    await asyncio.sleep(plan.idle_s)
    samples.active = await client.active()
    alone = _Episodes(client)
    samples.acts["start, c=1"] = await _each(plan.alone, alone.start, 1)
    for name, act in (("step", alone.step), ("cancel", alone.cancel)):
        samples.acts[f"{name}, c=1"] = await _each(len(alone.ids), act, 1)
    samples.acts[f"step, c={CALLERS}"] = await _each(len(held.ids), held.step, CALLERS)
    samples.acts[f"cancel, c={CALLERS}"] = await _each(len(held.ids), held.cancel, CALLERS)


class _Episodes:
    """Episodes, addressed by their index."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.ids: list[str] = []

    async def start(self, _: int) -> None:
        self.ids.append(await self._client.start())

    async def step(self, place: int) -> None:
        await self._client.step(self.ids[place])

    async def cancel(self, place: int) -> None:
        await self._client.cancel(self.ids[place])


async def _each(count: int, act: Act, callers: int) -> Round:
    """Run *act* for each of *count* indexes, *callers* at a time. A sample is the time of one call."""
    places = iter(range(count))
    became = Round(0.0)

    async def some(_: int) -> None:
        for place in places:
            began_at = time.perf_counter()
            try:
                await act(place)
            except FAILURES as error:
                became.add_error(error)
            else:
                became.samples_s.append(time.perf_counter() - began_at)

    whole = await at_once([some] * callers, within_s=ALL_S)
    became.duration_s, became.generator_cpu_s = whole.duration_s, whole.generator_cpu_s
    return became


async def _burst(client: Client, count: int) -> Round:
    """Start *count* episodes on one task at the same moment, and cancel them afterwards."""
    started: list[str] = []

    async def start(_: int) -> None:
        started.append(await client.start())

    def ending(episode: str) -> Step:
        async def end(_: int) -> None:
            await client.cancel(episode)

        return end

    became = await at_once([start] * count, within_s=ALL_S)
    ended = await at_once([ending(episode) for episode in started], within_s=ALL_S)
    became.errors += ended.errors
    return became


def _memory(gateway: int, workers: list[int]) -> dict[str, int]:
    return {GATEWAY: usage(gateway).rss_bytes, "its workers": sum(usage(pid).rss_bytes for pid in workers)}


# -- the report ---------------------------------------------------------------------------------------------------


def make_report(samples: Samples, *, plan: Plan) -> Report:
    """Turn samples into a report."""
    errors = sum(sum(became.errors.values()) for became in samples.acts.values())
    burst_errors = sum(samples.bursts.errors.values())
    return Report(
        name="areal",
        figures={
            "plan": asdict(plan),
            "acts": {name: _act_figures(became) for name, became in samples.acts.items()},
            "active_after_idle": samples.active,
            "idle_episodes": [asdict(each) for each in samples.held],
            "bursts": burst_figures(samples.bursts),
        },
        goals=_goals(samples, plan, errors, burst_errors),
        tables=[_act_table(samples, plan), _held_table(samples), _burst_table(samples, plan)],
        errors=errors + burst_errors,
    )


def _act_figures(became: Round) -> dict[str, Any]:
    found = asdict(latencies(became.samples_s)) | _percentiles_ms(became) if became.samples_s else None
    return {"per_s": became.rate, "latency": found, "errors": dict(became.errors)}


def _percentiles_ms(became: Round) -> dict[str, float]:
    return {f"p{share * 100:.0f}_ms": percentile(became.samples_s, share) * 1e3 for share in SHARES}


def _goals(samples: Samples, plan: Plan, errors: int, burst_errors: int) -> list[Goal]:
    lost = plan.episodes - samples.active
    goals = [
        Goal(id="S13", what=f"of {plan.episodes:,} idle AReaL episodes, lost", value=abs(lost), bound=0),
        Goal(id="S13", what="failed starts, steps and cancels beside them", value=errors, bound=0),
        Goal(id="S9", what=f"failures of bursts of {plan.burst} AReaL starts", value=burst_errors, bound=0),
    ]
    for each in samples.held:
        if each.process == GATEWAY:
            what = "resident memory of the gateway, for each idle AReaL episode"
            goals.append(Goal(id="S11", what=what, value=each.kib_a_session, bound=S11_SESSION_KIB, unit="KiB"))
    if samples.bursts.last_s:
        what = f"the last of a burst of {plan.burst} AReaL starts of one task, shared"
        goals.append(Goal(id="S9", what=what, value=median(samples.bursts.last_s), bound=S9_LAST_S, unit="s"))
    return goals


def _act_table(samples: Samples, plan: Plan) -> Table:
    rows = []
    for name, became in samples.acts.items():
        times = list(_percentiles_ms(became).values()) if became.samples_s else []
        shown = [number(time) for time in times] or [NOTHING] * len(SHARES)
        rows.append([name, number(became.rate), *shown, str(sum(became.errors.values()))])
    title = f"AReaL's requests, a connection each, while {plan.episodes:,} episodes are held on shared workers, ms"
    return Table(title, ["request", "1/s", *(f"p{share * 100:.0f}" for share in SHARES), "errors"], rows)


def _held_table(samples: Samples) -> Table:
    rows = [[each.process, f"{each.sessions:,}", number(each.kib_a_session)] for each in samples.held]
    return Table("Memory of idle AReaL episodes", ["process", "episodes", "KiB an episode"], rows)


def _burst_table(samples: Samples, plan: Plan) -> Table:
    title = f"Bursts of {plan.burst} AReaL starts of one task, ms from their begin to an observation"
    return Table(title, ["server", *BURST_COLUMNS], [[GATEWAY, *samples.bursts.cells()]])

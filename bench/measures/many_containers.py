"""Hundreds of live containers, each with the only session of an exclusive environment (S13).

The sessions open through the gateway at the same moment, take a step at the same moment, and end. The engine limits
the openings. The reference is an SDK that starts containers with the same concurrency, on a smaller number.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from docker import APIClient

from bench.load.closed_loop import Round, connections
from bench.load.steps import OrsStepper, all_at_once
from bench.measures.cold import BASE_IMAGE, ENGINE
from bench.reporting.report import Goal, Report, Table, number
from bench.reporting.stats import latencies, ratio
from bench.subjects.catalogs import STEPS_FOLDER, STEPS_IMAGE, steps_toml, write_catalog
from bench.subjects.containers import ENGINE_S, LABEL, build_image
from bench.subjects.processes import ServerProcess
from bench.subjects.redis_server import redis_server
from bench.subjects.targets import GATEWAY, Servers
from gateway.backends.docker.container import LABEL_INSTANCE

ALONE = "alone"
THREADS = 8
"""Number of concurrent starts at the engine, equal to the gateway's limit."""
ALL_S = 900
GONE_LOOK_S = 0.5
LABELS = (LABEL_INSTANCE, LABEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Numbers of sessions and containers."""

    engine: str = ENGINE
    base_image: str = BASE_IMAGE
    sessions: int = 500
    by_sdk: int = 40
    """Number of containers that the SDK starts for comparison."""


QUICK = Plan(sessions=24, by_sdk=12)


@dataclass(slots=True)
class Samples:
    """All samples of a run."""

    opened: Round
    stepped: Round
    alive: int = 0
    """Number of running containers while all sessions are open."""
    gone_s: float = 0.0
    """Seconds from the last end until no container is left."""
    left: int = 0
    memory_mib: float = 0.0
    """Decrease of the machine's available memory while all containers run."""
    gateway_mib: float = 0.0
    """Increase of the gateway's resident memory."""
    sdk_s: float = 0.0
    """Seconds for all of the SDK's containers together."""
    errors: Counter[str] = field(default_factory=Counter)


class Engine:
    """The engine, without the gateway."""

    def __init__(self, client: APIClient, instance: str) -> None:
        self.client = client
        self._instance = instance

    def alive(self) -> int:
        """Return the number of running containers of this run."""
        return len(self._list(LABEL_INSTANCE, all=False))

    def start_all(self, count: int) -> float:
        """Create and start *count* containers, ``THREADS`` at a time. Return the seconds taken, and remove them."""
        with ThreadPoolExecutor(THREADS) as threads:
            began_at = time.perf_counter()
            made = list(threads.map(lambda _: self._start(), range(count)))
            took_s = time.perf_counter() - began_at
            list(threads.map(partial(self.client.remove_container, force=True), made))
        return took_s

    def remove_all(self) -> None:
        """Remove the remaining containers of this run."""
        for label in LABELS:
            for id in self._list(label, all=True):
                self.client.remove_container(id, force=True)

    def _start(self) -> str:
        host = self.client.create_host_config(network_mode="none", init=True)
        container = self.client.create_container(STEPS_IMAGE, labels={LABEL: self._instance}, host_config=host)["Id"]
        self.client.start(container)
        return str(container)

    def _list(self, label: str, *, all: bool) -> list[str]:
        filters = {"label": f"{label}={self._instance}"}
        return [str(each["Id"]) for each in self.client.containers(all=all, quiet=True, filters=filters)]


@contextmanager
def _engine(plan: Plan, instance: str) -> Iterator[Engine]:
    client = APIClient(base_url=plan.engine, version="auto", timeout=ENGINE_S, max_pool_size=THREADS)
    try:
        engine = Engine(client, instance)
        try:
            yield engine
        finally:
            engine.remove_all()
    finally:
        client.close()


async def run(servers: Servers, plan: Plan) -> Report:
    """Measure on the engine of *plan*. The servers' folder must have the same path here and for the engine.

    Raises:
        StartError: The gateway does not start, or the image cannot be built.
        DockerException: An engine operation failed.
    """
    instance = f"bench-{uuid.uuid4().hex[:8]}"
    pool = {"slots": 1, "min_workers": 0, "max_workers": plan.sessions, "idle_worker_s": 0, "max_uses": 1}
    times = {"open_s": ALL_S, "start_s": 120, "idle_s": 2 * ALL_S}
    toml = steps_toml(ALONE, head={"isolation": "exclusive"}, pool=pool, timeouts=times, limits={"memory_mib": 64})
    with _engine(plan, instance) as engine:
        await asyncio.to_thread(build_image, engine.client, STEPS_FOLDER, STEPS_IMAGE, plan.base_image)
        sdk_s = await asyncio.to_thread(engine.start_all, plan.by_sdk)
        async with redis_server(servers.folder) as store:
            variables = write_catalog(servers.folder, **{ALONE: toml}) | {
                "GATEWAY_STORE": store.url,
                "GATEWAY_BACKEND": "docker",
                "GATEWAY_DOCKER_URL": plan.engine,
                "GATEWAY_INSTANCE": instance,
            }
            async with servers.running(GATEWAY, variables) as process:
                samples = await _play(process, engine, plan)
    samples.sdk_s = sdk_s
    return make_report(samples, plan=plan)


async def _play(process: ServerProcess, engine: Engine, plan: Plan) -> Samples:
    memory, gateway = _available_mib(), process.usage().rss_bytes
    async with connections(process.address, plan.sessions) as opened:
        steppers = [OrsStepper(connection, ALONE) for connection in opened]
        samples = Samples(await all_at_once(steppers, "open", within_s=ALL_S), Round(0.0))
        samples.alive = await asyncio.to_thread(engine.alive)
        samples.memory_mib = memory - _available_mib()
        samples.gateway_mib = (process.usage().rss_bytes - gateway) / 2**20
    # New connections, because the first were idle for longer than a server keeps a connection.
    async with connections(process.address, plan.sessions) as opened:
        for stepper, connection in zip(steppers, opened, strict=True):
            stepper.attach(connection)
        samples.stepped = await all_at_once(steppers, "step", within_s=ALL_S)
        ended = await all_at_once(steppers, "end", within_s=ALL_S)
    samples.errors = samples.opened.errors + samples.stepped.errors + ended.errors
    began_at = time.perf_counter()
    until = time.perf_counter() + ALL_S
    while (left := await asyncio.to_thread(engine.alive)) and time.perf_counter() < until:  # noqa: ASYNC110  # no event
        await asyncio.sleep(GONE_LOOK_S)
    samples.gone_s, samples.left = time.perf_counter() - began_at, left
    return samples


def _available_mib() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024
    return 0.0


# -- the report ---------------------------------------------------------------------------------------------------


def make_report(samples: Samples, *, plan: Plan) -> Report:
    """Turn samples into a report."""
    through, direct = ratio(plan.sessions, samples.opened.duration_s), ratio(plan.by_sdk, samples.sdk_s)
    return Report(
        name="many_containers",
        figures={
            "plan": asdict(plan),
            "opened_s": samples.opened.duration_s,
            "open": asdict(latencies(samples.opened.samples_s)) if samples.opened.samples_s else None,
            "step": asdict(latencies(samples.stepped.samples_s)) if samples.stepped.samples_s else None,
            "containers_alive": samples.alive,
            "gone_s": samples.gone_s,
            "machine_mib": samples.memory_mib,
            "gateway_mib": samples.gateway_mib,
            "sdk_s": samples.sdk_s,
            "errors": dict(samples.errors),
        },
        goals=_goals(samples, plan, ratio(through, direct)),
        tables=[_table(samples, plan, through, direct)],
        errors=sum(samples.errors.values()),
        not_comparable=(
            "The SDK creates and starts containers, eight at a time, and does not wait for them. The gateway's "
            "containers are hardened, ready and have a session.",
        ),
    )


def _goals(samples: Samples, plan: Plan, by_sdk: float) -> list[Goal]:
    what = f"{plan.sessions} sessions with a container each"
    errors = sum(samples.errors.values())
    return [
        Goal(
            id="S13",
            what="containers/s, opened by sessions at once through the gateway ÷ create + start by the SDK",
            value=by_sdk,
            bound=1.0,
            at_least=True,
            unit="x",
            is_goal=False,
        ),
        Goal(
            id="S13",
            what=f"{what}: containers alive at once",
            value=samples.alive,
            bound=plan.sessions,
            at_least=True,
        ),
        Goal(id="S13", what=f"{what}: failed opens, steps and ends", value=errors, bound=0),
        Goal(id="S13", what=f"{what}: containers left after their end", value=samples.left, bound=0),
    ]


def _table(samples: Samples, plan: Plan, through: float, direct: float) -> Table:
    stepped = latencies(samples.stepped.samples_s) if samples.stepped.samples_s else None
    rows: list[tuple[str, Any]] = [
        ("all open after, s", samples.opened.duration_s),
        ("sessions opened a second", through),
        ("containers started a second by the SDK", direct),
        ("containers alive", samples.alive),
        ("MiB of the machine, each", ratio(samples.memory_mib, plan.sessions)),
        ("KiB of the gateway, each", ratio(samples.gateway_mib * 1024, plan.sessions)),
        ("a step in each at once, p50, ms", stepped.p50_ms if stepped else float("inf")),
        ("a step in each at once, the last, ms", stepped.max_ms if stepped else float("inf")),
        ("all containers gone after, s", samples.gone_s),
    ]
    title = f"{plan.sessions} sessions at once, each with a container of its own"
    return Table(title, ["what", ""], [[what, number(value)] for what, value in rows])

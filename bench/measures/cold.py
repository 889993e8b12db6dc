"""Opening an episode on a Docker engine: with a start, and on a warm pool (S7, S6).

The reference of a cold create is the Docker SDK: create, start, and the first 200 of ``/health``, with the same body
that the gateway sends to the engine. The two take turns. Each waits until the other's container is gone.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from docker import APIClient

from bench.load.http1 import Address, Connection, connect, request_bytes
from bench.measures.opens import S6_P50_MS, S6_P99_MS, Opens, in_turn, open_figures, open_table
from bench.reporting.report import Goal, Report, Table, number
from bench.reporting.stats import Latencies, latencies, ratio
from bench.subjects.containers import build_image
from bench.subjects.processes import StartError
from bench.subjects.targets import ENVIRONMENTS, GATEWAY, Servers
from gateway.backends.docker.container import LABEL_INSTANCE, container_body
from gateway.catalog.toml import read_environment
from gateway.core.ids import WorkerId
from gateway.core.worker import Worker

ENGINE = "unix:///var/run/docker.sock"
BASE_IMAGE = "env-gateway/base:latest"
"""Image with Python and the environment server; ``scripts/build-images base`` makes it."""
IMAGE, NOOP_FOLDER = "env-gateway/bench-noop", ENVIRONMENTS / "noop"
S7_TIMES, S6_TIMES = 1.1, 75.0
READY_S = 30.0
GONE_S = 60.0
LOOK_S = 0.002
"""Seconds between two attempts to reach a starting worker."""
GONE_LOOK_S = 0.05
_HEALTH = request_bytes("GET", "/health", {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Numbers of openings."""

    engine: str = ENGINE
    base_image: str = BASE_IMAGE
    cold: int = 15
    warm: int = 500


QUICK = Plan(cold=5, warm=100)


@dataclass(frozen=True, slots=True)
class Samples:
    """All samples, in seconds."""

    gateway_s: list[float]
    """Seconds from ``/create`` to the prompt, with a new worker for each session."""
    sdk_s: list[float]
    """Seconds from the SDK's create to the first answer."""
    warm: Opens


class Engine:
    """The Docker engine, without the gateway."""

    def __init__(self, client: APIClient, instance: str, folder: Path) -> None:
        self.client = client
        self._instance = instance
        self._folder = folder
        self._environment = read_environment(ENVIRONMENTS / "cold" / "environment.toml")

    async def start(self) -> float:
        """Create, start and reach one container, then remove it. Return the seconds up to its answer."""
        id = WorkerId(secrets.token_hex(8))
        folder = self._folder / id
        folder.mkdir()
        folder.chmod(0o777)  # the worker runs as another user
        environment = self._environment
        worker = Worker(id=id, environment=environment.name, digest="", slots=1)
        body = container_body(worker, environment, instance=self._instance, source=str(folder))
        began_at = time.perf_counter()
        container = await asyncio.to_thread(self._create, body)
        try:
            await asyncio.to_thread(self.client.start, container)
            await _until_ready(folder / "worker.sock")
            return time.perf_counter() - began_at
        finally:
            await asyncio.to_thread(self.client.remove_container, container, force=True)

    async def until_gone(self) -> None:
        """Wait until no container of the cold environment is left.

        Raises:
            TimeoutError: A container is left after ``GONE_S``.
        """
        labels = [f"{LABEL_INSTANCE}={self._instance}", f"env-gateway.environment={self._environment.name}"]
        async with asyncio.timeout(GONE_S):
            while await self._left(labels):  # noqa: ASYNC110  # there is no event to wait for
                await asyncio.sleep(GONE_LOOK_S)

    def remove_all(self) -> None:
        """Remove the remaining containers of this run."""
        label = f"{LABEL_INSTANCE}={self._instance}"
        for container in self.client.containers(all=True, quiet=True, filters={"label": label}):
            self.client.remove_container(container["Id"], force=True)

    async def _left(self, labels: list[str]) -> list[Any]:
        look = partial(self.client.containers, all=True, quiet=True, filters={"label": labels})
        found: list[Any] = await asyncio.to_thread(look)
        return found

    def _create(self, body: dict[str, Any]) -> str:
        return str(self.client.create_container_from_config(body)["Id"])  # type: ignore[no-untyped-call]  # not ours


async def _until_ready(socket: Path) -> None:
    async with asyncio.timeout(READY_S):
        while (connection := await _try(socket)) is None:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(LOOK_S)
        try:
            response = await connection.request(_HEALTH)
        finally:
            connection.close()
    if response.status != 200:
        raise StartError(f"/health answers {response.status}")


async def _try(socket: Path) -> Connection | None:
    try:
        return await connect(Address(socket=str(socket)))
    except (FileNotFoundError, ConnectionRefusedError):
        return None


@contextmanager
def bare_engine(url: str, instance: str, folder: Path) -> Iterator[Engine]:
    """Connect to the engine at *url*. Remove the containers of *instance* on leaving."""
    client = APIClient(base_url=url, version="auto")
    try:
        engine = Engine(client, instance, folder)
        try:
            yield engine
        finally:
            engine.remove_all()
    finally:
        client.close()


async def run(servers: Servers, plan: Plan) -> Report:
    """Measure on the engine of *plan*. The servers' folder must have the same path here and for the engine.

    Raises:
        StartError: The gateway or a container does not start.
        DockerException: An engine operation failed.
    """
    instance = f"bench-{uuid.uuid4().hex[:8]}"
    variables = {"GATEWAY_BACKEND": "docker", "GATEWAY_DOCKER_URL": plan.engine, "GATEWAY_INSTANCE": instance}
    with bare_engine(plan.engine, instance, servers.folder) as engine:
        await asyncio.to_thread(build_image, engine.client, NOOP_FOLDER, IMAGE, plan.base_image)
        async with servers.running(GATEWAY, variables) as process:
            address = process.address
            samples = Samples([], [], warm=await in_turn(address, plan.warm))
            await engine.start()  # the first start of each side does not count
            for turn in range(plan.cold + 1):
                await engine.until_gone()
                opened = await in_turn(address, 1, environment="cold", warmup=False)
                await engine.until_gone()
                started_s = await engine.start()
                if turn:
                    samples.gateway_s.extend(opened.first_prompt_s)
                    samples.sdk_s.append(started_s)
    return make_report(samples, plan=plan)


def make_report(samples: Samples, *, plan: Plan) -> Report:
    """Turn samples into a report."""
    cold_table = Table(
        "A container for each session, ms",
        ["way", "p50", "least", "most"],
        [
            ["create to prompt through the gateway", *_row(samples.gateway_s)],
            ["the SDK's create + start + ready", *_row(samples.sdk_s)],
        ],
    )
    return Report(
        name="docker",
        figures={
            "plan": asdict(plan),
            "cold_gateway_ms": [each * 1e3 for each in samples.gateway_s],
            "cold_sdk_ms": [each * 1e3 for each in samples.sdk_s],
            "warm": open_figures(samples.warm),
        },
        goals=_goals(samples, latencies(samples.warm.first_prompt_s)),
        tables=[
            cold_table,
            open_table("Opening an episode on a warm pool of containers, ms: p50 / p99", {GATEWAY: samples.warm}),
        ],
        not_comparable=("The SDK's time ends with the worker's first answer, the gateway's with the first prompt.",),
    )


def _goals(samples: Samples, warm: Latencies) -> list[Goal]:
    through, direct = median(samples.gateway_s) * 1e3, median(samples.sdk_s) * 1e3
    what = "a container's create + start + ready by the SDK"
    return [
        Goal(
            id="S7",
            what=f"cold create to first prompt ÷ {what}",
            value=ratio(through, direct),
            bound=S7_TIMES,
            unit="x",
        ),
        Goal(
            id="S6",
            what=f"{what} ÷ create to first prompt on a warm pool",
            value=ratio(direct, warm.p50_ms),
            bound=S6_TIMES,
            at_least=True,
            unit="x",
        ),
        *(
            Goal(
                id="S6",
                what=f"create to first prompt on a warm pool of containers, {share}",
                value=value,
                bound=bound,
                unit="ms",
            )
            for share, value, bound in (("p50", warm.p50_ms, S6_P50_MS), ("p99", warm.p99_ms, S6_P99_MS))
        ),
    ]


def _row(samples_s: list[float]) -> list[str]:
    return [number(each * 1e3) for each in (median(samples_s), min(samples_s), max(samples_s))]

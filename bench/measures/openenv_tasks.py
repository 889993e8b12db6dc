"""A reset with a new custom task, against its cost without custom tasks: a container for each task (OpenEnv).

If a container's variables select an environment's task, another task needs another container: created, started,
reached. The reference is the Docker SDK with the same image. The part needs an engine and ``env-gateway/base``.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from bench.load.episodes import WrongAnswer
from bench.load.http1 import Address
from bench.load.websocket import Player, connect_socket, frame
from bench.measures.cold import BASE_IMAGE, ENGINE, IMAGE, NOOP_FOLDER, bare_engine
from bench.reporting.report import Goal, Report, Table, number
from bench.reporting.stats import latencies, ratio
from bench.subjects.containers import build_image
from bench.subjects.targets import GATEWAY, Servers

TIMES = 75.0
"""Factor that S6 requires between a warm pool and a container's start."""
_ECHO = frame(b'{"type":"step","data":{"type":"call_tool","tool_name":"echo","arguments":{"text":"hi"}}}')


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Numbers of containers and resets."""

    engine: str = ENGINE
    base_image: str = BASE_IMAGE
    containers: int = 15
    resets_each: int = 30
    """Number of resets between two containers."""


QUICK = Plan(containers=5)


async def run(made: Servers, plan: Plan) -> Report:
    """Measure on the engine of *plan*. The servers' folder must have the same path here and for the engine.

    Raises:
        StartError: The gateway or a container does not start.
        DockerException: An engine operation failed.
    """
    instance = f"bench-{uuid.uuid4().hex[:8]}"
    variables = {"GATEWAY_BACKEND": "docker", "GATEWAY_DOCKER_URL": plan.engine, "GATEWAY_INSTANCE": instance}
    with bare_engine(plan.engine, instance, made.folder) as engine:
        await asyncio.to_thread(build_image, engine.client, NOOP_FOLDER, IMAGE, plan.base_image)
        async with made.running(GATEWAY, variables | {"GATEWAY_ENVIRONMENTS": "noop"}) as process:
            await _resets(process.address, plan.resets_each)
            await engine.start()  # the first reset and the first start do not count
            resets: list[float] = []
            containers: list[float] = []
            for _ in range(plan.containers):
                resets += await _resets(process.address, plan.resets_each)
                containers.append(await engine.start())
    return make_report(resets, containers, plan=plan)


async def _resets(address: Address, count: int) -> list[float]:
    """Return the seconds of *count* resets, each with its own task. A step checks that the task is played."""
    player = Player(await connect_socket(address, "/openenv/noop/ws"))
    found = []
    try:
        for _ in range(count):
            name = f"custom/{uuid.uuid4().hex}"
            task: dict[str, Any] = {"id": name, "env_type": "noop", "instruction": name, "config": {"level": name}}
            began_at = time.perf_counter()
            observation = await player.reset(task=task)
            found.append(time.perf_counter() - began_at)
            if observation["metadata"]["task_id"] != name:
                raise WrongAnswer(f"reset: {observation!r}"[:200])
            if b'"hi"' not in (answer := await player.socket.request(_ECHO)):
                raise WrongAnswer(f"step: {answer!r}"[:200])
    finally:
        player.socket.close()
    return found


def make_report(resets: list[float], containers: list[float], *, plan: Plan) -> Report:
    """Turn samples in seconds into a report."""
    warm, cold = latencies(resets), median(containers) * 1e3
    rows = [
        ["reset with a task of its own, through the gateway", *map(number, (warm.p50_ms, warm.p99_ms, warm.max_ms))],
        ["the SDK's create + start + ready of a container", number(cold), "", number(max(containers) * 1e3)],
    ]
    return Report(
        name="openenv_tasks",
        figures={
            "plan": asdict(plan),
            "resets": asdict(warm),
            "containers_ms": [each * 1e3 for each in containers],
        },
        goals=[
            Goal(
                id="S6",
                what="a container's create + start + ready by the SDK ÷ reset with a custom task over OpenEnv",
                value=ratio(cold, warm.p50_ms),
                bound=TIMES,
                at_least=True,
                unit="x",
                is_goal=False,
            )
        ],
        tables=[Table("From one task to another, ms", ["way", "p50", "p99", "most"], rows)],
        not_comparable=(
            "The time of a container ends with its first answer, the time of a reset with the first observation.",
        ),
    )

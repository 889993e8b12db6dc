"""One, two and three machines: the cost of the way through a ``gateway node``, and the spread of load (S13).

The machines are those of `scripts/swarm-lab`. For each number of machines there is a gateway with its own store,
instance and nodes. A further gateway (``local``) has its workers in this machine's containers. They take turns.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TypeVar

from bench.load.closed_loop import Step, connections, load
from bench.load.episodes import WrongAnswer
from bench.load.steps import OrsStepper, all_at_once
from bench.measures.cold import BASE_IMAGE, ENGINE
from bench.measures.many_containers import ALONE
from bench.measures.nodes_report import Exclusive, Way, make_report, name_of
from bench.reporting.grid import rotated
from bench.reporting.report import Report
from bench.subjects.catalogs import STEPS, STEPS_FOLDER, STEPS_IMAGE, steps_toml
from bench.subjects.clusters import HERE, Cluster, Clusters
from bench.subjects.containers import build_image
from bench.subjects.lab import GATEWAY_IMAGE, Lab, Machine, machine, running_lab
from bench.subjects.processes import StartError
from bench.subjects.targets import Servers

T = TypeVar("T")
ALL_S = 300
GONE_LOOK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Numbers and durations of the measurement."""

    engine: str = ENGINE
    base_image: str = BASE_IMAGE
    gateway_image: str = GATEWAY_IMAGE
    lab_name: str = "swben"
    lab_net: str = "198.18.91"
    machines: int = 3
    callers: int = 64
    workers: int = 6
    """Number of warm workers of each gateway, for any number of machines."""
    rest_s: float = 6.0
    """Seconds of rest in which the idle usage is measured."""
    rounds: int = 5
    bursts: int = 8
    """Number of bursts of openings in a round."""
    steps_s: float = 3.0
    exclusive: int = 24
    exclusive_rounds: int = 3


QUICK = Plan(rest_s=3.0, rounds=2, bursts=4, steps_s=1.5, exclusive=12, exclusive_rounds=1)


async def run(servers: Servers, plan: Plan, *, instance: str = "", lock: int | None = None) -> Report:
    """Start a lab, measure, and remove it. The servers' folder must have the same path here and for the engine.

    Args:
        servers: Makes the gateways.
        plan: The plan of the measurement.
        instance: Prefix of the labels of all containers. If empty, a unique prefix.
        lock: Descriptor of the lab's lock, if the caller has it.

    Raises:
        StartError: The lab, a node or a gateway does not start, or an image is not available.
        DockerException: An engine operation failed.
    """
    instance = instance or f"bench-{uuid.uuid4().hex[:8]}"
    lab = Lab(plan.lab_name, plan.lab_net, plan.machines, lock)
    async with AsyncExitStack() as stack:
        here = stack.enter_context(_here(plan, f"{instance}-0"))
        await asyncio.to_thread(build_image, here.client, STEPS_FOLDER, STEPS_IMAGE, plan.base_image)
        if not await asyncio.to_thread(here.has_image, plan.gateway_image):
            raise StartError(f"no image {plan.gateway_image}; scripts/build-images gateway makes it")
        await stack.enter_async_context(running_lab(lab))
        await lab.run("load", plan.gateway_image, engine=plan.engine)
        machines = [
            stack.enter_context(machine(f"node{place}", lab.engine(place))) for place in range(1, plan.machines + 1)
        ]
        await asyncio.to_thread(machines[0].take_image, STEPS_IMAGE, here)
        made = Clusters(
            servers,
            lab,
            machines=[here, *machines],
            engine=plan.engine,
            instance=instance,
            image=plan.gateway_image,
            catalog=environments(plan),
            warm=plan.workers,
        )
        await made.prepare()
        # Before any worker exists, because a worker would start on the machine that has its image.
        spread_s = await made.spread()
        clusters = [await stack.enter_async_context(made.running(count)) for count in range(plan.machines + 1)]
        await _play(clusters, plan)
    return make_report([cluster.way for cluster in clusters], spread_s, plan=asdict(plan))


# -- subjects -----------------------------------------------------------------------------------------------------


@contextmanager
def _here(plan: Plan, instance: str) -> Iterator[Machine]:
    """Yield this machine. Remove the containers of *instance* on leaving."""
    with machine(HERE, plan.engine) as here:
        try:
            yield here
        finally:
            here.remove_instance(instance)


def environments(plan: Plan) -> dict[str, str]:
    """Return the shared environment with its warm workers, and an exclusive environment for each round."""
    # The sessions of the last burst may still be closing when a burst starts.
    slots = 2 * plan.callers // plan.workers + 4
    shared = {"slots": slots, "min_workers": plan.workers, "max_workers": plan.workers}
    alone = {"slots": 1, "min_workers": 0, "max_workers": plan.exclusive, "idle_worker_s": 0, "max_uses": 1}
    times = {"open_s": ALL_S, "start_s": 120, "idle_s": 2 * ALL_S}
    limits = {"memory_mib": 64}
    return {STEPS: steps_toml(STEPS, pool=shared)} | {
        name: steps_toml(name, head={"isolation": "exclusive"}, pool=alone, timeouts=times, limits=limits)
        for name in map(alone_in, range(plan.exclusive_rounds))
    }


def alone_in(turn: int) -> str:
    """Return a round's exclusive environment. After a burst, the gateway keeps new workers ready in it for a while."""
    return f"{ALONE}-{turn}"


# -- rounds -------------------------------------------------------------------------------------------------------


async def _play(clusters: Sequence[Cluster], plan: Plan) -> None:
    for cluster in clusters:
        # The first round has one-time costs: connections to machines, code that runs for the first time.
        await _round(cluster, plan, counts=False)
    await _rest(clusters, plan.rest_s)
    for turn in range(plan.rounds):
        for cluster in rotated(clusters, turn):
            await _round(cluster, plan)
    for cluster in clusters:
        cluster.way.rss_mib = cluster.rss_mib()
    for turn in range(plan.exclusive_rounds):
        for cluster in rotated(clusters, turn):
            cluster.way.exclusive.append(await _exclusive(cluster, alone_in(turn), plan.exclusive))


async def _rest(clusters: Sequence[Cluster], seconds: float) -> None:
    """Record the usage of each gateway without requests."""
    before = [cluster.usage() for cluster in clusters]
    began_at = time.perf_counter()
    await asyncio.sleep(seconds)
    took_s = time.perf_counter() - began_at
    for cluster, used in zip(clusters, before, strict=True):
        now = cluster.usage()
        cluster.way.rest = {part: (now[part].cpu_s - used[part].cpu_s) / took_s for part in now}


async def _round(cluster: Cluster, plan: Plan, *, counts: bool = True) -> None:
    """Run bursts of openings, and then steps of the last burst's sessions."""
    way = cluster.way if counts else Way(cluster.way.machines)
    async with connections(cluster.process.address, plan.callers) as opened:
        steppers: list[OrsStepper] = []
        for _ in range(plan.bursts if counts else 1):
            if steppers:
                way.errors += (await all_at_once(steppers, "end", within_s=ALL_S)).errors
            steppers = [OrsStepper(connection, STEPS) for connection in opened]
            way.opens.append(await all_at_once(steppers, "open", within_s=ALL_S))
        before = cluster.usage()
        became = await load([_stepping(stepper) for stepper in steppers], duration_s=plan.steps_s if counts else 0.5)
        way.steps.add(became, before, cluster.usage())
        way.sessions = await cluster.sessions()
        way.errors += (await all_at_once(steppers, "end", within_s=ALL_S)).errors
    if not counts and (errors := way.all_errors()):
        raise StartError(f"{name_of(way.machines)}: {dict(errors)}:\n{cluster.process.tail()}")


async def _exclusive(cluster: Cluster, environment: str, count: int) -> Exclusive:
    """Open and end concurrent sessions with a container each."""
    async with connections(cluster.process.address, count) as opened:
        steppers = [OrsStepper(connection, environment) for connection in opened]
        found = Exclusive(await all_at_once(steppers, "open", within_s=ALL_S))
        containers = await cluster.containers(environment)
    found.containers = {name: len(ids) for name, ids in containers.items()}
    # New connections, because the first may have been idle for longer than a server keeps a connection.
    async with connections(cluster.process.address, count) as opened:
        for stepper, connection in zip(steppers, opened, strict=True):
            stepper.attach(connection)
        cluster.way.errors += (await all_at_once(steppers, "end", within_s=ALL_S)).errors
    began_at = time.perf_counter()
    left = {id for ids in containers.values() for id in ids}
    while left := left & {id for ids in (await cluster.containers(environment)).values() for id in ids}:
        if time.perf_counter() > began_at + ALL_S:
            break
        await asyncio.sleep(GONE_LOOK_S)
    found.gone_s, found.left = time.perf_counter() - began_at, len(left)
    return found


def _stepping(stepper: OrsStepper) -> Step:
    async def step(number: int) -> None:
        token = str(number)
        said = await stepper.step(token)
        if said.token != token or said.doubled:
            raise WrongAnswer(f"step: {said}, and {token!r} was asked for once")

    return step
